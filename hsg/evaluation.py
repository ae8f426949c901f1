"""How good is a policy? One strategy per episode, no oversampling, no judge, on a fixed set of tasks.

The tasks, the environments' seeds and the policy's random numbers depend on the task and `seed` only, so two evaluations
meet the same episodes and their difference is the policies'.  The strategy can be taken away to see whether it matters:
    own        the policy's own strategy                     blank      an empty one in the same prompt
    shuffled   the strategy it wrote for another task
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from tqdm import tqdm

from hsg.config import Config
from hsg.distributed import Distributed
from hsg.episode import Request
from hsg.generation import Cost, derive_seed
from hsg.protocol import Task, TaskSet
from hsg.rollout import Policy, Rollout, RolloutCosts
from hsg.strategies import propose
from hsg.types import Trajectory

StrategyUse = Literal["own", "blank", "shuffled"]


def evaluation_tasks(config: Config, task_set: TaskSet, split: str | None = None) -> list[Task]:
    """The first `evaluation.num_tasks` tasks of a fixed shuffle of the split: the same for every seed and process."""
    split = config.evaluation.split if split is None else split
    tasks = list(task_set.tasks(split))
    if not tasks:
        raise ValueError(
            f"evaluation.split must have tasks, got the empty split {split!r}; choose other tasks or splits"
        )
    random.Random(0).shuffle(tasks)
    return tasks[: config.evaluation.num_tasks]


def play_once(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    strategies: StrategyUse = "own",
    description: str = "evaluation",
) -> list[Trajectory]:
    """One trajectory per task."""
    fixed = config.evaluation.temperature
    rollout = Rollout(config, policy, task_set)
    keys = [("evaluation", seed, task.id) for task in tasks]
    trajectories: list[Trajectory] = []
    texts: list[str | None] = [None] * len(tasks)
    bar = tqdm(
        total=len(tasks), desc=description, unit="episode", disable=True if config.log.quiet else None, leave=False
    )

    def requests(portion: range) -> list[Request]:
        return [Request(tasks[i], i, derive_seed("environment", *keys[i]), 0, 0, keys[i]) for i in portion]

    size = config.evaluation.batch_size
    portions = [range(i, min(i + size, len(tasks))) for i in range(0, len(tasks), size)]
    try:
        if config.strategy.per == "episode" and strategies == "shuffled":
            # Every strategy must exist before any can be passed on, so the episodes are begun twice.
            for portion in portions:
                episodes = rollout.begin(requests(portion))
                for i, text in zip(portion, _strategies(config, policy, rollout, episodes, keys, fixed), strict=True):
                    texts[(i + max(1, len(tasks) // 2)) % len(tasks)] = text
                for episode in episodes:
                    episode.abandon()
        for portion in portions:
            episodes = rollout.begin(requests(portion))
            if config.strategy.per == "episode":
                if strategies == "own":
                    written = _strategies(config, policy, rollout, episodes, keys, fixed)
                else:
                    written = ["" if strategies == "blank" else (texts[i] or "") for i in portion]
                for episode, text in zip(episodes, written, strict=True):
                    episode.strategy = text
            temperature = config.temperature.action if fixed is None else fixed
            done = len(trajectories)

            def show(finished: int, before: int = done) -> None:
                bar.update(before + finished - bar.n)

            played, _ = rollout.play(
                episodes,
                temperature=temperature,
                costs=RolloutCosts(),
                on_progress=show,
            )
            trajectories += played
    finally:
        bar.close()
        rollout.close()
    return trajectories


def _strategies(
    config: Config,
    policy: Policy,
    rollout: Rollout,
    episodes: Sequence[Any],
    keys: Sequence[tuple],
    fixed: float | None,
) -> list[str]:
    for episode in episodes:
        episode.wait()
    drawn = propose(
        config,
        policy,
        rollout.prompts,
        [e.first_observation or "" for e in episodes],
        [keys[e.request.task_index] for e in episodes],
        num_candidates=1,
        temperature=config.temperature.strategy if fixed is None else fixed,
        cost=Cost(),
    )
    return [candidates[0].text for candidates in drawn]


def evaluate(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    distributed: Distributed,
    *,
    label: str,
    iteration: int = 0,
    seed: int = 0,
    strategies: StrategyUse = "own",
) -> dict[str, Any]:
    """Success, score and outcome over tasks shared among ranks, overall and by task kind; episodes that broke are counted."""
    mine = distributed.share(tasks)
    played = (
        play_once(config, policy, task_set, mine, seed=seed, strategies=strategies, description=label) if mine else []
    )
    rows = distributed.gather(
        [(t.task.kind, t.valid, t.score, float(t.success), t.outcome or 0.0, len(t.turns)) for t in played]
    )
    counted = [row for row in rows if row[1]]
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for row in counted:
        by_kind[row[0]].append(row)
    record: dict[str, Any] = {
        "iteration": iteration, "label": label, "split": tasks[0].split if tasks else "", "strategies": strategies,
        "num_tasks": len(rows), "num_failed": len(rows) - len(counted),
    }  # fmt: skip
    if counted:
        record |= _means(counted)
        record["by_kind"] = {kind: {"num_tasks": len(r), **_means(r)} for kind, r in sorted(by_kind.items())}
    return record


def _means(rows: Sequence[Any]) -> dict[str, float]:
    names = ("score", "success", "outcome", "turns")
    return {name: sum(row[i + 2] for row in rows) / len(rows) for i, name in enumerate(names)}
