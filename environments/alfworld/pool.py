"""Worker processes: any game in any slot, a time limit per answer, and a death that costs only its own episodes.

    Pool ── Worker 0 (one process, one pipe, one lock) ── episode 1, 3, 4, ...
        └── Worker 1                                   ── episode 2, 5, ...

Deliberately absent:
  1. multiprocessing: its children import the user's __main__ again or fork a process with threads and a GPU;
  2. a restart of episodes: when a worker dies its episodes raise EnvironmentFault, and new ones get a new worker;
  3. anything to reap: a worker ends with its pipe, however the parent died.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.protocol import EnvironmentFault

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "environments.alfworld.worker")


class Worker:
    """One process. Thread-safe: requests queue for its lock. After a fault it is dead for good."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        # Text in a game's order must not depend on the hash seed; nor may a worker take the cores of the others.
        settings = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, **settings, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._rest = b""
        self.num_episodes = 0
        self.games: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._dead is None and self._process.poll() is None

    def request(self, do: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. EnvironmentFault where the worker reports one, died or overran `timeout` seconds."""
        with self._lock:
            if self._dead:
                raise EnvironmentFault(f"the ALFWorld worker is gone ({self._dead})")
            try:
                self._write(json.dumps({"do": do, **arguments}).encode() + b"\n")
                answer = json.loads(self._read_line(time.monotonic() + timeout))
            except (OSError, EOFError, TimeoutError) as error:
                self._kill(str(error) or type(error).__name__)
                raise EnvironmentFault(f"the ALFWorld worker is gone ({self._dead})") from error
            except BaseException as error:  # an interrupt between question and answer would shift all later answers
                self._kill(type(error).__name__)
                raise
        if "error" in answer:
            raise EnvironmentFault(f"ALFWorld failed: {answer['error']}")
        return answer

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise EOFError(f"exit status {self._process.wait()}")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _kill(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.stdout.close()  # type: ignore[union-attr]
        self._process.wait()

    def close(self) -> None:
        """End the process, also while another thread waits for its answer (that thread gets an EnvironmentFault)."""
        self._dead = self._dead or "closed"
        self._process.kill()
        with self._lock:
            self._kill("closed")


class Pool:
    """Workers started as episodes need them. `acquire` gives the least busy one, a new one in place of a dead one."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._next_episode = 0
        self._closed = False
        _POOLS.add(self)

    def acquire(self, game: str) -> tuple[Worker, int]:
        """A worker, one that knows the game among equals, and a fresh episode number; `release` gives both back."""
        with self._lock:
            if self._closed:
                raise EnvironmentFault("the task set is closed")
            self._workers = [worker for worker in self._workers if worker.alive]
            rank = {worker: (worker.num_episodes, game not in worker.games) for worker in self._workers}
            worker = min(self._workers, key=rank.__getitem__, default=None)
            if worker is None or (worker.num_episodes and len(self._workers) < self.num_workers):
                worker = Worker()
                self._workers.append(worker)
            worker.num_episodes += 1
            worker.games.add(game)
            self._next_episode += 1
            return worker, self._next_episode

    def release(self, worker: Worker, episode: int) -> None:
        """Forget an episode; a dead worker has nothing to forget."""
        if worker.alive:
            with contextlib.suppress(EnvironmentFault):
                worker.request("forget", episode=episode, timeout=60)
        with self._lock:
            worker.num_episodes -= 1

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._workers if worker.alive]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_POOLS):
        pool.close()
