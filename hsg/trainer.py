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

A flat method is the same loop with N = 1 group of all rollouts and no strategies.  Deliberately absent: replay of old
iterations, any mention of an algorithm's name, exact resume.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hsg import metrics as mx
from hsg.batch import Row, build_rows
from hsg.chat import ChatFormat
from hsg.checkpoint import save_checkpoint
from hsg.config import Config
from hsg.credit import assign_credit
from hsg.distributed import Distributed
from hsg.episode import Episode, Request
from hsg.evaluation import evaluate, evaluation_tasks, split_tasks
from hsg.generation import derive_seed
from hsg.judge import Judge
from hsg.learner import Learner, UpdateCosts
from hsg.models import load_encoder, load_policy, stop_ids
from hsg.protocol import FAULTS, Task, TaskSet
from hsg.records import iteration_records
from hsg.reflection import Draw, ReflectionBuffers, attempt_of
from hsg.rollout import Policy, Rollout, RolloutCosts
from hsg.speed import Arithmetic, Clock, matmul_rate, peak_memory_mb
from hsg.strategies import propose, select
from hsg.tracking import RunFolder
from hsg.types import Candidates, Trajectory


def make_policy(config: Config, path: str | Path, device: torch.device | str) -> Policy:
    """Model, tokenizer and chat format of one folder, wheel or hub id."""
    model, tokenizer = load_policy(config.model, path, device)
    chat = ChatFormat(tokenizer, stop_ids(model, tokenizer))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Policy(model, tokenizer, chat, int(limit or 2**20))


def make_judge(config: Config, rollout: Rollout, judged_by: Policy) -> Judge:
    """The judge of a rollout's trajectories. The rollout's own policy goes on from their conversations where it can."""
    return Judge(
        config.judge,
        rollout.prompts,
        judged_by.model,
        judged_by.chat,
        context_limit=judged_by.context_limit,
        on_cache=judged_by is rollout.policy and config.rollout.context == "conversation",
    )


def training_tasks(config: Config, task_set: TaskSet) -> list[Task]:
    """The tasks of the training split. ValueError where there are too few for one iteration."""
    tasks = split_tasks(task_set, config.environment.train_split, "environment.train_split")
    if config.num_tasks > len(tasks):
        raise ValueError(
            f"num_tasks must be at most the {len(tasks)} tasks of the training split (none comes twice in one "
            f"iteration), got {config.num_tasks}; lower it or take more tasks"
        )
    return tasks


