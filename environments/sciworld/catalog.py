"""ScienceWorld's tasks, reporting groups and official splits, as data: nothing here starts an engine.

    TASKS   30 task names, in the engine's order
    GROUPS  the five groups that papers report on (15 of the 30 tasks)
    ranges  task -> the variations of train, dev and test

The official splits are the engine's own (getVariationsTrain, -Dev, -Test after a load): consecutive ranges of
variation numbers.  `python -m hsg.environments.sciworld.build --splits` asks the engine again and writes splits.json.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from pathlib import Path

SPLITS = ("train", "dev", "test")
SPLITS_FILE = Path(__file__).parent / "splits.json"

TASKS = (
    "boil",
    "melt",
    "freeze",
    "change-the-state-of-matter-of",
    "use-thermometer",
    "measure-melting-point-known-substance",
    "measure-melting-point-unknown-substance",
    "power-component",
    "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity",
    "test-conductivity-of-unknown-substances",
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "find-animal",
    "grow-plant",
    "grow-fruit",
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color",
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
    "lifespan-longest-lived-then-shortest-lived",
    "identify-life-stages-1",
    "identify-life-stages-2",
    "inclined-plane-determine-angle",
    "inclined-plane-friction-named-surfaces",
    "inclined-plane-friction-unnamed-surfaces",
    "mendelian-genetics-known-plant",
    "mendelian-genetics-unknown-plant",
)

GROUPS = {
    "Measure": TASKS[4:7],
    "Test-Cond": TASKS[9:11],
    "Find": TASKS[11:15],
    "Chem-Mix": TASKS[17:20],
    "Lifespan": TASKS[20:23],
}

SIMPLIFICATIONS = ("teleportAction", "noElectricalAction", "openDoors", "openContainers", "selfWateringFlowerPots")


def is_electrical(task: str) -> bool:
    """Whether a task needs the electrical actions (for such tasks "easy" leaves out noElectricalAction)."""
    return "power-component" in task or "conductivity" in task


def select_tasks(names: str | Iterable[str]) -> tuple[str, ...]:
    """Task names behind "all", group names ("Find") and task names, in the engine's order. Unknown: ValueError."""
    wanted: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        if name == "all":
            wanted.update(TASKS)
        elif name in GROUPS:
            wanted.update(GROUPS[name])
        elif name in TASKS:
            wanted.add(name)
        else:
            near = difflib.get_close_matches(str(name), ["all", *GROUPS, *TASKS], n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no name is near;"
            raise ValueError(
                f"sciworld.tasks must be 'all', groups ({', '.join(GROUPS)}) or task names, got {name!r}; {hint} "
                "All of them: environments.sciworld.TASKS"
            )
    if not wanted:
        raise ValueError("sciworld.tasks must name at least one task, got none; 'all' takes every task")
    return tuple(task for task in TASKS if task in wanted)


def check_simplifications(text: str, tasks: Iterable[str]) -> str:
    """The engine's spelling of a comma list of simplifications ("easy" may be among them). Unknown: ValueError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names in ([], ["easy"]):
        return "".join(names)
    for name in names:
        if name not in ("easy", *SIMPLIFICATIONS):
            near = difflib.get_close_matches(name, ["easy", *SIMPLIFICATIONS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: easy, {', '.join(SIMPLIFICATIONS)}"
            raise ValueError(f"sciworld.simplifications must be a comma list of known names, got {name!r}; {hint}")
    if "easy" in names:
        raise ValueError(
            f"sciworld.simplifications must be 'easy' alone or without it, got {text!r}; "
            "easy = teleportAction,noElectricalAction,openDoors,selfWateringFlowerPots"
        )
    if "noElectricalAction" in names and (electrical := [task for task in tasks if is_electrical(task)]):
        raise ValueError(
            f"sciworld.simplifications must leave the electrical actions to {electrical[0]!r}, got {text!r}; "
            "drop noElectricalAction or the electrical tasks ('easy' drops it for them by itself)"
        )
    return ",".join(names)


@functools.cache
def _ranges() -> dict[str, list[list[int]]]:
    return json.loads(SPLITS_FILE.read_text(encoding="utf-8"))


def variations(task: str, split: str) -> range:
    """Official variation numbers of one task in one split, ascending (may be empty)."""
    return range(*_ranges()[task][SPLITS.index(split)])


def spread(items: range, limit: int | None) -> list[int]:
    """At most `limit` of the items, evenly spaced from the first: item floor(i * n / limit)."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def ask_engine() -> dict[str, list[list[int]]]:
    """The official splits from the engine itself, as {task: [[start, stop] of train, dev, test]}."""
    from hsg.environments.sciworld.engine import Pool

    pool = Pool(num_engines=1, heap_mb=768)
    ranges = {}
    try:
        engine, episode = pool.acquire()
        for task in TASKS:
            lines = engine.request("V", episode, task, 0, "", timeout=60).text.split("\n")
            lists = [json.loads(line) for line in lines]
            for numbers in lists:
                assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True, (task, numbers)
            ranges[task] = [[numbers[0], numbers[-1] + 1] if numbers else [0, 0] for numbers in lists]
    finally:
        pool.close()
    return ranges
