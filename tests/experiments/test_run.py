"""The command: bad input is one line on stderr, status 2 and nothing left behind; good input is a run folder."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

import hsg.experiments.run as program
from hsg.experiments.run import main

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "experiments" / "configs" / "smoke.yaml"
SMALL = [
    "num_tasks=2", "num_strategies=2", "num_rollouts=2", "sigma=1.5", "rollout.max_turns=2", "strategy.max_tokens=6",
    "rollout.max_action_tokens=6", "judge.max_tokens=6", "evaluation.num_tasks=2", "train.iterations=1", "log.quiet=true",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread, no network, and nobody waits for a warm start: bad input must be found before it."""

    def warm_start(*_: object) -> None:
        raise AssertionError("the warm start began although the input is bad")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("hsg.experiments.warmstart.warm_start", warm_start)
    monkeypatch.chdir(tmp_path)


def arguments(*overrides: str, config: str | Path = SMOKE) -> list[str]:
    return ["--config", str(config), *(part for item in overrides for part in ("--set", item))]


BAD = {
    "missing model folder": (["model.path=/no/such/model"], "model.path must be "),
    "folder without a model": (["model.path=."], "model.path must be a model folder"),
    "model that is not downloaded": (["model.path=nobody/nothing"], "model.path must be a model that transformers can load"),
    "missing encoder": (["model.encoder=./nothing"], "model.encoder must be "),
    "unknown environment": (["environment.name=toi"], "environment.name must be one of toy, sciworld, coding, "),
    "unknown environment option": (["toy.num_trian=5"], "toy.num_trian must be an option of environment 'toy'"),
    "environment option out of range": (["toy.num_train=0"], "toy.num_train must be in 1.."),
    "environment option of a wrong type": (["toy.num_train=many"], "toy.num_train must be a whole number, got 'many'"),
    "environment option that is a list": (["toy.bolted_share=[1]"], "toy.bolted_share must be a number, got [1]"),
    "N > C": (["sigma=0.5"], "sigma * num_strategies must be >= num_strategies (3) candidates, got 2"),
    "unknown split": (["evaluation.split=deb"], "evaluation.split: split must be one of train, dev, test, got 'deb'"),
    "unknown training split": (["environment.train_split=trian"], "environment.train_split: split must be one of train, dev, "),
    "too many tasks": (["num_tasks=300"], "num_tasks must be at most the 256 tasks"),
    "config typo": (["rollout.max_turn=3"], "rollout.max_turn must be a known key"),
    "wrong type": (["num_tasks=many"], "num_tasks must be a whole number, got 'many'"),
    "wrong range": (["delta=2"], "delta must be in (0, 1], got 2"),
    "unknown template": (["prompts.templates={actoin_next: x}"], "prompts.templates must name a template"),
    "escaping name": (["run.name=../x"], "run.name must be a plain folder name"),
    "option called name": (["environment.options={name: x}"], "toy.name must be an option of environment 'toy'"),
    "tasks that are no list": (["environment.name=sciworld", "environment.options.tasks=3"], "sciworld.tasks must be "),
    "tasks that are lists": (["environment.name=sciworld", "environment.options.tasks=[[1]]"], "sciworld.tasks must be "),
    "a bool for a number": (["toy.num_train=true"], "toy.num_train must be a whole number, got True"),
    "empty name of a split": (["evaluation.test_split=''"], "evaluation.test_split: split must be one of train, dev, "),
    "encoder that is not downloaded": (["model.encoder=nobody/nothing"], "model.encoder must be a model that"),
    "missing judge": (["judge.model=/no/such"], "judge.model must be "),
    "run.dir below a file": ([f"run.dir={__file__}/x"], "run.dir must be a folder that can be written"),
    "run.dir that is a file": ([f"run.dir={__file__}"], "run.dir must be a folder that can be written"),
    "cache that is a file": ([f"warmstart.cache_dir={__file__}"], "warmstart.cache_dir must be a folder that can be"),
    "no value": (["num_tasks"], "--set must be of the form section.key=value"),
}  # fmt: skip


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("error: ")


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overrides, message = BAD[what]
    assert main(arguments(*overrides)) == 2
    assert one_line(capsys).startswith(message)
    assert list(tmp_path.iterdir()) == []  # no half-made run


def test_empty_split(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hsg.environments.toy import ToyTaskSet

    tasks = ToyTaskSet.tasks
    for split, message in (("dev", "evaluation.split must have tasks, got the empty split 'dev'"),
                           ("train", "environment.train_split must have tasks, got the empty split 'train'")):  # fmt: skip
        monkeypatch.setattr(ToyTaskSet, "tasks", lambda self, name, s=split: [] if name == s else tasks(self, name))
        assert main(arguments()) == 2
        assert one_line(capsys).startswith(message)


def test_bad_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    for name, message in (("no.yaml", "--config must be a readable file"), ("bad.yaml", "--config must be valid YAML"),
                          ("list.yaml", "--config must be a mapping")):  # fmt: skip
        assert main(arguments(config=tmp_path / name)) == 2
        assert one_line(capsys).startswith(message)


def test_existing_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "old").mkdir(parents=True)
    assert main(arguments("run.name=old")) == 2
    assert one_line(capsys).startswith("run.name must be new in runs, got 'old', which exists")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"[]", b"{", b"{}", b"\xff\x00"])
