"""Lists of tasks in a file: what a model never solves becomes what the next one trains on (the hard set of SGE).

    # not solved in 16 samples by runs/a/checkpoints/iteration_000100/model
    two-sum
    median-of-two-sorted-arrays

One id per line, comments after #.  Deliberately absent: tasks themselves (they stay in their environment).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hsg.protocol import Task
from hsg.run.files import write_whole


def write_task_file(path: str | Path, ids: Iterable[str], note: str) -> None:
    """Write a list of task ids under a comment that says what they are. ValueError for an id that no line can hold."""
    listed = list(ids)
    for task_id in listed:
        if task_id != task_id.strip() or not task_id or task_id.startswith("#") or len(task_id.splitlines()) != 1:
            raise ValueError(f"a task id in a task file must be one line of text without #, got {task_id!r}; rename it")
    write_whole(path, "\n".join([f"# {' '.join(note.split())}", *listed, ""]))


def read_task_file(path: str | Path) -> list[str]:
    """The ids of a task file, each once, in its order. ValueError where it cannot be read or holds none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # editors of Windows begin it with a mark
    except (OSError, ValueError) as error:
        other = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)  # a name no file can have
        reason = getattr(error, "strerror", None) or other
        raise ValueError(f"tasks.file must be a readable file, got {str(path)!r}: {reason}") from None
    ids = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not ids:
        raise ValueError(
            f"tasks.file must list at least one task id, got {str(path)!r} with none; nothing is unsolved?"
        )
    return list(dict.fromkeys(ids))


def choose_listed(tasks: Sequence[Task], path: str | Path) -> list[Task]:
    """Those of the tasks that the file lists, in the order of the tasks. ValueError for an id that is not among them."""
    ids = set(read_task_file(path))
    chosen = [task for task in tasks if task.id in ids]
    if missing := sorted(ids - {task.id for task in chosen}):
        raise ValueError(
            f"tasks.file must list tasks of the training split, got {missing[0]!r} ({len(missing)} of {len(ids)} are not "
            "in it); use a list made with the same environment options"
        )
    return chosen
