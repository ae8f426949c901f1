"""Worker processes that play ALFWorld's games: any game in any slot, one JSON line per request and per answer.

    {"do": "step", "episode": 7, "action": "look"}  ->  {"text": ..., "commands": [...], "won": false, "valid": true}

What a request may be stands in worker.py, the other end of the pipe.  A worker that has loaded a game has it parsed, so
the next episode of that game goes there, among equally busy ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.environments import workers
from hsg.environments.workers import FORGET_SECONDS
from hsg.protocol import EnvironmentFault

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "hsg.environments.alfworld.worker")
READ_BYTES = 1 << 16


class Worker(workers.Worker):
    """One process of `environments.alfworld.worker`."""

    title = "the ALFWorld worker"

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        # Text in a game's order must not depend on the hash seed; nor may a worker take the cores of the others.
        settings = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        super().__init__(command, {**os.environ, **settings, "PYTHONPATH": path})
        self._rest = b""

    def request(self, do: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. EnvironmentFault where the worker reports one, died or overran `timeout` seconds."""
        answer = self.exchange(json.dumps({"do": do, **arguments}).encode() + b"\n", timeout)
        if "error" in answer:
            raise EnvironmentFault(f"ALFWorld failed: {answer['error']}")
        return answer

    def _read_answer(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            self._rest += self._read(READ_BYTES, deadline)
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


class Pool(workers.Pool[Worker]):
    """Workers; the topic of `acquire` is the game."""

    def _start(self) -> Worker:
        return Worker()

    def _forget(self, worker: Worker, episode: int) -> None:
        worker.request("forget", episode=episode, timeout=FORGET_SECONDS)
