"""Threads for strangers: environment calls run here, in parallel, each with a time limit.

An environment may block, hang or raise.  Threads are daemons, so that one that hangs cannot keep the process alive, and
a worker whose call is over its limit is given up and replaced, whether anyone waits for that call or not (a `close` that
hangs has nobody).  The call's own exception becomes the result.

Deliberately absent: process pools (an environment that needs one brings its own), retries, cancellation (Python cannot
stop a thread; the abandoned call's result is dropped).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

CLOSING_SECONDS = 1.0


class CallTimeout(Exception):
    """The call did not return within its limit."""


class Call:
    """One call under way. `result(limit)` waits until `limit` seconds after it began to run."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self.begun = threading.Event()
        self.begin_time = math.inf
        self.worker: threading.Thread | None = None

    def run(self) -> None:
        self.begin_time = time.monotonic()
        self.begun.set()
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self.finished.set()


class Pool:
    """`num_workers` daemon threads that run calls in the order they come."""

    def __init__(self, num_workers: int, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._running: set[Call] = set()
        self._workers: set[threading.Thread] = set()  # but for those that were given up
        self.waited_seconds = 0.0  # time the caller spent waiting for results
        for _ in range(num_workers):
            self._hire()

    def _hire(self) -> None:
        worker = threading.Thread(target=self._work, daemon=True, name="environment")
        self._workers.add(worker)
        worker.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (call := self._calls.get()) is not None:
            call.worker = me
            self._running.add(call)
            call.run()
            self._running.discard(call)
            if me not in self._workers:  # its replacement is at work already
                return

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Start a call as soon as a worker is free."""
        call = Call(function, arguments)
        self._calls.put(call)
        return call

    def result(self, call: Call) -> Any:
        """The call's value. Raises the Exception it raised, or CallTimeout."""
        started = time.monotonic()
        try:
            # All workers may be stuck in calls that nobody waits for; without new ones this call would never begin.
            while not call.begun.wait(min(1.0, self.limit_seconds)):
                for other in list(self._running):
                    if time.monotonic() - other.begin_time >= self.limit_seconds:
                        self._give_up(other)
            left = call.begin_time + self.limit_seconds - time.monotonic()
            if not call.finished.wait(max(0.0, left)):
                self._give_up(call)
                raise CallTimeout(f"no answer within {self.limit_seconds:g} seconds")
        finally:
            self.waited_seconds += time.monotonic() - started
        if call.error is None:
            return call.value
        if isinstance(call.error, Exception):
            raise call.error
        # SystemExit of an environment ends the environment's call, not this process.
        raise RuntimeError(f"{type(call.error).__name__}: {call.error}") from call.error

    def _give_up(self, call: Call) -> None:
        """Replace the worker of a call that is over its limit, once."""
        if call.worker in self._workers:
            self._workers.remove(call.worker)
            self._hire()

    def close(self) -> None:
        """Let the workers go. Calls that still hang die with the process."""
        for _ in self._workers:
            self._calls.put(None)
        # Idle ones have ended when the interpreter is taken down: a thread that wakes up in the middle of that may abort it.
        deadline = time.monotonic() + CLOSING_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
