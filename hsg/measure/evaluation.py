"""How good is a policy? One strategy per episode, no oversampling, no judge, on a fixed set of tasks.

The tasks, the environments' seeds and the policy's random numbers depend on the task and `seed` only, so two evaluations
meet the same episodes and their difference is the policies'.  The strategy can be taken away to see whether it matters:
    own        the policy's own strategy                     blank      an empty one in the same prompt
    shuffled   the strategy it wrote for another task
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hsg.config.options import Config
from hsg.engine.precision import compute_weights
from hsg.engine.seeds import derive_seed
from hsg.measure.measures import sample_measures  # noqa: F401 - every measure under one name
from hsg.measure.pass_at_k import distinct_outcomes, pass_at_k, pass_at_k_curve  # noqa: F401 - likewise
from hsg.measure.progress import progress
from hsg.model.policy import Policy
from hsg.play.episode import Episode, Request
from hsg.protocol import Task, TaskSet
from hsg.ranks.distributed import Distributed
from hsg.rollout import Rollout
from hsg.strategy.propose import propose
from hsg.types import Trajectory

StrategyUse = Literal["own", "blank", "shuffled"]
MEASURES = ("score", "success", "outcome", "turns")


def split_tasks(task_set: TaskSet, split: str, key: str) -> list[Task]:
    """The tasks of the split that the option `key` names. ValueError where there is no such split, or nothing in it."""
    try:
        tasks = list(task_set.tasks(split))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if not tasks:
        raise ValueError(f"{key} must have tasks, got the empty split {split!r}; choose other tasks or splits")
    return tasks


def evaluation_tasks(
    config: Config, task_set: TaskSet, split: str | None = None, key: str = "evaluation.split"
) -> list[Task]:
    """The first `evaluation.num_tasks` tasks of a fixed shuffle of the split: the same for every seed and process.

    split  None: `evaluation.split`; `key`: the option that named it, for the ValueError where there is no such split
    """
    tasks = split_tasks(task_set, config.evaluation.split if split is None else split, key)
    random.Random(0).shuffle(tasks)
    return tasks[: config.evaluation.num_tasks]


def play_once(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    strategies: Sequence[str] | None = None,
    description: str = "evaluation",
) -> list[Trajectory]:
    """One trajectory per task, under the given strategies or (None) the policy's own."""
    fixed = config.evaluation.temperature
    trajectories: list[Trajectory] = []
    with _Portions(config, policy, task_set, tasks, seed, description) as portions:
        for begin, episodes in portions:
            if config.strategy.per == "episode":
                written = portions.write(episodes) if strategies is None else strategies[begin : begin + len(episodes)]
                for episode, text in zip(episodes, written, strict=True):
                    episode.strategy = text
            played, _ = portions.rollout.play(
                episodes,
                temperature=config.temperature.action if fixed is None else fixed,
                strategy_temperature=config.temperature.strategy if fixed is None else fixed,
                on_progress=portions.show,
            )
            trajectories += played
    return trajectories


def play_samples(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    num_samples: int,
    *,
    seed: int = 0,
    description: str = "samples",
) -> list[list[Trajectory]]:
    """Many episodes of each task: samples[task][s] is what an evaluation with the seed `seed + s` meets."""
    rounds = [
        play_once(config, policy, task_set, tasks, seed=seed + s, description=f"{description} {s + 1}/{num_samples}")
        for s in range(num_samples)
    ]
    return [list(row) for row in zip(*rounds, strict=True)]


def write_strategies(
    config: Config, policy: Policy, task_set: TaskSet, tasks: Sequence[Task], *, seed: int = 0
) -> list[str]:
    """The strategy that `play_once` would follow in each task; nothing is played."""
    texts: list[str] = []
    with _Portions(config, policy, task_set, tasks, seed, "strategies") as portions:
        for _, episodes in portions:
            texts += portions.write(episodes)
            for episode in episodes:
                episode.abandon()
            portions.show(len(episodes))
    return texts


def given_strategies(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    distributed: Distributed,
    use: StrategyUse,
    *,
    seed: int = 0,
) -> list[str] | None:
    """The strategies that this rank's share of the tasks is played under; None: the policy's own.

    They are exchanged over half the list of all tasks, whatever the number of ranks; ValueError for fewer than two tasks.
    """
    mine = distributed.share(tasks)
    if use == "own":
        return None
    if use == "blank":
        return [""] * len(mine)
    if len(tasks) < 2:
        raise ValueError(f"evaluation.num_tasks must be at least 2 to exchange strategies, got {len(tasks)}; raise it")
    with distributed.forwards(policy.model, weights=config.rollout.weights):
        mine_written = write_strategies(config, policy, task_set, mine, seed=seed) if mine else []
    written = distributed.gather(mine_written)
    half = len(tasks) // 2
    return distributed.share(written[half:] + written[:half])


