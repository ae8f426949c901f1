"""Where ALFWorld's games are, as data: nothing here starts an engine.

    <data>/<split>/<task type>-<object>-<movable receptacle>-<receptacle>-<room>/<trial>/game.tw-pddl, traj_data.json

    KINDS    the six task types              SPLITS    train, valid_seen (rooms of train), valid_unseen (other rooms)
    task id  valid_seen/pick_heat_then_place_in_recep-Apple-None-Fridge-3/trial_T2019...

Whoever asks for "dev" gets valid_seen, whoever asks for "test" gets valid_unseen: the names that hsg's configurations
use by default.  Chosen as the wheel chooses: no sliced objects, no movable receptacles, and marked as solvable.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hsg.protocol import Task

SPLITS = ("train", "valid_seen", "valid_unseen")
ALIASES = {"dev": "valid_seen", "test": "valid_unseen"}
KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
DOWNLOAD = "run alfworld-download, or take data: generated"


def select_kinds(names: str | Iterable[str], option: str = "alfworld.tasks") -> tuple[str, ...]:
    """Task types behind "all" or names, in the order of KINDS. Unknown name: ValueError."""
    wanted = {names} if isinstance(names, str) else set(names)
    for name in sorted(wanted - {"all", *KINDS}):
        near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else "see environments.alfworld.KINDS"
        raise ValueError(f"{option} must be 'all' or task types ({', '.join(KINDS)}), got {name!r}; {hint}")
    if not wanted:
        raise ValueError(f"{option} must name at least one task type, got none; 'all' takes every type")
    return KINDS if "all" in wanted else tuple(kind for kind in KINDS if kind in wanted)


def find_data(data: str | None) -> Path:
    """The folder that holds the splits: `data`, $ALFWORLD_DATA or ~/.cache/alfworld, or its json_2.1.* below."""
    root = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    folders = (root, *sorted(root.glob("json_2.1.*")))
    found = [folder for folder in folders if any((folder / split).is_dir() for split in SPLITS)]
    if not found:
        raise ValueError(
            f"alfworld.data must be a folder with {', '.join(SPLITS)} (or json_2.1.* with them), got {str(root)!r}; "
            + DOWNLOAD
        )
    return found[0]


def find_games(root: Path, split: str, kinds: Iterable[str], limit: int | None = None) -> list[Task]:
    """The games of one split in a fixed order: one of every type, then the next of every type, so that a prefix is balanced.

    `limit`: at most so many per type. ValueError where the split has none.
    """
    columns = []
    for kind in kinds:
        files = sorted((root / split).glob(f"{kind}-*/*/game.tw-pddl"))
        column: list[Task] = []
        for path in files:
            if limit is not None and len(column) == limit:
                break
            if _is_played(path):
                task_id = path.parent.relative_to(root).as_posix()
                column.append(Task(task_id, split, kind, {"game": str(path)}))
        columns.append(column)
    tasks = [column[row] for row in range(max(map(len, columns))) for column in columns if row < len(column)]
    if not tasks:
        raise ValueError(f"split {split!r} must have games of the chosen types, got none in {str(root)!r}; {DOWNLOAD}")
    return tasks


def _is_played(path: Path) -> bool:
    """Whether the benchmark plays this game."""
    if "movable" in path.parts[-3] or "Sliced" in path.parts[-3]:
        return False
    with open(path, "rb") as file:  # "solvable" is near the end: thousands of files are not read whole
        file.seek(max(0, os.path.getsize(path) - 8192))
        tail = file.read()
    if b'"solvable": true' in tail:
        return True
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("solvable") is True
    except (ValueError, AttributeError):  # not JSON, not UTF-8, or no object
        raise ValueError(f"alfworld.data must hold whole games, got a broken {str(path)!r}; {DOWNLOAD}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that other processes see the whole of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