def test_broken_model_folder(
    file: str, content: bytes, guesser_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(guesser_folder, broken)
    (broken / file).write_bytes(content)
    assert main(arguments(f"model.path={broken}", *SMALL)) == 2
    assert one_line(capsys).startswith("model.path must be a model that transformers can load")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_full_disk_is_status_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(program, "train", fail)
    assert main(arguments()) == 1
    assert "No space left on device" in one_line(capsys)


@pytest.mark.parametrize("given", [["--cofnig", "x"], ["--set"], ["surplus"]])
def test_bad_arguments(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    assert "see --help" in one_line(capsys)


def test_failed_run_is_status_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("environments must fail in at most\n  half")

    monkeypatch.setattr(program, "train", fail)
    assert main(arguments()) == 1
    assert one_line(capsys) == "environments must fail in at most half\n"


def command(*given: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), *given],
        capture_output=True, text=True, timeout=400, env=env,
    )  # fmt: skip


@pytest.mark.slow
def test_bad_input_from_the_shell() -> None:
    for overrides in (["model.path=/no/such/model"], ["toy.num_trian=5"]):
        done = command(*arguments(*overrides))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_whole_run_from_the_shell(guesser_folder: Path, tmp_path: Path) -> None:
    """A model folder instead of the warm start; evaluation afterwards, with the strategy blanked and exchanged too."""
    options = [*SMALL, f"model.path={guesser_folder}", "run.name=r", "evaluation.final=true",
               "evaluation.without_strategy=true", "evaluation.test_split=test", "evaluation.initial=true"]  # fmt: skip
    done = command(*arguments(*options))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    assert "run folder: runs/r" in done.stdout
    for label in ("before training", "after training", "strategy blanked", "strategies exchanged", "test split"):
        assert label in done.stdout
    files = {p.relative_to(tmp_path / "runs" / "r").as_posix() for p in (tmp_path / "runs" / "r").rglob("*")}
    assert {"config.yaml", "metrics.jsonl", "eval.jsonl", "trajectories/iteration_000000.jsonl"} <= files
    assert {f"checkpoints/iteration_00000{n}/model/config.json" for n in (0, 1)} <= files


@pytest.mark.slow
def test_a_template_that_asks_the_clock_is_told_one_date(
    guesser_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The day the run begins stands in its config.yaml, and a run resumed on another day goes on with it."""
    shutil.copytree(guesser_folder, tmp_path / "dated")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dated")
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }} " + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "dated")

    def on(day: int, *given: str) -> None:
        today = datetime.date(2026, 3, day)
        clock = SimpleNamespace(date=SimpleNamespace(today=lambda: today, fromisoformat=datetime.date.fromisoformat))
        monkeypatch.setattr(program, "datetime", clock)
        options = [*SMALL, "algorithm=grpo", "run.name=r", "log.tokens=true", "log.wandb=disabled", "checkpoint.every=1",
                   "evaluation.final=false"]  # fmt: skip
        assert main([*arguments(*options, *given), "--resume", "auto"]) == 0

    def shown(iteration: int) -> set[str]:
        file = tmp_path / "runs" / "r" / "trajectories" / f"iteration_{iteration:06d}.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        played = [record["input_ids"] for record in records if record["kind"] == "trajectory"]
        assert played
        return {tokenizer.decode(ids)[:10] for ids in played}

    on(4, f"model.path={tmp_path / 'dated'}")
    assert "date: '2026-03-04'" in (tmp_path / "runs" / "r" / "config.yaml").read_text()
    on(5, f"model.path={tmp_path / 'dated'}", "train.iterations=2")
    assert shown(0) == shown(1) == {"2026-03-04"}
    on(5, f"model.path={guesser_folder}", "run.name=plain")
    assert "date: null" in (tmp_path / "runs" / "plain" / "config.yaml").read_text()  # nobody asked


def test_bad_input_found_late_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A prompt that the context has no room for: the command to go on would only say it again."""

    trainer = SimpleNamespace(run=SimpleNamespace(path=tmp_path / "a run"))
    for error, said in ((ValueError("x"), ""), (RuntimeError("x"), "--resume"), (KeyboardInterrupt(), "--resume")):
        with pytest.raises(type(error)), program.unfinished(trainer):
            raise error
        shown = capsys.readouterr().err
        assert (said in shown) if said else shown == ""
