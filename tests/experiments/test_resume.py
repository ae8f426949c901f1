"""Stopped, killed and resumed, a run leaves the files of one that nothing happened to, bit for bit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import FakeEncoder, GuessTaskSet
from processes import Done, run_ranks
from safetensors.torch import load_file

import hsg.collector
from hsg.config.loading import load_config, make_config
from hsg.experiments.reading.resume import find_run, read_config
from hsg.experiments.run import main
from hsg.model import fit as fit_module
from hsg.ranks.distributed import Distributed
from hsg.run.build import load_policy
from hsg.run.checkpoint import newest_checkpoint, read_state, save_checkpoint
from hsg.run.tracking import RunFolder
from hsg.trainer import Trainer

OPTIONS: dict[str, Any] = {
    "num_tasks": 3, "num_strategies": 2, "num_rollouts": 2, "sigma": 2, "kappa": 0.5, "prompts": {"style": "terse"},
    "environment": {"name": "toy"}, "strategy": {"max_tokens": 10}, "judge": {"max_tokens": 12},
    "rollout": {"max_turns": 3, "max_action_tokens": 8, "env_timeout_seconds": 60.0},
    "update": {"epochs": 2, "minibatch_trajectories": 6}, "optimizer": {"lr": 1e-3, "warmup_steps": 4, "schedule": "cosine"},
    "loss": {"kl_coef": 0.01}, "train": {"iterations": 6}, "checkpoint": {"every": 1, "initial": True, "keep": 2},
    "evaluation": {"every": 2, "num_tasks": 4, "initial": True, "final": True, "without_strategy": True, "test_split": "train"},
    "log": {"wandb": "disabled", "quiet": True, "tokens": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(guesser_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration; the run of each number of ranks that nothing happened to is made when asked for."""
    folder = tmp_path_factory.mktemp("resume")
    options = {**OPTIONS, "model": {"path": str(guesser_folder)}, "run": {"dir": str(folder)}}
    (folder / "c.yaml").write_text(yaml.safe_dump(options))
    return folder


def run(root: Path, name: str, *overrides: str, resume: str = "none", **given: Any) -> Done:
    sets = [part for item in (f"run.name={name}", *overrides) for part in ("--set", item)]
    return run_ranks(["--config", str(root / "c.yaml"), *sets, "--resume", resume], root, **given)


def whole(root: Path, num_ranks: int) -> Path:
    folder = root / f"whole{num_ranks}"
    if not folder.exists():
        done = run(root, folder.name, num_ranks=num_ranks)
        assert done.status == [0] * num_ranks, done.output[-3000:]
    return folder


def objects(path: Path) -> list[dict[str, Any]]:
    """Lines of a .jsonl file, times and memory aside."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a checkpoint but for its clock and the sizes of files that hold times."""
    state["trainer"].pop("seconds")
    state["run"].pop("logger_id")
    state["run"]["sizes"].pop("metrics.jsonl", None)
    return state


def assert_same_run(one: Path, other: Path) -> None:
    """All files agree: records and weights in every bit, metrics but for times."""
    names = [sorted(p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file()) for f in (one, other)]
    assert names[0] == names[1]
    assert "checkpoints/iteration_000006/state.safetensors" in names[0]
    for name in names[0]:
        a, b = one / name, other / name
        if name == "metrics.jsonl":
            assert [line["iteration"] for line in objects(a)] == list(range(6))
            assert objects(a) == objects(b)
        elif name.endswith("state.json"):
            assert without_times(json.loads(a.read_text())) == without_times(json.loads(b.read_text()))
        elif name not in ("config.yaml", "curves.png", "run.json") and not name.endswith("checksums.json"):
            assert a.read_bytes() == b.read_bytes(), name


def test_the_run_trains(root: Path) -> None:
    """What the other tests compare is worth comparing: weights move, evaluations and all checkpoints are there."""
    folder = whole(root, 1)
    first, last = (load_file(folder / "checkpoints" / f"iteration_00000{n}/model/model.safetensors") for n in (0, 6))
    assert any((first[name] != last[name]).any() for name in first)
    labels = [line["label"] for line in objects(folder / "eval.jsonl")]
    assert labels == ["before training", "training", "training", "training", "after training", "strategy blanked",
                      "strategies exchanged", "test split"]  # fmt: skip
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [f"iteration_00000{n}" for n in (0, 5, 6)]
    assert objects(folder / "metrics.jsonl")[-1]["update/optimizer_steps"] > 12


