"""The test world `toy`: a house with a hidden object, in which a strategy decides.

world.py           rules, the environment, what the best play is worth, the oracle of self-judgment
demonstrations.py  play for the warm start
"""

from __future__ import annotations

import itertools
import random

from hsg.environments.toy.demonstrations import STRATEGIES, TURN_STRATEGIES, demonstrations
from hsg.environments.toy.world import (
    AREAS,
    CLUES,
    GOALS,
    HALL,
    PLACES,
    TURN_LIMIT,
    ToyEnvironment,
    expected_optimal_outcome,
    optimal_outcome,
    optimal_turns,
    outcome_at,
    strategy_class,
    wasted_turns,
)
from hsg.protocol import Demonstration, Task, TaskSet

__all__ = [
    "AREAS", "CLUES", "GOALS", "HALL", "PLACES", "STRATEGIES", "TURN_LIMIT", "TURN_STRATEGIES", "ToyEnvironment",
    "ToyTaskSet", "expected_optimal_outcome", "make_task_set", "optimal_outcome", "optimal_turns", "outcome_at",
    "strategy_class", "wasted_turns",
]  # fmt: skip


class ToyTaskSet(TaskSet):
    """All tasks (area x place x goal x pair of clue words), dealt to three splits; the ids spell the task out."""

    name = "toy"
    splits = ("train", "dev", "test")

    def __init__(
        self, sizes: dict[str, int], bolted_share: float, num_bolts: int, unbolt_share: float, clue_share: float
    ):
        self._unbolt_share = unbolt_share
        self._clue_share = clue_share
        catalogue = _catalogue()
        cut = len(catalogue) // 60 * 12  # a fifth, in whole dozens that hold each place once
        pools = {"test": catalogue[:cut], "dev": catalogue[cut : 2 * cut], "train": catalogue[2 * cut :]}
        self._tasks: dict[str, list[Task]] = {}
        for split, size in sizes.items():
            if not 1 <= size <= len(pools[split]):
                raise ValueError(f"toy.num_{split} must be in 1..{len(pools[split])}, got {size}; choose fewer tasks")
            self._tasks[split] = [
                _task(split, *pools[split][i], bolts=num_bolts if _is_share_step(i, bolted_share) else 0)
                for i in range(size)
            ]

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}; see TaskSet.splits")
        return list(self._tasks[split])

    def create(self, task: Task, seed: int) -> ToyEnvironment:
        return ToyEnvironment(task, seed)

    def expert_actions(self, task: Task) -> list[str]:
        area, place, goal = (task.data[name] for name in ("area", "place", "goal"))
        return [f"go {area}", *[f"unbolt {place}"] * task.data["bolts"], f"open {place}", f"take {goal}"]

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        return demonstrations(task, seed, self._unbolt_share, self._clue_share)


def _catalogue() -> list[tuple[str, str, str, tuple[str, str]]]:
    """Every (area, place, goal, clue) once, in one fixed order in which each four neighbours are of four areas.

    The splits are cut from it at fixed points, so neither sizes nor process change which task is in which split.
    """
    rng = random.Random("toy catalogue")
    cells = {}
    for area in AREAS:
        clues = list(itertools.combinations(CLUES[area], 2))
        by_place = [list(itertools.product([place], GOALS, clues)) for place in PLACES[area]]
        for cell in by_place:
            rng.shuffle(cell)
        cells[area] = [entry for row in zip(*by_place, strict=True) for entry in rng.sample(row, len(row))]
    blocks = zip(*([(area, *entry) for entry in cells[area]] for area in AREAS), strict=True)
    return [entry for block in blocks for entry in rng.sample(block, len(block))]


def _task(split: str, area: str, place: str, goal: str, clue: tuple[str, str], *, bolts: int) -> Task:
    data = {"area": area, "place": place, "goal": goal, "clue": clue, "bolts": bolts}
    name = "-".join((area, place, goal, *clue, *(["bolted"] if bolts else [])))
    return Task(id=name, split=split, kind="bolted" if bolts else "open", data=data)


def _is_share_step(index: int, share: float) -> bool:
    """True for `share` of all indices, spread evenly."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def make_task_set(
    num_train: int = 256,
    num_dev: int = 64,
    num_test: int = 64,
    bolted_share: float = 0.0,
    num_bolts: int = 2,
    unbolt_share: float = 0.0,
    clue_share: float = 0.0,
) -> ToyTaskSet:
    """The toy world. `bolted_share` in [0, 1] of each split's tasks hide their object behind `num_bolts` bolts.

    unbolt_share  in [0, 1] of the demonstrations without wasted turns unbolt a place that has no bolt, so that a policy
                  which learned from them knows the deed without its use
    clue_share    in [0, 1] of the tasks demonstrate the fitting area twice, the others once each: how much a warm start
                  learns of the clues
    """
    if not 0.0 <= clue_share <= 1.0:
        raise ValueError(f"toy.clue_share must be in [0, 1], got {clue_share}; 0 shows nothing of the clues")
    if not 0.0 <= unbolt_share <= 1.0:
        raise ValueError(f"toy.unbolt_share must be in [0, 1], got {unbolt_share}; 0 shows no unbolting")
    if not 0.0 <= bolted_share <= 1.0:
        raise ValueError(f"toy.bolted_share must be in [0, 1], got {bolted_share}; 0 makes every task an open one")
    if not 1 <= num_bolts <= 3:
        raise ValueError(f"toy.num_bolts must be in 1..3, got {num_bolts}; more hardly fit {TURN_LIMIT} turns")
    sizes = {"train": num_train, "dev": num_dev, "test": num_test}
    return ToyTaskSet(sizes, bolted_share, num_bolts, unbolt_share, clue_share)