class Trainer:
    """One run: `train()` goes through `train.iterations` iterations. `model_path` is the policy to start from."""

    def __init__(
        self, config: Config, task_set: TaskSet, model_path: str, distributed: Distributed, run: RunFolder | None
    ) -> None:
        self.config, self.task_set, self.distributed, self.run = config, task_set, distributed, run
        self.tasks = training_tasks(config, task_set)
        self.evaluation_tasks = evaluation_tasks(config, task_set)
        self.policy = make_policy(config, model_path, distributed.device)
        self.model = self.policy.model
        whole = config.strategy.per == "episode"
        self.embed = load_encoder(config.model.encoder, distributed.device).embed if whole else None
        needs_reference = config.loss.kl_coef > 0 or (config.judge.enabled and config.judge.model == "reference")
        self.reference = make_policy(config, model_path, distributed.device) if needs_reference else None
        self.rollout = Rollout(config, self.policy, task_set)
        self.judge = self._make_judge() if config.judge.enabled else None
        self._arithmetic = Arithmetic(self.model)
        self._matmul_rate = matmul_rate(distributed.device, self.model.compute_dtype)
        self._begun: dict[int, list[Episode]] = {}  # iteration -> episodes whose environments are starting
        self.reflection = ReflectionBuffers(config.reflection)
        self.learner = Learner(
            config,
            self.model,
            distributed,
            context_limit=self.policy.context_limit,
            reference=None if self.reference is None else self.reference.model,
        )

    def _make_judge(self) -> Judge:
        config = self.config
        judged_by = self.policy
        if config.judge.model == "reference":
            assert self.reference is not None
            judged_by = self.reference
        elif config.judge.model != "self":
            judged_by = make_policy(config, config.judge.model, self.distributed.device)
        return make_judge(config, self.rollout, judged_by)

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> int:
        """All iterations, with evaluations and checkpoints where the config asks for them. Returns how many there were."""
        config, started = self.config, time.monotonic()
        if config.checkpoint.initial:
            self.save(0)
        iteration = 0
        while iteration < config.train.iterations:
            values = self.iterate(iteration)
            iteration += 1
            if self.run is not None:
                self.run.metrics(iteration - 1, values)
                self._print_line(iteration, values)
            if config.evaluation.every and iteration % config.evaluation.every == 0:
                self.evaluate(iteration, "training")
            late = config.train.max_seconds is not None and time.monotonic() - started >= config.train.max_seconds
            late = self.distributed.from_main(late)
            last = late or iteration == config.train.iterations
            if last or (config.checkpoint.every and iteration % config.checkpoint.every == 0):
                self.save(iteration)
            if late:
                break
        self._abandon_begun()  # they would hold their engines while the last evaluations play
        return iteration

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics."""
        config, clock = self.config, Clock()
        num_strategies, num_rollouts = config.group_shape
        tasks = self.next_tasks(iteration)
        mine = self.distributed.share(list(enumerate(tasks)))
        costs = RolloutCosts()

        episodes = self._begun.pop(iteration, None) or self._begin(iteration)  # P*N*M, row-major
        candidates: list[Candidates] | None = None
        draws = self._reflect(iteration, [task for _, task in mine], episodes)
        if self.embed is not None:
            candidates = self._draw_strategies(iteration, [task for _, task in mine], episodes, draws, costs, clock)
            kept = [s for c in candidates for s in c.kept]
            for i, episode in enumerate(episodes):
                episode.strategy = kept[i // num_rollouts].text
        with clock("rollout"), self._bar(f"iteration {iteration}", len(episodes)) as bar:
            played, judged = self.rollout.play(
                episodes,
                temperature=config.temperature.action,
                strategy_temperature=config.temperature.strategy,
                costs=costs,
                judge=self.judge,
                on_progress=lambda finished: bar.update(finished - bar.n),
            )
        self._check_faults(played)
        with clock("old_logprobs"):
            candidates, played = self._settle_logprobs(candidates, played)
        self._remember(played)
        trajectories = _nest(played, num_strategies, num_rollouts)  # (P, N, M)
        judgments = _nest(judged, num_strategies, num_rollouts)  # (P, N, M)

        sums: mx.Sums = {}
        rows: list[Row] = []
        records: list[dict[str, Any]] = []
        if mine:
            strategies = None if candidates is None else [c.kept for c in candidates]
            credit = assign_credit(config, strategies, trajectories, judgments)
            rows = build_rows(strategies, trajectories, credit)
            sums = mx.rollout_metrics(candidates, trajectories, judgments, credit)
            if self.reflection.enabled:
                sums |= mx.reflection_metrics(draws, trajectories)
            records = iteration_records(config, mine[0][0], candidates, trajectories, judgments, credit)
        if iteration + 1 < config.train.iterations:
            # The next episodes need no policy to start, and the environments' cores are idle while the model learns.
            self._begun[iteration + 1] = self._begin(iteration + 1)
        with clock("update"):
            update_values = self.learner.update(rows, iteration)
        with clock("records"):
            records = self.distributed.gather(records)
            if self.run is not None:
                self.run.trajectories(iteration, records)

        spent, self.learner.costs = self.learner.costs, UpdateCosts()
        sums |= mx.cost_metrics(vars(costs), vars(spent), trajectories) | self._speed(costs, spent, clock.total())
        merged = mx.merge(self.distributed.gather([sums]))
        waited, self.rollout.pool.waited_seconds = self.rollout.pool.waited_seconds, 0.0
        times = {f"time/{name}_seconds": seconds for name, seconds in clock.seconds.items()}
        times |= {"time/iteration_seconds": clock.total(), "time/environment_wait_seconds": waited}
        times["memory/peak_mb"] = self.distributed.max(peak_memory_mb(self.distributed.device))
        return {**mx.finish(merged), **update_values, **times}

    def _speed(self, costs: RolloutCosts, spent: UpdateCosts, seconds: float) -> mx.Sums:
        """Tokens per second, and the share of the matrix products that this machine could have done in the time."""
        drawn = [costs.strategy, costs.rollout]
        if self.judge is not None and self.judge.model is self.model:  # another model's work is not this one's
            drawn.append(costs.judge)
        sampled = sum(cost.sampled for cost in drawn)
        flops = self._arithmetic.flops(
            forwarded=sum(cost.positions for cost in drawn) + spent.score_positions,
            sampled=sampled,
            trained=spent.update_positions,
            headed=spent.head_positions,
        )
        return {
            "time/sampled_tokens_per_second": (sampled / seconds, 0.0),
            "time/trained_tokens_per_second": (spent.trained_tokens / seconds, 0.0),
            "time/matmul_share": (flops / seconds / self._matmul_rate, 1.0),
        }

    def _begin(self, iteration: int) -> list[Episode]:
        """Start this rank's P*N*M environments of an iteration; nobody waits for them yet."""
        mine = self.distributed.share(list(enumerate(self.next_tasks(iteration))))
        return self.rollout.begin(self._requests(iteration, mine))

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

    def _check_faults(self, played: Sequence[Trajectory]) -> None:
        """Stop rather than train on almost nothing; ranks decide together."""
        faults = [f"{t.stop_reason.value}: {t.error}" for t in played if t.stop_reason in FAULTS]
        counts = self.distributed.gather([(len(faults), len(played), faults[:3])])
        failed, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
        if failed > self.config.rollout.max_error_fraction * total or failed == total:
            examples = [text for c in counts for text in c[2]][:3]
            raise RuntimeError(
                f"environments must fail in at most rollout.max_error_fraction = "
                f"{self.config.rollout.max_error_fraction} of the trajectories, got {failed} of {total}; "
                f"first errors: {' | '.join(dict.fromkeys(examples))}"
            )

    # ------------------------------------------------------------------------------------------- evaluating and saving

    def evaluate(self, iteration: int, label: str, **options: Any) -> dict[str, Any]:
        """Evaluate the current policy on the fixed tasks and write it down."""
        tasks = options.pop("tasks", self.evaluation_tasks)
        record = evaluate(
            self.config,
            self.policy,
            self.task_set,
            tasks,
            self.distributed,
            label=label,
            iteration=iteration,
            **options,
        )
        if self.run is not None:
            self.run.evaluation(record)
        return record

    def save(self, iteration: int) -> None:
        """Write a checkpoint of the current policy."""
        if self.run is not None:
            state = {"optimizer_steps": self.learner.optimizer_steps, "seed": self.config.seed}
            keep = self.config.checkpoint.keep
            save_checkpoint(self.run.path, iteration, self.model, self.policy.tokenizer, state, keep)
        self.distributed.barrier()

    def close(self) -> None:
        """Let the environments go."""
        self._abandon_begun()
        self.rollout.close()

    def _abandon_begun(self) -> None:
        """Close the environments that were begun for an iteration that never came."""
        for episode in (e for episodes in self._begun.values() for e in episodes):
            episode.abandon()
        self._begun.clear()

    def _bar(self, description: str, total: int) -> Any:
        hidden = True if self.config.log.quiet or not self.distributed.is_main else None
        return tqdm(total=total, desc=description, unit="episode", leave=False, disable=hidden)

    def _print_line(self, iteration: int, values: dict[str, float]) -> None:
        if self.config.log.quiet:
            return
        shown = {
            "outcome": "reward/outcome", "success": "reward/success", "turns": "rollout/turns",
            "dead": "advantage/dead_groups", "flagged": "judge/flagged_share", "kl": "update/approx_kl",
            "entropy": "update/entropy", "clip": "update/clip_fraction",
        }  # fmt: skip
        parts = [f"{label} {values[name]:.3f}" for label, name in shown.items() if name in values]
        seconds = values["time/iteration_seconds"]
        tqdm.write(f"iteration {iteration}/{self.config.train.iterations}  {'  '.join(parts)}  {seconds:.1f}s")


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
