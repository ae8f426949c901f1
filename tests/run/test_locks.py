"""Locks: the second one waits or is told, and whoever ends lets go."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hsg.ranks import stopping
from hsg.run.locks import Lock, locked


def is_free(path: Path) -> bool:
    """Whether somebody else would get it now."""
    handle = os.open(path, os.O_RDONLY)  # opened once more, it is a stranger to the lock, in this process too
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_file_is_held_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.lock"
    for _ in range(2):
        with locked(path) as file:
            file.write("x")
            assert not is_free(path)
        assert is_free(path)
    assert path.read_text() == "xx"


def test_file_stays_held_by_a_program_that_inherited_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path) as file:
        program = subprocess.Popen(["sleep", "600"], stdout=file)
    try:
        assert not is_free(path)
    finally:
        program.kill()
        program.wait()
    assert is_free(path)


def test_whoever_waits_hears_of_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread, where signals raise nothing; and what is free by then is not begun any more."""
    path = tmp_path / "a.lock"
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            with locked(path):
                pass
        except stopping.Stopped as stopped:
            heard.append(stopped)

    with locked(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        monkeypatch.setattr(stopping, "_received", signal.SIGTERM)
        waiting.join(60)
    assert [str(stopped) for stopped in heard] == ["stopped by SIGTERM"]
    wait()
    assert len(heard) == 2


def test_folder_is_held_as_often_as_asked(tmp_path: Path) -> None:
    """In one process; a program that is started meanwhile does not hold it on. Others are told: tests/experiments/test_resume.py."""
    one, two = Lock(tmp_path), Lock(tmp_path)
    assert not is_free(tmp_path)
    program = subprocess.Popen(["sleep", "600"])
    try:
        one.close()
        one.close()
        assert not is_free(tmp_path)
        two.close()
        assert is_free(tmp_path)
    finally:
        program.kill()
        program.wait()


def test_file_systems_without_locks_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    Lock(tmp_path).close()
    with locked(tmp_path / "a.lock") as file:
        file.write("x")
