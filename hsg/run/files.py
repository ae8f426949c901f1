"""Files that are there whole or not at all, and folders told from others by what is in them.

Deliberately absent: checkpoints and logs, which survive a power cut too (checkpoint.py, tracking.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

NUM_BLOCKS, BLOCK_BYTES = 256, 2**16  # of a file, read by `folder_digest`: all of it up to 16 MiB


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file aside and rename it: other processes see the old one or the new one, and a killed one leaves no half.

    OSError names the file that was asked for, on a full disk too; the draft is then gone.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a root's rename would put a plain file in the place of /dev/null
        raise OSError(errno.EEXIST, "not a regular file", str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # where no draft could be made, none can be deleted
            draft.unlink()


def folder_digest(path: str | Path) -> str:
    """16 hex digits that tell what is in a folder: names, sizes and blocks of its files, those that begin with a dot aside.

    Of each file 256 evenly spaced blocks of 64 KiB are read, the first and the last among them: fast for 15 GB of weights,
    and training moves weights everywhere. A change between the blocks of a file above 16 MiB is not seen. OSError as it comes.
    """
    folder, digest = Path(path), hashlib.sha256()
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    for name in names:
        if any(part.startswith(".") for part in name.split("/")):  # what a hub client or an editor keeps for itself
            continue
        with (folder / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
            last = max(0, size - BLOCK_BYTES)
            for place in sorted({last * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)}):
                file.seek(place)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
