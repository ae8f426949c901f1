"""Task files: written and read back, and refused in one line where they do not fit the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import GuessTaskSet

from hsg.config.loading import make_config
from hsg.run.build import training_tasks
from hsg.run.taskfile import read_task_file, write_task_file


def test_what_is_written_is_read_and_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "hard.txt"
    write_task_file(path, ["gtrain3", "gtrain1"], "not solved\nin 4 samples")
    assert path.read_text().startswith("# not solved in 4 samples\n")
    assert read_task_file(path) == ["gtrain3", "gtrain1"]
    config = make_config({"tasks": {"file": str(path)}, "num_tasks": 2})
    assert [task.id for task in training_tasks(config, GuessTaskSet())] == ["gtrain1", "gtrain3"]
    with pytest.raises(ValueError, match="num_tasks must be at most the 2 tasks"):
        training_tasks(make_config({"tasks": {"file": str(path)}, "num_tasks": 3}), GuessTaskSet())


def test_comments_and_doubles(tmp_path: Path) -> None:
    path = tmp_path / "hard.txt"
    path.write_text("# a\n\n b \nc\n  # d\nb\n")
    assert read_task_file(path) == ["b", "c"]


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hard.txt"
    with pytest.raises(ValueError, match="tasks.file must be a readable file, got .*No such file"):
        read_task_file(path)
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="tasks.file must list at least one task id"):
        read_task_file(path)
    path.write_text("gtrain1\ngdev1\n")
    config = make_config({"tasks": {"file": str(path)}, "num_tasks": 1})
    with pytest.raises(ValueError, match=r"tasks.file must list tasks of the training split, got 'gdev1' \(1 of 2"):
        training_tasks(config, GuessTaskSet())
    for bad in ("", " a", "a\nb", "#a", "a\u2028b"):
        with pytest.raises(ValueError, match="a task id in a task file must be one line"):
            write_task_file(path, [bad], "x")
    assert read_task_file(path) == ["gtrain1", "gdev1"]  # what was there stays


def test_a_mark_at_the_beginning_is_no_part_of_an_id(tmp_path):
    path = tmp_path / "tasks.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert read_task_file(path) == ["a", "b"]


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ValueError, match=r"^tasks.file must be a readable file, got .*null byte"):
        read_task_file("a\0b")