KILLS = {  # (point, call): 4 optimizer steps an iteration, 8 evaluations in all, one of them before the first iteration
    "in the middle of a save": ("save", 4),
    "in the first save": ("save", 0),
    "in the middle of a rollout": ("rollout", 14),
    "between two epochs": ("optimizer_step", 14),
    "during an evaluation": ("evaluation", 2),
    "during the evaluation before training": ("evaluation", 0),
    "during an evaluation after training": ("evaluation", 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("what", KILLS)
def test_killed_and_resumed_is_as_if_nothing_had_happened(root: Path, what: str, num_ranks: int) -> None:
    expected = whole(root, num_ranks)
    name = f"{what.replace(' ', '-')}-{num_ranks}"
    killed = run(root, name, num_ranks=num_ranks, kill=KILLS[what])
    assert killed.status[0] == -signal.SIGKILL, killed.output[-3000:]
    assert 0 not in killed.status
    assert not (root / name / "finished.json").exists()
    resumed = run(root, name, num_ranks=num_ranks, resume="auto")
    assert resumed.status == [0] * num_ranks, resumed.output[-3000:]
    assert_same_run(expected, root / name)


STATEFUL = [
    "reflection.p_bad=0.4", "reflection.p_good=0.3", "rnd.weight=0.1", "advantage.estimator=gae", "rollout.max_refills=1",
    "strategy.per=turn", "evaluation.every=0", "evaluation.initial=false", "evaluation.without_strategy=false",
]  # fmt: skip


@pytest.mark.slow
def test_all_that_has_a_state_comes_back(root: Path) -> None:
    """Critic, novelty predictor and reflection buffers too: 6 iterations in one piece, and with a kill after three."""
    straight = run(root, "stateful", *STATEFUL)
    assert straight.status == [0], straight.output[-3000:]
    killed = run(root, "stateful-killed", *STATEFUL, kill=("optimizer_step", 14))
    assert killed.status == [-signal.SIGKILL], killed.output[-3000:]
    assert run(root, "stateful-killed", *STATEFUL, resume="auto").status == [0]
    assert_same_run(root / "stateful", root / "stateful-killed")


@pytest.mark.slow
def test_finished_run_is_left_alone(root: Path) -> None:
    folder = whole(root, 1)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    done = run(root, folder.name, resume="auto")
    assert (done.status, done.output) == ([0], f"{folder} is finished; nothing is left to do\n")
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_has_no_room_is_not_finished(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    short = ["--config", str(root / "c.yaml"), *("--set", "run.name=full"), *("--set", "train.iterations=1")]
    short += [
        *("--set", "algorithm=grpo"),
        *("--set", "log.quiet=true"),
        *("--set", "evaluation.without_strategy=false"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr("hsg.run.checkpoint.save_checkpoint", full)
        assert main(short) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: the last checkpoint must be written before the run is finished, got none")
    assert not (root / "full" / "finished.json").exists()
    assert main([*short, "--resume", "auto"]) == 0
    assert (root / "full" / "checkpoints" / "iteration_000001").is_dir()


# ---------------------------------------------------------------------------------------- which run, and as it began


def resumed(root: Path, resume: str, *overrides: str) -> Any:
    return find_run(read_config(root / "c.yaml", root, list(overrides), resume), resume)


@pytest.mark.slow
def test_another_configuration_is_refused(root: Path) -> None:
    """What the run learns from must stay; how it is done may change."""
    whole(root, 1)
    for change, words in (("seed=1", "seed = 1 (it was 0)"), ("optimizer.lr=0.5", "optimizer.lr = 0.5 (it was 0.001)")):
        with pytest.raises(ValueError, match=re.escape(words)):
            resumed(root, "auto", "run.name=whole1", change)
    free = [
        "train.iterations=7",
        "evaluation.every=3",
        "checkpoint.every=2",
        "rollout.env_threads=2",
        "log.quiet=false",
    ]
    found = resumed(root, "auto", "run.name=whole1", *free)
    assert (found.checkpoint.name, found.finished) == ("iteration_000006", False)  # more iterations were asked for
    assert not resumed(root, "auto", "run.name=whole1", "train.max_environment_turns=1000000").finished
    assert resumed(root, "auto", "run.name=whole1").finished


def test_which_run_goes_on(guesser_folder: Path, tmp_path: Path) -> None:
    options = {"model": {"path": str(guesser_folder)}, "run": {"dir": str(tmp_path)}, "log": {"wandb": "disabled"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options))
    assert resumed(tmp_path, "auto") is None  # nothing is there yet
    assert resumed(tmp_path, "auto", "run.name=a") is None
    config = load_config(tmp_path / "c.yaml")
    for name in ("a", "b"):
        RunFolder(config, name)
    found = resumed(tmp_path, "auto")
    assert (found.folder.name, found.checkpoint, found.finished) == ("b", None, False)  # the newest; it begins anew
    assert resumed(tmp_path, "auto", "run.name=a").folder == tmp_path / "a"
    for text in ("", "[]", "{}", "\udcff"):  # the disk was full, say
        (tmp_path / "a" / "finished.json").write_text(text, errors="surrogateescape")
        assert not resumed(tmp_path, "auto", "run.name=a").finished
    assert resumed(tmp_path, "none", "run.name=a") is None
    (tmp_path / "a" / "checkpoints" / "iteration_000002").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoints must hold one that is whole to go on with"):
        resumed(tmp_path, "auto", "run.name=a")  # what was learned is not thrown away in silence
    given = read_config(None, tmp_path, ["train.iterations=3"], str(tmp_path / "a"))
    assert (given.run.dir, given.run.name, given.train.iterations) == (str(tmp_path), "a", 3)
    with pytest.raises(ValueError, match="--resume must be auto, none or a run folder, got '/no/such'"):
        read_config(None, tmp_path, [], "/no/such")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="run.name must be that of a run where it is resumed"):
        resumed(tmp_path, "auto", "run.name=mine")


def test_logs_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    """A half-written line goes too, and the file that is finished is not finished any more."""
    config = make_config({"run": {"dir": str(tmp_path)}, "log": {"wandb": "disabled"}})
    run = RunFolder(config, "r")
    for n in range(2):
        run.metrics(n, {"a/b": n})
        run.trajectories(n, [{"kind": "trajectory"}])
    state = json.loads(json.dumps(run.state_dict()))
    run.metrics(2, {"a/b": 2})
    run.evaluation({"iteration": 2})
    run.trajectories(2, [{"kind": "trajectory"}])
    run.finish({"asked": []})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "a')
    copy = run.path / "trajectories" / "iteration_000000-copy.jsonl"  # somebody's own, which counts for no iteration
    copy.write_text("mine")
    RunFolder(config, "r", resume=state)
    assert copy.read_text() == "mine"
    copy.unlink()
    assert [line["iteration"] for line in objects(run.path / "metrics.jsonl")] == [0, 1]
    assert not (run.path / "eval.jsonl").exists()
    assert not (run.path / "finished.json").exists()
    assert len(list((run.path / "trajectories").iterdir())) == 2
    RunFolder(config, "r", resume={})
    assert sorted(p.name for p in run.path.rglob("*")) == ["config.yaml", "run.json", "trajectories"]


def test_lines_that_are_lost_are_named(
    guesser_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that is shorter than the checkpoint knows is refused; one that was taken away is begun anew, and it is said."""
    options = {"model": {"path": str(guesser_folder)}, "run": {"dir": str(tmp_path)}, "log": {"wandb": "disabled"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options))
    run = RunFolder(load_config(tmp_path / "c.yaml"), "r")
    run.metrics(0, {"a/b": 1.0})
    state = {"iteration": 1, "run": run.state_dict(), "trainer": {}, "learner": {}}
    policy = load_policy(load_config(tmp_path / "c.yaml"), str(guesser_folder), "cpu")
    save_checkpoint(run.path, "iteration_000001", policy.model, policy.tokenizer, state)
    assert resumed(tmp_path, "auto", "run.name=r").checkpoint.name == "iteration_000001"
    assert capsys.readouterr().err == ""
    log = run.path / "metrics.jsonl"
    size = log.stat().st_size
    log.write_bytes(log.read_bytes()[:-5])
    with pytest.raises(
        ValueError, match=f"metrics.jsonl must have the {size} bytes it had at the checkpoint, got {size - 5}"
    ):
        resumed(tmp_path, "auto", "run.name=r")
    for damage in (b"\0" * size, b"[" * (size - 1) + b"\n"):
        log.write_bytes(damage)
        with pytest.raises(
            ValueError,
            match="line 1 of .*metrics.jsonl must be an object as a run writes it, got .*put the file back, or",
        ):
            resumed(tmp_path, "auto", "run.name=r")
    log.unlink()
    assert resumed(tmp_path, "auto", "run.name=r") is not None
    assert (
        capsys.readouterr().err
        == f"{log} is gone, with {size} bytes that the checkpoint knows of; a new one is begun\n"
    )


HOLD = """
import sys
from pathlib import Path
from hsg.run.locks import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_folder_has_one_process(tmp_path: Path) -> None:
    """Refused while another one holds it, there again once that is dead; one process may open it twice."""
    config = make_config({"run": {"dir": str(tmp_path)}, "log": {"wandb": "disabled"}})
    RunFolder(config, "r").close()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "r")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = (tmp_path / "r" / "config.yaml").stat().st_mtime_ns
        with pytest.raises(ValueError, match="run.name must be that of a run that no other process is training, got"):
            RunFolder(config, "r", resume={})
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"run": {"dir": str(tmp_path), "name": "r"}}))
        with pytest.raises(ValueError, match="that no other process is training"):
            resumed(tmp_path, "auto")
        assert (tmp_path / "r" / "config.yaml").stat().st_mtime_ns == before
    finally:
        other.kill()
        other.wait()
    one, two = RunFolder(config, "r", resume={}), RunFolder(config, "r", resume={})
    one.close()
    one.close()
    two.close()


def test_time_before_the_resume_counts(guesser_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.max_seconds` is of the whole run: one that had used it up does no further iteration."""
    monkeypatch.setattr(hsg.collector, "load_encoder", lambda *_: FakeEncoder())
    options = {
        **OPTIONS,
        "run": {"dir": str(tmp_path)},
        "train": {"iterations": 9, "max_seconds": 1e-3},
        "evaluation": {},
    }
    config = make_config(options)
    run = RunFolder(config, "r")
    first = Trainer(config, GuessTaskSet(), str(guesser_folder), Distributed(), run)
    assert first.train() == 1
    first.close()
    checkpoint = newest_checkpoint(run.path)
    assert checkpoint is not None
    again = Trainer(config, GuessTaskSet(), str(guesser_folder), Distributed(), run, resume=checkpoint)
    assert again.train() == 1
    assert again.seconds >= read_state(checkpoint, tensors=False)["trainer"]["seconds"] > 1e-3
    again.close()


def test_a_resumed_run_keeps_its_attention_cache_and_packing(
    guesser_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it found right at its start is in the checkpoint, and is asked for again where another start would find more."""
    options = {**OPTIONS, "model": {"path": str(guesser_folder)}, "run": {"dir": str(tmp_path), "name": "r"}}
    options |= {"algorithm": "grpo", "evaluation": {}, "train": {"iterations": 1}, "loss": {"kl_coef": 0.0}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options))
    fit_module._FOUND.clear()
    with monkeypatch.context() as slow:
        slow.setattr(fit_module, "CACHES", ("off",))
        slow.setattr(fit_module, "PACKINGS", ("plain",))
        assert main(["--config", str(tmp_path / "c.yaml")]) == 0
    settings = "model.attention=sdpa rollout.cache=off update.packing=plain"
    assert settings in capsys.readouterr().out
    checkpoint = newest_checkpoint(tmp_path / "r")
    assert checkpoint is not None
    fit = read_state(checkpoint, tensors=False)["trainer"]["fit"]
    assert " ".join(f"{key}={value}" for key, value in fit.items()) == settings
    fit_module._FOUND.clear()
    assert main(["--config", str(tmp_path / "c.yaml"), "--set", "train.iterations=2", "--resume", "auto"]) == 0
    assert settings in capsys.readouterr().out
    assert (
        load_config(tmp_path / "r" / "config.yaml").update.packing == "auto"
    )  # so that the next resume is allowed, too


# -------------------------------------------------------------------------------------------------- asked to stop


STOPS = {
    "rollout": (("rollout", 14), "iteration_00000"),
    "update": (("optimizer_step", 14), "_update_000"),
    "evaluation": (("evaluation", 2), "iteration_000004"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("where", STOPS)
def test_signal_saves_and_ends_with_its_status(root: Path, where: str, number: int, status: int) -> None:
    """Two ranks, of which one is asked; both finish what they are at, save together, and a resumed run is the whole one."""
    point, saved = STOPS[where]
    name = f"{where}-{status}"
    stopped = run(root, name, num_ranks=2, kill=point, send=number, to=1)
    assert stopped.status == [status, status], stopped.output[-3000:]
    newest = sorted(p.name for p in (root / name / "checkpoints").iterdir())[-1]
    assert saved in newest, newest
    resumed = run(root, name, num_ranks=2, resume="auto")
    assert resumed.status == [0, 0], resumed.output[-3000:]
    assert f"from {newest}" in resumed.output
    assert_same_run(whole(root, 2), root / name)
    if where == "rollout":  # it says how to go on, and the folder that it did
        assert stopped.output.count(f"--resume {root / name} (make: RESUME={root / name})") == 1
        assert len(json.loads((root / name / "run.json").read_text())["starts"]) == 2


@pytest.mark.slow
def test_stopped_in_the_middle_of_an_update_goes_on_with_other_ranks(root: Path) -> None:
    """Two ranks stop between two optimizer steps, one goes on with the rows of both; then three, one of them without any."""
    stopped = run(root, "fewer", num_ranks=2, kill=("optimizer_step", 14), send=signal.SIGTERM)
    assert stopped.status == [143, 143]
    assert (root / "fewer" / "checkpoints" / "iteration_000003_update_0003").is_dir()
    again = run(root, "fewer", kill=("optimizer_step", 2), send=signal.SIGTERM, resume="auto")
    assert again.status == [143]
    done = run(root, "fewer", num_ranks=3, resume="auto")
    assert done.status == [0] * 3, done.output[-3000:]
    assert_close_run(whole(root, 1), root / "fewer")


@pytest.mark.slow
def test_second_signal_ends_at_once(root: Path) -> None:
    done = run(root, "twice", "checkpoint.every=0", kill=("rollout", 14), send=signal.SIGTERM, setup=ask_again)
    assert done.status == [143]
    assert "stopped by" not in done.output  # it did not leave in good order, and nothing was saved
    assert [p.name for p in (root / "twice" / "checkpoints").iterdir()] == ["iteration_000000"]


def ask_again() -> None:
    """A second signal when the first has been seen for a while."""
    import time

    from hsg.ranks import stopping

    def check() -> None:
        if stopping.received():
            time.sleep(2 * stopping.SAME_SECONDS)
            signal.raise_signal(signal.SIGTERM)

    stopping.check = check


# ---------------------------------------------------------------------------------------------- another number of ranks


def close_to(a: Any, b: Any) -> bool:
    """Equal, numbers within 1e-5."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close_to(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close_to, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return a == pytest.approx(b, rel=1e-5, abs=1e-5)
    return a == b


def assert_close_run(one: Path, other: Path, iterations: int = 6, but: tuple[str, ...] = ()) -> None:
    """The same tasks and trajectories; numbers within 1e-5. Positions forwarded depend on who shares a batch; `but`: other
    metrics that do too.
    """
    for name in ("eval.jsonl", *(f"trajectories/iteration_00000{n}.jsonl" for n in range(iterations))):
        a, b = objects(one / name), objects(other / name)
        assert len(a) == len(b)
        assert all(map(close_to, a, b)), name
    pairs = zip(objects(one / "metrics.jsonl"), objects(other / "metrics.jsonl"), strict=True)
    for a, b in pairs:
        assert a.keys() == b.keys()
        compared = [k for k in a if not k.endswith("_positions") and k not in but]
        assert {k: (a[k], b[k]) for k in compared if not close_to(a[k], b[k])} == {}
    weights = [load_file(f / f"checkpoints/iteration_{iterations:06d}/model/model.safetensors") for f in (one, other)]
    for key, value in weights[0].items():
        assert (value - weights[1][key]).abs().max() < 1e-5, key


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(root: Path) -> None:
    killed = run(root, "other", num_ranks=2, kill=("optimizer_step", 14))
    assert killed.status[0] == -signal.SIGKILL
    done = run(root, "other", num_ranks=3, resume="auto")
    assert done.status == [0] * 3, done.output[-3000:]
    assert_close_run(whole(root, 1), root / "other")
