"""The training loop, top to bottom: one iteration is a rollout and an update.

    tasks        next P tasks                                  -> list[Task]
    episodes     begun at once, N x M of each task             environments start while strategies are drawn
    strategies   propose, select                               -> candidates (P, C), kept (P, N)
    trajectories rollout and judgment                          -> records (P, N, M)
    log-probs    those of the old policy settled               -> the same records
    credit       returns and advantages of both levels         -> tensors (P, N), (P, N, M, K)
    rows         flattened once                                -> list[Row]
    update       epochs x mini-batches x micro-batches of ONE loss, global denominators
    log, evaluate, save

A flat method is the same loop with N = 1 group of all rollouts and no strategies.  What has to survive the process is in
`Trainer.checkpoints.parts`.  Deliberately absent: replay of old iterations, any mention of an algorithm's name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsg import metrics as mx
from hsg import stopping
from hsg.batch import Row, build_rows
from hsg.build import make_frozen, make_judge, make_policy, training_tasks
from hsg.checkpoint import Checkpoints
from hsg.companions import Companions
from hsg.config import Config
from hsg.console import Console
from hsg.credit import assign_credit
from hsg.distributed import Distributed
from hsg.episode import Episode, Request
from hsg.evaluation import evaluate, evaluation_tasks
from hsg.faults import check_faults, fault_metrics
from hsg.generation import derive_seed
from hsg.judge import Judge
from hsg.learner import Learner, UpdateCosts
from hsg.models import load_encoder
from hsg.protocol import Task, TaskSet
from hsg.records import iteration_records
from hsg.refill import Dropped, Played, refill, spare_tasks
from hsg.reflection import Draw, ReflectionBuffers, attempt_of
from hsg.rollout import Rollout, RolloutCosts
from hsg.speed import Arithmetic, Clock, matmul_rate, peak_memory_mb
from hsg.strategies import propose, select, show_strategies
from hsg.tracking import RunFolder
from hsg.types import Candidates, Trajectory
from hsg.underway import Collected


class Trainer:
    """One run: `train()` goes through `train.iterations` iterations. `model_path` is the policy that the run began with.

    `resume`: the checkpoint to go on from.
    """

    def __init__(
        self,
        config: Config,
        task_set: TaskSet,
        model_path: str,
        distributed: Distributed,
        run: RunFolder | None,
        *,
        resume: Path | None = None,
    ) -> None:
        self.config, self.task_set, self.distributed, self.run = config, task_set, distributed, run
        self.console = Console(config, is_main=distributed.is_main)
        self.tasks = training_tasks(config, task_set)
        self.evaluation_tasks = evaluation_tasks(config, task_set)
        self.policy = make_policy(config, resume / "model" if resume else model_path, distributed.device)
        self.model = self.policy.model
        whole = config.strategy.per == "episode"
        self.embed = load_encoder(config.model.encoder, distributed.device).embed if whole else None
        needs_reference = config.loss.kl_coef > 0 or (config.judge.enabled and config.judge.model == "reference")
        self.reference = make_frozen(config, model_path, distributed) if needs_reference else None
        self.rollout = Rollout(config, self.policy, task_set)
        self.judge = self._make_judge() if config.judge.enabled else None
        self._arithmetic = Arithmetic(self.model)
        self._matmul_rate = matmul_rate(distributed.device, self.model.compute_dtype)
        self._begun: dict[int, list[Episode]] = {}  # iteration -> episodes whose environments are starting
        self.companions = Companions(config, self.model, model_path, distributed)
        self.environment_turns = 0  # played in all, dropped ones too
        self.reflection = ReflectionBuffers(config.reflection)
        self.learner = Learner(
            config,
            self.model,
            distributed,
            context_limit=self.policy.context_limit,
            reference=None if self.reference is None else self.reference.model,
        )
        self.iteration, self.model_path = 0, model_path
        self._evaluated = 0  # the iteration after which the last evaluation was
        self._seconds, self._late = 0.0, False
        self._began: float | None = None
        self._collected: Collected | None = None  # of the iteration whose update is under way
        self.checkpoints = Checkpoints(config.checkpoint.keep, distributed)
        # Whatever else has a state (a buffer, a curriculum, another network's optimizer) adds itself here.
        self.checkpoints.parts |= {"trainer": self, "learner": self.learner, "reflection": self.reflection}
        self.checkpoints.parts["companions"] = self.companions
        if resume:
            self.iteration = self.checkpoints.load(resume)

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself has to remember. The tasks follow from the seed and the iteration."""
        state: dict[str, Any] = {"model_path": self.model_path, "seconds": self.seconds, "evaluated": self._evaluated}
        state["environment_turns"] = self.environment_turns
        if self._collected is not None:
            state["collected"] = self.distributed.gather([self._collected.state_dict()])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds, self._evaluated = state["seconds"], state["evaluated"]
        self.environment_turns = state["environment_turns"]
        self._late = self._has_had_its_share()
        if "collected" in state:
            self._collected = Collected.join(self.distributed.share(state["collected"]))

    @property
    def seconds(self) -> float:
        """Wall time of all iterations so far, those before a resume too."""
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def _make_judge(self) -> Judge:
        config = self.config
        judged_by = self.policy
        if config.judge.model == "reference":
            assert self.reference is not None
            judged_by = self.reference
        elif config.judge.model != "self":
            judged_by = make_frozen(config, config.judge.model, self.distributed)
        return make_judge(config, self.rollout, judged_by)

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> int:
        """The iterations that are left, with evaluations and checkpoints as the config asks. Returns how many there were.

        Asked to stop, it saves and raises `Stopped`.
        """
        self._began = time.monotonic()
        try:
            with stopping.patience():
                if self.iteration:
                    self._evaluate_and_save()  # where a resumed run was stopped before it could
                elif self.config.checkpoint.initial:
                    self.save()
                while not self._over():
                    values = self.iterate(self.iteration)
                    self.iteration += 1
                    self.environment_turns += int(values["cost/environment_turns"])
                    self._late = self.distributed.from_main(self._has_had_its_share())
                    if self.run is not None:
                        self.run.metrics(self.iteration - 1, values)
                        self.console.line(self.iteration, values)
                    self._evaluate_and_save()
                    self.distributed.stop_together()
        except stopping.Stopped:
            self.save()
            raise
        self._seconds, self._began = self.seconds, None
        self._abandon_begun()  # they would hold their engines while the last evaluations play
        return self.iteration

    def _over(self) -> bool:
        return self._late or self.iteration >= self.config.train.iterations or not self.config.train.enabled

    def _has_had_its_share(self) -> bool:
        """Whether the run has used up its time or its environment turns."""
        limits = (self.config.train.max_seconds, self.config.train.max_environment_turns)
        spent = (self.seconds, self.environment_turns)
        return any(limit is not None and used >= limit for limit, used in zip(limits, spent, strict=True))

    def _evaluate_and_save(self) -> None:
        """What is due between two iterations."""
        every = self.config.evaluation.every
        if every and self.iteration % every == 0 and self._evaluated != self.iteration:
            self.evaluate(self.iteration, "training")
            self._evaluated = self.iteration
        every = self.config.checkpoint.every
        if self._over() or (every and self.iteration % every == 0):
            self.save()

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics."""
        clock = Clock()
        rows: list[Row] | None = None  # the update goes on where a checkpoint was written
        if self._collected is None:
            rows, self._collected = self._collect(iteration, clock)
        collected = self._collected
        if iteration + 1 < self.config.train.iterations:
            # The next episodes need no policy to start, and the environments' cores are idle while the model learns.
            following = self.distributed.share(list(enumerate(self.next_tasks(iteration + 1))))
            self._begun[iteration + 1] = self._begin(iteration + 1, following)
        with clock("update"), self.checkpoints.rows_dumped(self.run, iteration, self.model, self.policy.tokenizer):
            update_values = self.learner.update(rows, iteration)
        self._collected = None
        with clock("records"):
            records = self.distributed.gather(collected.records)
            if self.run is not None:
                self.run.trajectories(iteration, records)

        spent, self.learner.costs = self.learner.costs, UpdateCosts()
        drawn = [collected.costs.strategy, collected.costs.rollout]
        if self.judge is not None and self.judge.model is self.model:  # another model's work is not this one's
            drawn.append(collected.costs.judge)
        sums = collected.sums | mx.update_costs(vars(spent))
        sums |= mx.speed_metrics(drawn, vars(spent), self._arithmetic, self._matmul_rate, clock.total())
        merged = mx.merge(self.distributed.gather([sums]))
        waited, self.rollout.pool.waited_seconds = self.rollout.pool.waited_seconds, 0.0
        times = {f"time/{name}_seconds": seconds for name, seconds in clock.seconds.items()}
        times |= {"time/iteration_seconds": clock.total(), "time/environment_wait_seconds": waited}
        times["memory/peak_mb"] = self.distributed.max(peak_memory_mb(self.distributed.device))
        return {**mx.finish(merged), **update_values, **times}

    def _collect(self, iteration: int, clock: Clock) -> tuple[list[Row], Collected]:
        """Everything before the update: this rank's rows, and what the log wants to know of them."""
        config = self.config
        num_strategies, num_rollouts = config.group_shape
        mine = self.distributed.share(list(enumerate(self.next_tasks(iteration))))
        costs = RolloutCosts()

        episodes = self._begun.pop(iteration, None) or self._begin(iteration, mine)  # P*N*M, row-major
        models = [self.model, *([self.judge.model] if self.judge else [])]
        with self.distributed.stoppable(), self.distributed.forwards(*models, weights=config.rollout.weights):
            groups = self._play(iteration, mine, episodes, costs, clock)
            groups, dropped = self._refill(iteration, groups, costs, clock)
        mine, candidates, played, judged = groups.places, groups.candidates, groups.trajectories, groups.judgments
        check_faults(config, self.distributed, played)
        with clock("old_logprobs"):
            candidates, played = self._settle_logprobs(candidates, played)
        self._remember(played)
        trajectories = _nest(played, num_strategies, num_rollouts)  # (P, N, M)
        judgments = _nest(judged, num_strategies, num_rollouts)  # (P, N, M)

        with clock("companions"), self.distributed.forwards(self.model, weights="gathered"):
            signals = self.companions.read(played)
        strategies = None if candidates is None else [c.kept for c in candidates]
        credit = assign_credit(config, strategies, trajectories, judgments, signals, self.distributed.gather)
        sums = mx.rollout_metrics(candidates, trajectories, judgments, credit)
        if self.reflection.enabled:
            sums |= mx.reflection_metrics(groups.draws, trajectories)
        sums |= mx.played_metrics(trajectories, vars(dropped), config.rollout.turn_cap(iteration))
        sums |= mx.cost_metrics(vars(costs), trajectories) | fault_metrics(self.rollout.errors)
        self.rollout.errors = []
        with clock("companions"):
            sums |= self.companions.learn(played, credit, iteration)
        records = []
        if mine:
            records = iteration_records(config, mine[0][0], candidates, trajectories, judgments, credit)
        return build_rows(strategies, trajectories, credit), Collected(sums, records, costs)

    def _begin(self, iteration: int, places: Sequence[tuple[int, Task]]) -> list[Episode]:
        """Start the N*M environments of each place's task; nobody waits for them yet."""
        return self.rollout.begin(self._requests(iteration, places), self.config.rollout.turn_cap(iteration))

    def _play(
        self,
        iteration: int,
        places: list[tuple[int, Task]],
        episodes: list[Episode],
        costs: RolloutCosts,
        clock: Clock,
    ) -> Played:
        """Strategies for the tasks, then their episodes to their ends."""
        config = self.config
        tasks = [task for _, task in places]
        candidates: list[Candidates] | None = None
        draws = self._reflect(iteration, tasks, episodes)
        if self.embed is not None:
            candidates = self._draw_strategies(iteration, tasks, episodes, draws, costs, clock)
            show_strategies(config, [s.text for c in candidates for s in c.kept], episodes)
        with clock("rollout"), self.console.bar(f"iteration {iteration}", len(episodes)) as bar:
            played, judged = self.rollout.play(
                episodes,
                temperature=config.temperature.action,
                strategy_temperature=config.temperature.strategy,
                costs=costs,
                judge=self.judge,
                on_progress=lambda finished: bar.update(finished - bar.n),
            )
        return Played(places, candidates, played, judged, draws)

    def _refill(self, iteration: int, played: Played, costs: RolloutCosts, clock: Clock) -> tuple[Played, Dropped]:
        """Dead groups replaced, where `rollout.max_refills` allows it."""

        def play(places: list[tuple[int, Task]]) -> Played:
            return self._play(iteration, places, self._begin(iteration, places), costs, clock)

        spare = spare_tasks(self.tasks, self.next_tasks(iteration), self.config.seed, iteration)
        return refill(played, spare, self.config.num_tasks, self.config.rollout.max_refills, play)

    def next_tasks(self, iteration: int) -> list[Task]:
        """P tasks. Each pass over the training tasks is a fresh shuffle, cut into iterations; a short rest waits."""
        per_pass = len(self.tasks) // self.config.num_tasks
        number, place = divmod(iteration, per_pass)
        order = list(range(len(self.tasks)))
        random.Random(derive_seed("tasks", self.config.seed, number)).shuffle(order)
        begin = place * self.config.num_tasks
        return [self.tasks[i] for i in order[begin : begin + self.config.num_tasks]]

    def _requests(self, iteration: int, mine: Sequence[tuple[int, Task]]) -> list[Request]:
        seed = self.config.seed
        num_strategies, num_rollouts = self.config.group_shape
        return [
            Request(
                task,
                index,
                # All rollouts of a task start from the same world: only what the policy does may differ.
                derive_seed("environment", seed, iteration, task.id),
                n,
                m,
                ("rollout", seed, iteration, task.id, n, m),
            )
            for index, task in mine
            for n in range(num_strategies)
            for m in range(num_rollouts)
        ]

    def _draw_strategies(
        self,
        iteration: int,
        tasks: Sequence[Task],
        episodes: Sequence[Episode],
        draws: Sequence[Draw],
        costs: RolloutCosts,
        clock: Clock,
    ) -> list[Candidates]:
        config = self.config
        if not tasks:
            return []
        assert self.embed is not None
        per_task = len(episodes) // len(tasks)
        observations = []
        with clock("environment_start"):
            for p in range(len(tasks)):
                group = episodes[p * per_task : (p + 1) * per_task]
                observations.append(_first_observation(group))
        keys: list[tuple[object, ...]] = [("rollout", config.seed, iteration, task.id) for task in tasks]
        with clock("strategies"):
            drawn = propose(
                config,
                self.policy,
                self.rollout.prompts,
                observations,
                keys,
                num_candidates=config.num_candidates,
                temperature=config.temperature.strategy,
                cost=costs.strategy,
                reflections=[draw.shown for draw in draws] if draws else None,
            )  # (P, C)
        with clock("selection"):
            return [select(config, texts, self.embed, key) for texts, key in zip(drawn, keys, strict=True)]

    def _reflect(self, iteration: int, tasks: Sequence[Task], episodes: Sequence[Episode]) -> list[Draw]:
        """Which earlier attempts are shown: one draw per task before its strategies, else one per rollout, (P,) or (P*G,)."""
        if not self.reflection.enabled:
            return []
        if self.embed is not None:
            seed = self.config.seed
            return [self.reflection.draw(task.id, ("rollout", seed, iteration, task.id)) for task in tasks]
        draws = [self.reflection.draw(e.request.task.id, e.request.key) for e in episodes]
        for episode, draw in zip(episodes, draws, strict=True):
            episode.reflection = draw.shown
        return draws

    def _remember(self, played: Sequence[Trajectory]) -> None:
        """Put what was played into the buffers of every rank, in the order of tasks and rollouts."""
        if not self.reflection.enabled:
            return
        mine = [(t.task.id, attempt, t.success) for t in played if (attempt := attempt_of(t)) is not None]
        for task_id, attempt, success in self.distributed.gather(mine):
            self.reflection.add(task_id, [(attempt, success)])

    def _settle_logprobs(
        self, candidates: list[Candidates] | None, played: Sequence[Trajectory]
    ) -> tuple[list[Candidates] | None, list[Trajectory]]:
        """The same records with the log-probs that ratios start from (see `Learner.settle_logprobs`)."""
        tokens = [row for t in played if t.valid for row in t.rows]
        tokens += [s.tokens for c in candidates or () for s in c.kept]
        new = dict(zip(map(id, tokens), self.learner.settle_logprobs(tokens), strict=True))
        played = [replace(t, rows=tuple(new.get(id(row), row) for row in t.rows)) for t in played]
        if candidates is not None:
            candidates = [
                replace(c, strategies=tuple(replace(s, tokens=new.get(id(s.tokens), s.tokens)) for s in c.strategies))
                for c in candidates
            ]
        return candidates, played

    # ------------------------------------------------------------------------------------------- evaluating and saving

    def evaluate(self, iteration: int, label: str, **options: Any) -> dict[str, Any]:
        """Evaluate the current policy on the fixed tasks and write it down."""
        tasks = options.pop("tasks", self.evaluation_tasks)
        given = (self.config, self.policy, self.task_set, tasks, self.distributed)
        record = evaluate(*given, label=label, iteration=iteration, **options)
        if self.run is not None:
            self.run.evaluation(record)
        return record

    def save(self) -> None:
        """Write a checkpoint of the current policy, and of all that the run needs to go on."""
        steps = self.learner.underway.num_done if self.learner.underway else 0
        self.checkpoints.save(self.run, self.iteration, self.model, self.policy.tokenizer, steps=steps)

    def close(self) -> None:
        """Let the environments go."""
        self._abandon_begun()
        self.rollout.close()

    def _abandon_begun(self) -> None:
        """Close the environments that were begun for an iteration that never came."""
        for episode in (e for episodes in self._begun.values() for e in episodes):
            episode.abandon()
        self._begun.clear()


def _first_observation(group: Sequence[Episode]) -> str:
    """What the first episode of a task that starts at all shows; all of them show the same."""
    for episode in group:
        episode.wait()
        if episode.first_observation is not None:
            return episode.first_observation
    return ""


def _nest(flat: Sequence[Any], num_strategies: int, num_rollouts: int) -> list[list[list[Any]]]:
    """A row-major list of P*N*M records as nested lists (P, N, M)."""
    groups = [list(flat[i : i + num_rollouts]) for i in range(0, len(flat), num_rollouts)]
    return [groups[i : i + num_strategies] for i in range(0, len(groups), num_strategies)]
