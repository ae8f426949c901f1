"""Files whole or not at all, with the path in what is said; folders told apart by what is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hsg.run.files import BLOCK_BYTES, NUM_BLOCKS, folder_digest, write_whole


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*/file/a.json'"):
        write_whole(tmp_path / "file" / "a.json", "new")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match=rf"not a regular file: '.*/{name}'"):
            write_whole(tmp_path / name, "new")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]
    assert not (tmp_path / "pipe").is_file()


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/a.json'"):
        write_whole(tmp_path / "a.json", "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "a" / "inner" / "part").write_bytes(bytes(3 * BLOCK_BYTES))
    return tmp_path / "a"


def test_equal_contents_are_equal_wherever_and_whenever_they_were_written(folder: Path) -> None:
    other = shutil.copytree(folder, folder.with_name("b"))
    os.utime(other / "config.json", (0, 0))
    (other / ".cache").mkdir()
    (other / ".cache" / "download.metadata").write_text("1700000000.0")
    assert folder_digest(other) == folder_digest(folder)
    assert len(folder_digest(folder)) == 16


def test_a_byte_a_name_or_a_size_makes_another_folder(folder: Path) -> None:
    """Every byte of a file of up to 256 blocks counts."""
    seen = {folder_digest(folder)}
    part = folder / "inner" / "part"
    for place in (0, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES - 1):
        held = bytearray(3 * BLOCK_BYTES)
        held[place] = 1
        part.write_bytes(held)
        seen.add(folder_digest(folder))
    part.write_bytes(bytes(3 * BLOCK_BYTES + 1))
    seen.add(folder_digest(folder))
    part.rename(folder / "inner" / "other")
    seen.add(folder_digest(folder))
    (folder / "inner" / "other").unlink()
    seen.add(folder_digest(folder))
    assert len(seen) == 8


def test_of_a_large_file_blocks_are_read_from_the_first_to_the_last(folder: Path) -> None:
    """16 GB of holes: the whole of it would take minutes."""
    size = 2**34
    with (folder / "weights").open("wb") as file:
        file.truncate(size)
    seen = {folder_digest(folder)}
    for place in (0, (size - BLOCK_BYTES) * 100 // (NUM_BLOCKS - 1), size - 1):
        with (folder / "weights").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(folder_digest(folder))
    assert len(seen) == 4
