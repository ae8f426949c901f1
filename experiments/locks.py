"""One process at a time: a lock that its file's holder loses when it ends, however it ends.

Deliberately absent: locks over network file systems that do not keep them, waiting for a limited time.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """The file, opened to append, and nobody else's as long as it is open here or in a process that inherited it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
