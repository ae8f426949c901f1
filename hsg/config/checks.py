"""The house's one-line refusal: `<name> must be <rule>, got <value>; <what to do>`.

Deliberately absent: exception classes of our own; what a user can mend is a ValueError.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def require(holds: bool, key: str, rule: str, value: object, remedy: str = "") -> None:
    """Raise the house's one-line ValueError unless the rule holds."""
    if not holds:
        shown = repr(value) if len(repr(value)) <= 200 else repr(value)[:197] + "..."
        raise ValueError(f"{key} must be {rule}, got {shown}" + (f"; {remedy}" if remedy else ""))


def require_folder_there(given: str, key: str) -> None:
    """ValueError for what is meant as the folder of a run and is not there: `runs/nope` is no name on a model hub.

    So is what would lie beside runs, or in a folder called runs; near names are those of its neighbours. A bare name is
    none of it: models of a hub have such.
    """
    folder = Path(given).expanduser()
    there = os.path.isdir(folder.parent)  # unlike Path's own question it never raises, whatever the name
    beside = sorted(path.parent.name for path in folder.parent.glob("*/config.yaml")) if there else []
    if os.path.exists(folder) or "/" not in given or not (beside or folder.parent.name == "runs"):
        return
    near = difflib.get_close_matches(folder.name, beside, n=1)
    named = f"did you mean {str(folder.parent / near[0])!r}?" if near else f"there are {', '.join(beside[-5:])}"
    require(False, key, "a folder that is there", given, named if beside else "there is no run in that folder")
