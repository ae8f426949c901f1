"""One-line refusals that need a look at the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsg.config.checks import require_folder_there
from hsg.experiments.cli import main


def test_a_run_that_is_not_there_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U13: what lies beside runs, or in a folder called runs, is meant as one; a hub id is left alone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="X must be a folder that is there, got 'runs/nope'; there is no run in that folder"
    ):
        require_folder_there("runs/nope", "X")
    for name in ("runs/first", "elsewhere/first"):
        Path(name).mkdir(parents=True)
        Path(name, "config.yaml").touch()
    with pytest.raises(ValueError, match="got 'runs/frist'; did you mean 'runs/first'"):
        require_folder_there("runs/frist", "X")
    with pytest.raises(ValueError, match="got 'elsewhere/nope'; there are first"):
        require_folder_there("elsewhere/nope", "X")
    for fine in ("runs/first", "Qwen/Qwen2.5-1.5B", "gpt2", "smollm2", "nano", "x" * 500, "x" * 500 + "/y", "a\0/b"):
        require_folder_there(fine, "X")
    monkeypatch.chdir(tmp_path / "runs")
    require_folder_there("gpt2", "X")


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "runs/nope"], ["view", "runs/nope"], ["analysis", "runs/nope"], ["train", "--resume", "runs/nope"],
        ["train", "--set", "model.path=runs/nope"],
    ],
)  # fmt: skip
def test_every_command_says_no_such_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "must be a folder that is there, got 'runs/" in said