class _Portions:
    """The tasks in portions of `evaluation.batch_size`: iterates over (index of the first task, begun episodes)."""

    def __init__(
        self, config: Config, policy: Policy, task_set: TaskSet, tasks: Sequence[Task], seed: int, description: str
    ) -> None:
        self.config, self.policy, self.tasks = config, policy, tasks
        self.keys: list[tuple[object, ...]] = [("evaluation", seed, task.id) for task in tasks]
        self.rollout = Rollout(config, policy, task_set)
        self.bar = progress(len(tasks), description, "episode", quiet=config.log.quiet)
        self._before = 0
        self._weights = contextlib.ExitStack()

    def __enter__(self) -> _Portions:
        self._weights.enter_context(compute_weights(self.policy.model))  # one copy for all that is played
        return self

    def __exit__(self, *error: object) -> None:
        self._weights.close()
        self.bar.close()
        self.rollout.close()

    def __iter__(self) -> Iterator[tuple[int, list[Episode]]]:
        for begin in range(0, len(self.tasks), self.config.evaluation.batch_size):
            self._before = begin
            part = range(begin, min(begin + self.config.evaluation.batch_size, len(self.tasks)))
            keys = self.keys
            yield (
                begin,
                self.rollout.begin(
                    [Request(self.tasks[i], i, derive_seed("environment", *keys[i]), 0, 0, keys[i]) for i in part]
                ),
            )

    def show(self, finished: int) -> None:
        """Move the bar to `finished` episodes of this portion."""
        self.bar.update(self._before + finished - self.bar.n)

    def write(self, episodes: Sequence[Episode]) -> list[str]:
        """One strategy per episode."""
        for episode in episodes:
            episode.wait()
        fixed = self.config.evaluation.temperature
        drawn = propose(
            self.config,
            self.policy,
            self.rollout.prompts,
            [e.first_observation or "" for e in episodes],
            [self.keys[e.request.task_index] for e in episodes],
            num_candidates=1,
            temperature=self.config.temperature.strategy if fixed is None else fixed,
        )
        return [candidates[0].text for candidates in drawn]


def evaluate(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task] | None = None,
    distributed: Distributed | None = None,
    *,
    label: str = "evaluation",
    iteration: int = 0,
    seed: int = 0,
    strategies: StrategyUse = "own",
) -> dict[str, Any]:
    """Success, score and outcome over tasks shared among ranks, overall and by task kind.

    tasks        None: those of `evaluation_tasks`
    distributed  None: the ranks that the launcher has started, or this process alone
    strategies   own: the policy's; blank: an empty one; shuffled: what it wrote for another task

    Episodes that broke are counted, left out of the means and told on stderr with what ended them.
    """
    tasks = evaluation_tasks(config, task_set) if tasks is None else tasks
    distributed = distributed or Distributed(config.distributed)
    mine = distributed.share(tasks)
    texts = given_strategies(config, policy, task_set, tasks, distributed, strategies, seed=seed)
    played: list[Trajectory] = []
    with distributed.stoppable(), distributed.forwards(policy.model, weights=config.rollout.weights):
        if mine:
            played = play_once(config, policy, task_set, mine, seed=seed, strategies=texts, description=label)
    rows = distributed.gather(
        [
            (t.task.kind, t.valid, t.score, float(t.success), t.outcome or 0.0, len(t.turns), t.stop_reason)
            for t in played
        ]
    )
    counted = [row for row in rows if row[1]]
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for row in counted:
        by_kind[row[0]].append(row)
    record: dict[str, Any] = {
        "iteration": iteration, "label": label, "split": tasks[0].split if tasks else "", "strategies": strategies,
        "num_tasks": len(rows), "num_failed": len(rows) - len(counted),
    }  # fmt: skip
    if record["num_failed"] and distributed.is_main:
        reasons = Counter(row[-1].value for row in rows if not row[1])
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        rest = "the others alone are counted" if counted else "nothing is left to count"
        print(f"{label}: {record['num_failed']} of {len(rows)} episodes broke ({told}); {rest}", file=sys.stderr)
    if counted:
        record |= _means(counted)
        record["by_kind"] = {kind: {"num_tasks": len(r), **_means(r)} for kind, r in sorted(by_kind.items())}
    return record


def _means(rows: Sequence[Any]) -> dict[str, float]:
    return {name: sum(row[i + 2] for row in rows) / len(rows) for i, name in enumerate(MEASURES)}
