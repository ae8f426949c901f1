"""Processes that hold an engine, for every environment that has one: a pipe, a time limit per answer, a pool.

    Pool ── Worker 0 (one process, one pipe, one lock) ── episode 0, 2, 4, ...
        └── Worker 1                                   ── episode 1, 3, 5, ...

A worker serves one request at a time, so a pool has as many as cores it may use.  An environment says how its process is
started, how an answer is read, and how an episode is forgotten.  Deliberately absent:
  1. multiprocessing: its children import the user's __main__ again or fork a process with threads and a GPU;
  2. a restart of episodes: when a worker dies its episodes raise EnvironmentFault, and new ones get a new worker;
  3. anything to reap: a worker ends with its pipe, however the parent died.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from hsg.protocol import EnvironmentFault

MAX_WORKERS = 8
FORGET_SECONDS = 60.0


def usable_cores() -> int:
    """Cores that this process may use, at most MAX_WORKERS: as many workers as are worth having."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_WORKERS, cores)


class Worker(ABC):
    """One process. Thread-safe: requests queue for its lock. After a fault it is dead for good."""

    title = "the worker"

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the trainer; a worker ends with its pipe
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._answers.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._dead: str | None = None
        self.num_episodes = 0
        self.topics: set[str] = set()

    @abstractmethod
    def _read_answer(self, deadline: float) -> Any:
        """One whole answer, made of `_read`. OSError, EOFError or TimeoutError: there is none, the worker is lost."""

    def _cause(self, error: Exception) -> str:
        """What the fault says of a worker lost by `error`."""
        return str(error) or type(error).__name__

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._dead is None and self._process.poll() is None

    def exchange(self, question: bytes, timeout: float) -> Any:
        """Send one question and read its answer. EnvironmentFault where the process died or overran `timeout` seconds."""
        with self._lock:
            if self._dead:
                raise EnvironmentFault(f"{self.title} is gone ({self._dead})")
            try:
                view = memoryview(question)
                while view:
                    view = view[self._questions.write(view) :]
                return self._read_answer(time.monotonic() + timeout)
            except (OSError, EOFError, TimeoutError) as error:
                self._kill(self._cause(error))
                raise EnvironmentFault(f"{self.title} is gone ({self._dead})") from error
            except BaseException as error:  # an interrupt between question and answer would shift all later answers
                self._kill(type(error).__name__)
                raise

    def _read(self, limit: int, deadline: float) -> bytes:
        """What has arrived, at least one and at most `limit` bytes."""
        if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("no answer in time")
        chunk = os.read(self._answers.fileno(), limit)
        if not chunk:
            raise EOFError(f"exit status {self._process.wait()}")
        return chunk

    def _kill(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._process.kill()
        with contextlib.suppress(OSError):
            self._questions.close()
            self._answers.close()
        self._process.wait()

    def close(self) -> None:
        """End the process, also while another thread waits for its answer (that thread gets an EnvironmentFault)."""
        self._dead = self._dead or "closed"
        self._process.kill()
        with self._lock:
            self._kill("closed")


SomeWorker = TypeVar("SomeWorker", bound=Worker)


class Pool(ABC, Generic[SomeWorker]):
    """Workers started as episodes need them. `acquire` gives the least busy one, a new one in place of a dead one."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers: list[SomeWorker] = []
        self._lock = threading.Lock()
        self._next_episode = 0
        self._closed = False
        _POOLS.add(self)

    @abstractmethod
    def _start(self) -> SomeWorker:
        """A new worker."""

    @abstractmethod
    def _forget(self, worker: SomeWorker, episode: int) -> None:
        """Tell a worker that an episode is over. EnvironmentFault: it is past telling."""

    def acquire(self, topic: str = "") -> tuple[SomeWorker, int]:
        """A worker, one that had this topic before among equally busy ones, and a fresh episode number.

        `release` gives both back.
        """
        with self._lock:
            if self._closed:
                raise EnvironmentFault("the task set is closed")
            self._workers = [worker for worker in self._workers if worker.alive]
            rank = {worker: (worker.num_episodes, topic not in worker.topics) for worker in self._workers}
            worker = min(self._workers, key=rank.__getitem__, default=None)
            if worker is None or (worker.num_episodes and len(self._workers) < self.num_workers):
                worker = self._start()
                self._workers.append(worker)
            worker.num_episodes += 1
            worker.topics.add(topic)
            self._next_episode += 1
            return worker, self._next_episode

    def release(self, worker: SomeWorker, episode: int) -> None:
        """Forget an episode; a dead worker has nothing to forget."""
        try:
            if worker.alive:
                with contextlib.suppress(EnvironmentFault):
                    self._forget(worker, episode)
        finally:
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


_POOLS: weakref.WeakSet[Pool[Any]] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_POOLS):
        pool.close()
