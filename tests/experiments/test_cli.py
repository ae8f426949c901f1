"""The hsg command: every word reaches its program, help and errors are short, what it needs is installed with it."""

from __future__ import annotations

import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hsg
from hsg.experiments import cli
from hsg.experiments.run import parse_arguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("given", [[], ["--help"], ["-h"]])
def test_overview_names_every_command(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(given) == 0
    shown = capsys.readouterr().out
    for name in cli.available():
        assert f"  {name} " in shown
    assert {"train", "evaluate", "warmstart", "view", "check-env"} <= set(cli.available())


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    program = types.SimpleNamespace(main=lambda arguments: seen.append((sys.argv[0], arguments)) or 7)
    monkeypatch.setattr(sys, "argv", ["hsg"])
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: program)
    assert cli.main(["train", "--set", "seed=1"]) == 7
    assert seen == [("hsg train", ["--set", "seed=1"])]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hsg {hsg.__version__}\n"


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error == "error: COMMAND must be a command of hsg, got 'trian'; did you mean train?\n"


@pytest.mark.parametrize("name", list(cli.available()))
def test_help_says_the_command_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hsg"])
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: hsg {name}" in shown
    assert "example" in shown


@pytest.mark.parametrize("name", list(cli.available()))
def test_wrong_option_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--no-such-option"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_check_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["check-env", "toy", "--set", "num_train=8", "--num-tasks", "1"]) == 0
    assert capsys.readouterr().out == "toy: nothing is wrong\n"
    assert cli.main(["check-env", "toy", "--set", "num_trian=8"]) == 2
    assert "did you mean 'num_train'?" in capsys.readouterr().err
    assert cli.main(["check-env", "toy", "--set", "8"]) == 2
    monkeypatch.setattr("hsg.protocol.check_environment", lambda task_set, num_tasks: ["It is wrong."])
    assert cli.main(["check-env", "toy"]) == 1
    assert capsys.readouterr().out == "It is wrong.\n"


def test_quiet_is_an_option_of_the_configuration() -> None:
    assert parse_arguments(["--set", "seed=1", "--quiet"]).set == ["seed=1", "log.quiet=true"]
    assert parse_arguments([]).set == []


def test_what_the_commands_read_is_package_data() -> None:
    """Every file beside the modules is in setup.py's patterns and in MANIFEST.in, and the entry point exists."""
    setup = (ROOT / "setup.py").read_text()
    namespace: dict[str, object] = {}
    exec(next(line for line in setup.splitlines() if line.startswith("DATA = ")), namespace)
    patterns = namespace["DATA"]
    assert isinstance(patterns, list)
    manifest = (ROOT / "MANIFEST.in").read_text()
    allowed = next(line for line in manifest.splitlines() if line.startswith("recursive-include experiments")).split()[
        2:
    ]
    files = [
        p
        for folder in ("configs", "viewer")
        for p in (ROOT / "experiments" / folder).iterdir()
        if p.suffix not in (".py", "") and p.is_file()
    ]
    assert len(files) > 15
    for path in files:
        assert any(fnmatch(path.name, pattern.rpartition("/")[2]) for pattern in patterns), path.name
        assert any(fnmatch(path.name, pattern) for pattern in allowed), path.name
    assert '"hsg = hsg.experiments.cli:main"' in setup
