"""One process at a time: locks of the kernel, which a process loses when it ends, however it ends.

    locked   a file; whoever comes second waits                    a warm start, a cell that several studies share
    Lock     a folder; whoever comes second is told                a run folder

A program that is started inherits the file of `locked`, and holds it on; the folder of `Lock` it does not.
Deliberately absent: file systems without locks (there nobody waits, and nobody is told), waiting for a limited time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar

from hsg.ranks import stopping

POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """The file, opened to append, and nobody else's as long as it is open here or in a process that inherited it.

    `Stopped` where a signal comes while it waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        while not _taken(file):
            stopping.check()  # whoever waits in a thread hears of a signal here
            time.sleep(POLL_SECONDS)
        stopping.check()
        yield file


def _taken(file: IO[str] | int) -> bool:
    """Try to lock an open file or folder; True also where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Lock:
    """A folder held by this process; death lets go of it too. A process may hold one folder any number of times."""

    _held: ClassVar[dict[tuple[int, int], list[int]]] = {}  # folder (device, inode) -> handle, how often

    def __init__(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)  # closed in programs that this one starts
        status = os.fstat(handle)
        self._key = status.st_dev, status.st_ino
        if self._key in self._held:
            os.close(handle)
        else:
            if not _taken(handle):
                os.close(handle)
                raise BlockingIOError(f"{str(folder)!r} is held by another process")
            self._held[self._key] = [handle, 0]
        self._held[self._key][1] += 1
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        held = self._held[self._key]
        held[1] -= 1
        if not held[1]:
            os.close(held[0])
            del self._held[self._key]


def lock(folder: Path) -> Lock:
    """Hold a run folder. ValueError in one line where another process does."""
    try:
        return Lock(folder)
    except BlockingIOError:
        raise ValueError(
            f"run.name must be that of a run that no other process is training, got {str(folder)!r}, which one is; wait "
            "for it, stop it, or choose another name"
        ) from None
