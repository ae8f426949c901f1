"""Files that are there whole or not at all.

Deliberately absent: checkpoints and logs, which survive a power cut too (checkpoint.py, tracking.py).
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file aside and rename it: other processes see the old one or the new one, and a killed one leaves no half.

    OSError as it comes; the draft is then gone too.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
