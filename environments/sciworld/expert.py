"""Expert actions: packaged lists, else gold paths on disk, else the engine's own gold path, cut at the win."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path

from environments.sciworld.engine import Pool

GOLD_SECONDS = 600.0


class ExpertStore:
    """Expert actions of one set of simplifications. Thread-safe; has an engine of its own, started when needed."""

    def __init__(self, cache: Path, simplifications: str, heap_mb: int):
        self._folder = cache / "gold" / (simplifications or "none")
        self._simplifications = simplifications
        self._pool = Pool(1, heap_mb)
        self._lock = threading.Lock()

    def actions(self, kind: str, variation: int) -> list[str] | None:
        """Actions that win, or None where the gold path does not. EnvironmentFault where the engine fails."""
        path = self._folder / f"{kind}-{variation}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        with self._lock:
            actions = self._gold_actions(kind, variation)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(actions, file)
        os.replace(file.name, path)
        return actions

    def _gold_actions(self, kind: str, variation: int) -> list[str] | None:
        engine, episode = self._pool.acquire()
        try:
            arguments = (kind, variation, self._simplifications)
            gold = engine.request("G", episode, *arguments, timeout=GOLD_SECONDS).text.split("\n")
            engine.request("L", episode, *arguments, timeout=GOLD_SECONDS)
            for index, action in enumerate(gold):
                answer = engine.request("S", episode, action, timeout=GOLD_SECONDS)
                if answer.completed:
                    return gold[: index + 1] if round(100 * answer.score) == 100 else None
            return None
        finally:
            self._pool.release(engine, episode)

    def close(self) -> None:
        self._pool.close()
