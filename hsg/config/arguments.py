"""Command lines: wrong arguments are bad input like any other, one line and exit status 2, never the whole usage."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises a ValueError where the stock parser would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def refuse(error: Exception, status: int = 2) -> int:
    """Say it in one line on standard error, from the main process; returns the exit status. HSG_TRACEBACK=1 shows where."""
    if os.environ.get("RANK", "0") == "0":
        text = "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in str(error))
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    if os.environ.get("HSG_TRACEBACK"):
        raise error
    return status
