"""Expert actions of a task: packaged, else cached on disk, else the engine's gold path cut at the win.

experts.jsonl.gz   {"task": "find-animal/17", "actions": [...]}, simplifications "easy" (see expert.py)
<cache>/gold/<simplifications>/find-animal-17.json      a list of actions, or null where the gold path loses
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import tempfile
import threading
from pathlib import Path

from hsg.environments.sciworld.engine import Engine, Pool
from hsg.protocol import EnvironmentFault

PACKAGED = Path(__file__).parent / "experts.jsonl.gz"
PACKAGED_SIMPLIFICATIONS = "easy"
GOLD_SECONDS = 600.0
"""Limit on one gold path (the engine searches for 0.1-55 s)."""


@functools.cache
def packaged_experts() -> dict[str, list[str]]:
    """Task id -> winning actions under "easy", from the file in this package."""
    if not PACKAGED.exists():  # only while expert.py makes it
        return {}
    with gzip.open(PACKAGED, "rt", encoding="utf-8") as file:
        return {row["task"]: row["actions"] for row in map(json.loads, file)}


def won_after(engine: Engine, episode: int, task: tuple[str, int, str], actions: list[str]) -> int | None:
    """Load (kind, variation, simplifications), play, and say after how many actions it was won; None if it was not."""
    engine.request("L", episode, *task, timeout=GOLD_SECONDS)
    for index, action in enumerate(actions):
        answer = engine.request("S", episode, action, timeout=GOLD_SECONDS)
        if answer.completed:
            return index + 1 if round(100 * answer.score) == 100 else None
    return None


def gold_actions(engine: Engine, episode: int, task: tuple[str, int, str]) -> list[str] | None:
    """The engine's gold path up to the win; None where it does not win."""
    gold = engine.request("G", episode, *task, timeout=GOLD_SECONDS).text.split("\n")
    length = won_after(engine, episode, task, gold)
    return None if length is None else gold[:length]


class ExpertStore:
    """Expert actions of one set of simplifications. Thread-safe; its own JVM starts at the first gold path."""

    def __init__(self, cache: Path, simplifications: str, heap_mb: int):
        self._folder = cache / "gold" / (simplifications or "none")
        self._simplifications = simplifications
        self._pool = Pool(1, heap_mb)
        self._lock = threading.Lock()

    def actions(self, kind: str, variation: int) -> list[str] | None:
        """Actions that win, or None where none are known (the gold path loses, or the engine failed)."""
        if self._simplifications == PACKAGED_SIMPLIFICATIONS and (
            actions := packaged_experts().get(f"{kind}/{variation}")
        ):
            return list(actions)
        path = self._folder / f"{kind}-{variation}.json"
        with self._lock:
            if path.exists():
                return json.loads(path.read_text(encoding="utf-8"))
            engine, episode = self._pool.acquire()
            try:
                actions = gold_actions(engine, episode, (kind, variation, self._simplifications))
            except EnvironmentFault:
                return None  # not cached: a dead JVM says nothing about the task
            finally:
                self._pool.release(engine, episode)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump(actions, file)
            os.replace(file.name, path)  # other processes see the whole file or none
        return actions

    def close(self) -> None:
        self._pool.close()
