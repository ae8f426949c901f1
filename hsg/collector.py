"""Everything of an iteration before its update: tasks in, rows out.

    tasks        next P tasks                                  -> list[Task]
    episodes     begun at once, N x M of each task             environments start while strategies are drawn
    strategies   propose, select                               -> candidates (P, C), kept (P, N)
    trajectories rollout and judgment                          -> records (P, N, M)
    log-probs    those of the old policy settled               -> the same records
    credit       returns and advantages of both levels         -> tensors (P, N), (P, N, M, K)
    rows         flattened once                                -> list[Row]

A flat method is the same with N = 1 group of all rollouts and no strategies.  Where there are fewer tasks than ranks, the
rollouts of one are played and trained by several of them (teams.py), and joined in between: credit sees whole groups.
Deliberately absent: weights that change, any mention of an algorithm's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hsg.batch import Row, build_rows
from hsg.config.options import Config
from hsg.credit import Signals, assign_credit
from hsg.engine.precision import compute_weights
from hsg.learning.companions import Companions
from hsg.learning.underway import Collected
from hsg.measure import metrics as mx
from hsg.measure.speed import Clock
from hsg.model.models import load_encoder
from hsg.model.policy import Policy
from hsg.play.curriculum import iteration_tasks, make_requests, spare_tasks
from hsg.play.episode import Episode, first_observation
from hsg.play.faults import check_faults, fault_metrics
from hsg.play.refill import Dropped, Played, nest, refill
from hsg.protocol import Task, TaskSet
from hsg.ranks.distributed import Distributed
from hsg.ranks.teams import Team
from hsg.rollout import Rollout, RolloutCosts
from hsg.run.build import make_frozen, make_judge, training_tasks
from hsg.run.console import Console
from hsg.run.records import iteration_records
from hsg.strategy.judge import Judge
from hsg.strategy.propose import propose, select, show_strategies
from hsg.strategy.reflection import Draw, ReflectionBuffers, attempt_of
from hsg.types import Candidates, Tokens, Trajectory


class Collector:
    """Plays iterations with one policy. What it remembers from one to the next is in `reflection` and `companions`.

    settle     rows as sampled -> the same with the log-probs that ratios start from (`Learner.settle_logprobs`)
    reference  the policy before the first update, where something needs it
    """

    def __init__(
        self,
        config: Config,
        task_set: TaskSet,
        policy: Policy,
        distributed: Distributed,
        console: Console,
        settle: Callable[[list[Tokens]], list[Tokens]],
        *,
        model_path: str,
        reference: Policy | None,
    ) -> None:
        self.config, self.policy, self.distributed, self.console = config, policy, distributed, console
        self.model, self._settle = policy.model, settle
        self.tasks = training_tasks(config, task_set)
        whole = config.strategy.per == "episode"
        self.embed = load_encoder(config.model.encoder, distributed.device).embed if whole else None
        self.rollout = Rollout(config, policy, task_set)
        self.judge = self._make_judge(reference) if config.judge.enabled else None
        self.reflection = ReflectionBuffers(config.reflection)
        self.companions = Companions(config, self.model, model_path, distributed)
        self._begun: dict[int, list[Episode]] = {}  # iteration -> episodes whose environments are starting

    def _make_judge(self, reference: Policy | None) -> Judge:
        config = self.config
        judged_by = self.policy
        if config.judge.model == "reference":
            assert reference is not None
            judged_by = reference
        elif config.judge.model != "self":
            judged_by = make_frozen(config, config.judge.model, self.distributed)
        return make_judge(config, self.rollout, judged_by)

    def collect(self, iteration: int, clock: Clock) -> tuple[list[Row], Collected]:
        """Everything before the update: this rank's rows, and what the log wants to know of them."""
        config, distributed = self.config, self.distributed
        num_strategies, num_rollouts = config.group_shape
        team, costs = self._team(iteration), RolloutCosts()

        episodes = self._begun.pop(iteration, None) or self._begin(iteration, team, team.places)
        with compute_weights(*self._models()):  # one copy for all that the iteration plays
            mine = self._play(iteration, team, team.places, episodes, costs, clock)
            mine, dropped = self._refill(iteration, team, mine, costs, clock)
        check_faults(config, distributed, mine.trajectories)
        with clock("old_logprobs"):
            mine = self._settle_logprobs(team, mine)
        read = [self.model] if self.companions.novelty is not None else []
        with clock("companions"), distributed.forwards(*read, weights="gathered"):
            signals = self.companions.read(mine.trajectories)
        groups, signals = _whole(team, mine, signals)
        self._remember(groups.trajectories if team.leads else [])
        trajectories = nest(groups.trajectories, num_strategies, num_rollouts)  # (P, N, M)
        judgments = nest(groups.judgments, num_strategies, num_rollouts)  # (P, N, M)
        candidates = groups.candidates

        strategies = None if candidates is None else [c.kept for c in candidates]
        told = distributed.gather if team.leads else lambda items: distributed.gather([])
        credit = assign_credit(config, strategies, trajectories, judgments, signals, told)
        with clock("companions"):
            sums = self.companions.learn(mine.trajectories, credit, iteration, team.begin)
        sums |= mx.cost_metrics(vars(costs), trajectories if team.leads else []) | fault_metrics(self.rollout.errors)
        self.rollout.errors = []
        records = []
        if team.leads:
            sums |= mx.rollout_metrics(candidates, trajectories, judgments, credit)
            if self.reflection.enabled:
                sums |= mx.reflection_metrics(groups.draws, trajectories)
            sums |= mx.played_metrics(trajectories, vars(dropped), config.rollout.turn_cap(iteration))
            records = iteration_records(config, groups.places[0][0], candidates, trajectories, judgments, credit)
        rows = build_rows(strategies, trajectories, credit)
        if team.is_split:
            rows = [row for row in rows if team.owns(row.trajectory)]
        return rows, Collected(sums, records, costs)

    def begin(self, iteration: int) -> None:
        """Start the environments of a coming iteration: they need no policy for it, and nobody waits for them yet."""
        team = self._team(iteration)
        self._begun[iteration] = self._begin(iteration, team, team.places)

    def own_costs(self, costs: RolloutCosts) -> list[Any]:
        """The costs of what the trained model itself forwarded: another judge's work is not its own."""
        own = self.judge is not None and self.judge.model is self.model
        return [costs.strategy, costs.rollout, *([costs.judge] if own else [])]

    def _team(self, iteration: int) -> Team:
        num_strategies, num_rollouts = self.config.group_shape
        return Team(self.distributed, self.next_tasks(iteration), num_strategies * num_rollouts)

    def _begin(self, iteration: int, team: Team, places: Sequence[tuple[int, Task]]) -> list[Episode]:
        """Start this rank's environments of each place's task; nobody waits for them yet."""
        requests = make_requests(self.config, iteration, places, team.begin, team.end)
        return self.rollout.begin(requests, self.config.rollout.turn_cap(iteration))

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        """A phase in which ranks forward the policy and the judge as often as they like, and do nothing else together."""
        weights = self.config.rollout.weights
        with self.distributed.stoppable(), self.distributed.forwards(*self._models(), weights=weights):
            yield

    def _models(self) -> list[Any]:
        """What is sampled from: the policy, and whoever judges."""
        return [self.model, *([self.judge.model] if self.judge else [])]

    def _play(
        self,
        iteration: int,
        team: Team,
        places: list[tuple[int, Task]],
        episodes: list[Episode],
        costs: RolloutCosts,
        clock: Clock,
    ) -> Played:
        """Strategies for the tasks, then their episodes to their ends."""
        config = self.config
        candidates: list[Candidates] | None = None
        draws = self._reflect(iteration, places, episodes)
        if self.embed is not None:
            candidates = self._draw_strategies(iteration, team, places, episodes, draws, costs, clock)
            show_strategies(config, candidates, episodes)
        with (
            self._forwards(),
            clock("rollout"),
            self.console.bar(f"iteration {iteration + 1}", len(episodes)) as bar,
        ):
            played, judged = self.rollout.play(
                episodes,
                temperature=config.temperature.action,
                strategy_temperature=config.temperature.strategy,
                costs=costs,
                judge=self.judge,
                on_progress=lambda finished: bar.update(finished - bar.n),
            )
        return Played(places, candidates, played, judged, draws)

    def _refill(
        self, iteration: int, team: Team, played: Played, costs: RolloutCosts, clock: Clock
    ) -> tuple[Played, Dropped]:
        """Dead groups replaced, where `rollout.max_refills` allows it."""

        def play(places: list[tuple[int, Task]]) -> Played:
            return self._play(iteration, team, places, self._begin(iteration, team, places), costs, clock)

        spare, rounds = spare_tasks(self.config, self.tasks, iteration), self.config.rollout.max_refills
        return refill(played, spare, self.config.num_tasks, rounds, play, join=team.join, anywhere=team.anywhere)

    def next_tasks(self, iteration: int) -> list[Task]:
        """The P tasks of an iteration."""
        return iteration_tasks(self.config, self.tasks, iteration)

    def _draw_strategies(
        self,
        iteration: int,
        team: Team,
        places: Sequence[tuple[int, Task]],
        episodes: Sequence[Episode],
        draws: Sequence[Draw],
        costs: RolloutCosts,
        clock: Clock,
    ) -> list[Candidates]:
        """One per place: the lead draws them from what the team has seen, and every member gets the same."""
        config = self.config
        per_task = len(episodes) // max(1, len(places))
        groups = [episodes[p * per_task : (p + 1) * per_task] for p in range(len(places))]
        seen: list[str | None] = []
        with self.distributed.stoppable(), clock("environment_start"):
            seen = [first_observation(group) for group in groups]
        observations = [text or "" for text in team.agreed(seen)]
        keys: list[tuple[object, ...]] = [("rollout", config.seed, iteration, task.id) for _, task in places]
        kept: list[Candidates] = []
        with self._forwards():
            if team.leads and places:
                assert self.embed is not None
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
                    kept = [select(config, texts, self.embed, key) for texts, key in zip(drawn, keys, strict=True)]
        return team.join(kept)

    def _reflect(self, iteration: int, places: Sequence[tuple[int, Task]], episodes: Sequence[Episode]) -> list[Draw]:
        """Which earlier attempts are shown: one draw per task before its strategies, else one per rollout, (P,) or (P*G,)."""
        if not self.reflection.enabled:
            return []
        if self.embed is not None:
            seed = self.config.seed
            return [self.reflection.draw(task.id, ("rollout", seed, iteration, task.id)) for _, task in places]
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

    def _settle_logprobs(self, team: Team, played: Played) -> Played:
        """The same records with the log-probs that ratios start from (see `Learner.settle_logprobs`).

        A member of a team settles the strategies whose first rollout is its own, as it will train them.
        """
        num_rollouts = self.config.group_shape[1]
        tokens = [row for t in played.trajectories if t.valid for row in t.rows]
        tokens += [
            s.tokens for c in played.candidates or () for n, s in enumerate(c.kept) if team.owns(n * num_rollouts)
        ]
        new = dict(zip(map(id, tokens), self._settle(tokens), strict=True))
        return replace(
            played,
            trajectories=[replace(t, rows=tuple(new.get(id(r), r) for r in t.rows)) for t in played.trajectories],
            candidates=None
            if played.candidates is None
            else [
                replace(c, strategies=tuple(replace(s, tokens=new.get(id(s.tokens), s.tokens)) for s in c.strategies))
                for c in played.candidates
            ],
        )

    def abandon(self) -> None:
        """Close the environments that were begun for an iteration that never came."""
        for episode in (e for episodes in self._begun.values() for e in episodes):
            episode.abandon()
        self._begun.clear()

    def close(self) -> None:
        """Let the environments go."""
        self.abandon()
        self.rollout.close()


def _whole(team: Team, mine: Played, signals: Signals) -> tuple[Played, Signals]:
    """What the members of a team played and read, joined; where no task is split, just that."""
    if not team.is_split:
        return mine, signals
    trajectories, judgments = team.join(mine.trajectories), team.join(mine.judgments)
    values, bonuses = (None if x is None else team.join(x) for x in (signals.values, signals.bonuses))
    candidates = mine.candidates
    if candidates is not None:  # each member has settled some of the strategies
        num_strategies = len(candidates[0].selected)
        per_strategy = len(trajectories) // num_strategies
        own = [s for n, s in enumerate(candidates[0].kept) if team.owns(n * per_strategy)]
        settled = dict(zip(candidates[0].selected, team.join(own), strict=True))
        every = tuple(settled.get(i, s) for i, s in enumerate(candidates[0].strategies))
        candidates = [replace(candidates[0], strategies=every)]
    # Without strategies of an episode each rollout has a draw of its own.
    draws = list(mine.draws) if candidates is not None else team.join(mine.draws)
    return Played(mine.places, candidates, trajectories, judgments, draws), Signals(values, bonuses)
