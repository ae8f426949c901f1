"""How far a long piece of work is: a bar for a person at a terminal, one line a minute in a log.

    warm start      12%|##          | 12/100 [00:31<03:47, loss=1.204]
    warm start: 12 of 100, 0:31 so far, about 3:47 left, loss=1.204

A log that is silent for five minutes looks like a program that hangs.  Deliberately absent: lines from any process but
the first, nested bars.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Protocol

from tqdm import tqdm

LINE_SECONDS = 60.0
"""Between two lines of a log."""


class Progress(Protocol):
    """What is asked of a bar, and of the lines in its place."""

    n: Any

    def update(self, n: Any = 1) -> Any: ...
    def set_postfix(self, **values: Any) -> Any: ...
    def close(self) -> Any: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> Any: ...


def progress(total: int | None, label: str, unit: str = "it", *, quiet: bool = False, delay: float = 0.0) -> Progress:
    """A bar where standard error is a terminal and not `quiet`, else lines; `total` None: nobody knows how much it is.

    delay   seconds before a bar is shown at all
    """
    if os.environ.get("RANK", "0") != "0" or total is None:
        return Lines(total, label, seconds=float("inf"))
    if quiet or not sys.stderr.isatty():
        return Lines(total, label)
    return tqdm(total=total, desc=label, unit=unit, delay=delay, mininterval=0.5, leave=False)


class Lines:
    """Says on standard error, at most once in `seconds`, how much is done and how long the rest takes at this pace."""

    def __init__(self, total: int | None, label: str, *, seconds: float = LINE_SECONDS) -> None:
        self.n, self.total, self.label, self.seconds = 0, total, label, seconds
        self._began = self._told = time.monotonic()
        self._values = ""

    def update(self, n: int = 1) -> None:
        self.n += n
        now = time.monotonic()
        if now - self._told < self.seconds:
            return
        self._told = now
        spent = now - self._began
        parts = [f"{self.label}: {self.n} of {self.total}", f"{duration(spent)} so far"]
        if self.n:
            parts.append(f"about {duration(spent / self.n * ((self.total or self.n) - self.n))} left")
        print(", ".join([*parts, self._values] if self._values else parts), file=sys.stderr, flush=True)

    def set_postfix(self, **values: Any) -> None:
        """What is said behind the times."""
        self._values = ", ".join(f"{name}={value}" for name, value in values.items())

    def close(self) -> None:
        """Nothing is left on a screen."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`, `2d 03:00`."""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
