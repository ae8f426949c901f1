"""SIGTERM and SIGINT: a run that is asked to stop comes to a point where its state is whole, saves, and leaves.

    first signal    while training: remembered, and `check` raises `Stopped` at the next good point
                    before and after (warm start, evaluations): `Stopped` is raised at once
    second signal   the process ends at once, whatever it does (within half a second it counts as the first: a launcher
                    passes on what the terminal has sent to everyone)

Signals belong to the process, so this is the one module with a state of its own.  Deliberately absent: other signals, any
wish to finish what a scheduler has no patience for (kill -9 costs what came after the last checkpoint, no more).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130}
"""Exit status of a run that such a signal ended: 128 and its number, as shells have it."""


class Stopped(BaseException):
    """The run was asked to stop. No `Exception`: nobody catches it by accident."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = STATUS[number]


SAME_SECONDS = 0.5

_received = 0
_received_at = 0.0
_patient = False


@contextmanager
def handlers() -> Iterator[None]:
    """Take over both signals within it, in the main thread of the process."""
    global _received, _patient
    _received, _patient = 0, False
    before = {number: signal.signal(number, _handle) for number in STATUS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received, _patient = 0, False  # what comes after in this process was not asked to stop


def _handle(number: int, frame: FrameType | None) -> None:
    global _received, _received_at
    if _received:
        if time.monotonic() - _received_at > SAME_SECONDS:
            os._exit(128 + number)
        return
    _received, _received_at = number, time.monotonic()
    if not _patient:
        raise Stopped(number)


def received() -> int:
    """The signal that has come, or 0."""
    return _received


def check() -> None:
    """A good point to stop at."""
    if _received:
        raise Stopped(_received)


@contextmanager
def patience() -> Iterator[None]:
    """Within it a signal only shows in `check` and `received`."""
    global _patient
    _patient, before = True, _patient
    try:
        yield
    finally:
        _patient = before
