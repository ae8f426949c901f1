"""The writer of run folders: strict JSON, never over another run, a logger that may fail, names that stay inside."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from hsg.config.loading import load_config, make_config
from hsg.config.options import Config
from hsg.run import origin
from hsg.run.origin import commit
from hsg.run.tracking import RunFolder


def configure(folder: Path, **log: Any) -> Config:
    return make_config({"run": {"dir": str(folder)}, "log": {"wandb": "disabled", **log}})


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_are_flat_numbers_and_undefined_ones_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(configure(tmp_path), "r")
    run.metrics(0, {"b/x": 1.5, "a/y": 2.0, "a/nan": math.nan, "a/inf": -math.inf})
    run.metrics(1, {"b/x": 1.0})
    assert read(run.path / "metrics.jsonl") == [{"iteration": 0, "a/y": 2.0, "b/x": 1.5}, {"iteration": 1, "b/x": 1.0}]


def test_not_a_number_is_refused_in_records(tmp_path: Path) -> None:
    run = RunFolder(configure(tmp_path), "r")
    with pytest.raises(ValueError, match="JSON"):
        run.trajectories(0, [{"kind": "trajectory", "score": math.nan}])
    assert not (run.path / "trajectories" / "iteration_000000.jsonl").exists()  # whole or not at all


def test_records_stand_one_a_line_in_utf8(tmp_path: Path) -> None:
    run = RunFolder(configure(tmp_path), "r")
    records = [{"kind": "candidates", "task_id": "../../etc/ä\n日本 \u2028"}, {"kind": "trajectory", "outcome": None}]
    run.trajectories(12, records)
    path = run.path / "trajectories" / "iteration_000012.jsonl"
    text = path.read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.strip("\n").split("\n")] == records
    assert len(text.splitlines()) == 2  # many readers split at U+2028 too
    assert "日本" in text
    assert sorted(p.name for p in path.parent.iterdir()) == ["iteration_000012.jsonl"]


def test_trajectories_can_be_left_out(tmp_path: Path) -> None:
    run = RunFolder(configure(tmp_path, trajectories=False), "r")
    run.trajectories(0, [{"kind": "trajectory"}])
    assert list((run.path / "trajectories").iterdir()) == []


def test_existing_run_is_never_touched(tmp_path: Path) -> None:
    run = RunFolder(configure(tmp_path), "r")
    run.metrics(0, {"a/b": 1.0})
    with pytest.raises(ValueError, match=r"run.name must be new in .*got 'r', which exists"):
        RunFolder(configure(tmp_path), "r")
    assert len(read(run.path / "metrics.jsonl")) == 1


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"run.dir must be a folder that can be written") as caught:
        RunFolder(configure(tmp_path / "file"), "r")
    assert "\n" not in str(caught.value)


def test_config_is_dumped_and_loads_equal(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert load_config(RunFolder(config, "r").path / "config.yaml") == config


@pytest.mark.parametrize("name", ["../out", "a/b", "/abs", "..", ".", "", "a/../../b"])
def test_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"run.name must be a plain folder name"):
        make_config({"run": {"dir": str(tmp_path), "name": name}})
    assert list(tmp_path.iterdir()) == []


class JealousLogger:
    """Raises when a step goes backwards, as some do."""

    def __init__(self) -> None:
        self.step, self.seen, self.finished = -1, [], False

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if step is not None:
            assert step >= self.step, "steps must not go backwards"
            self.step = step
        self.seen.append(values)

    def finish(self, **options: Any) -> None:
        self.finished = True


def test_logger_never_meets_a_step_that_goes_backwards(tmp_path: Path) -> None:
    """R7: train, evaluate, go on from an older iteration; the local files hold everything."""
    run = RunFolder(configure(tmp_path), "r")
    logger = run._wandb = JealousLogger()
    run.metrics(5, {"a/b": 1.0})
    run.evaluation({"iteration": 6, "label": "x", "score": 0.5, "by_kind": {"k": {"score": 1.0}}})
    run.metrics(3, {"a/b": 2.0, "a/nan": math.nan})
    run.close()
    assert [m["iteration"] for m in read(run.path / "metrics.jsonl")] == [5, 3]
    assert read(run.path / "eval.jsonl")[0]["by_kind"] == {"k": {"score": 1.0}}
    assert [values["iteration"] for values in logger.seen] == [5, 6, 3]
    assert "a/nan" not in logger.seen[2]
    assert logger.finished


class BrokenLogger(JealousLogger):
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        raise OSError("disk full")

    def finish(self, **options: Any) -> None:
        raise OSError("disk full")


def test_logger_that_fails_never_stops_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(configure(tmp_path), "r")
    run._wandb = BrokenLogger()
    run.metrics(0, {"a/b": 1.0})
    run.metrics(1, {"a/b": 1.0})
    run.evaluation({"iteration": 1, "label": "x"})
    run.close()
    assert len(read(run.path / "metrics.jsonl")) == 2
    assert capsys.readouterr().err.count("disk full") == 1


@pytest.mark.slow
def test_the_real_logger_follows_offline_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(configure(tmp_path, wandb="offline"), "r")
    assert run._wandb is not None
    run.metrics(0, {"a/y": 2.0})
    run.evaluation({"iteration": 0, "label": "before training", "score": 0.5})
    run.close()
    assert capfd.readouterr() == ("", "")
    assert list((run.path / "wandb").glob("offline-run-*"))


def test_a_run_folder_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U14: the command, commit, versions and machine of each start."""
    monkeypatch.setattr(sys, "argv", ["hsg train", "--set", "run.name=a b"])
    run = RunFolder(configure(tmp_path), "r")
    (first,) = json.loads((run.path / "run.json").read_text())["starts"]
    assert first["command"] == "hsg train --set 'run.name=a b'"
    assert first["commit"] == commit()
    assert first["host"] == platform.node()
    assert first["versions"]["torch"] == version("torch")
    assert (first["processes"], first["devices"]) == (1, ["cpu"]) or torch.cuda.is_available()
    run.close()
    for damage in ("", "[1]", '{"starts": 3}'):
        (run.path / "run.json").write_text(damage)
        RunFolder(configure(tmp_path), "r", resume={}).close()
        assert len(json.loads((run.path / "run.json").read_text())["starts"]) == 1
    RunFolder(configure(tmp_path), "r", resume={}).close()
    assert len(json.loads((run.path / "run.json").read_text())["starts"]) == 2


def test_the_commit_of_a_copy_elsewhere_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed copy inside somebody's own checkout must not bear that one's commit."""
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    copy = tmp_path / "origin.py"
    copy.write_bytes(Path(origin.__file__).read_bytes())
    monkeypatch.setattr(origin, "__file__", str(copy))
    assert commit() == "unknown"
