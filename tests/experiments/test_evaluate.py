"""hsg evaluate: samples kept and gone on with, summed up by hand, compared in pairs; one line for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import GuessTaskSet
from test_evaluated_model import seal
from test_trainer import configure

from hsg import environments
from hsg.config.loading import dump_config
from hsg.experiments import evaluate
from hsg.experiments.evaluate import evaluate_split, main
from hsg.experiments.evaluating.samples import SampleFile, sample_path, summarise, unsolved
from hsg.measure.evaluation import evaluation_tasks
from hsg.model.policy import Policy
from hsg.ranks.distributed import Distributed


def row(
    task: str, sample: int, success: bool | None, kind: str = "a", score: float = 0.5, turns: int = 2
) -> dict[str, Any]:
    return {"task_id": task, "kind": kind, "sample": sample, "outcome": None if success is None else float(success), "score": score,
            "success": bool(success), "turns": turns, "stop_reason": "env_error" if success is None else "done",
            "reached": f"end {sample}", "tokens": 10 * turns, "strategy_tokens": 4 * turns, "surprise": 3.0 * turns,
            "strategy_surprise": 1.0 * turns}  # fmt: skip


ROWS = [
    row("t1", 0, True), row("t1", 1, False), row("t2", 0, False), row("t2", 1, False), row("t3", 0, True, "b"), row("t3", 1, None, "b"),
    row("t4", 0, None, "b"), row("t4", 1, None, "b"),
]  # fmt: skip


def counts(summary: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {task["task_id"]: (task["num_samples"], task["num_solved"]) for task in summary["tasks"]}


def test_summary_by_hand() -> None:
    """Tasks 1/2, 0/2 and 1/1 (one sample broke); the fourth has no whole sample. Samples: 2/3 and 0/2."""
    summary = summarise(ROWS, [1, 2], {"both": ("a", "b"), "none": ("c",)})
    assert summary["success"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert summary["pass_at_k"] == {
        "1": pytest.approx(0.5),
        "2": pytest.approx(0.5),
    }  # at k = 2: 1 and 0, t3 has one sample
    assert (summary["num_tasks"], summary["num_failed"]) == (3, 3)
    assert summary["success_spread"] == pytest.approx(abs(2 / 3 - 0) / 2**0.5)
    assert summary["by_kind"]["a"]["success"] == 0.25
    assert summary["by_kind"]["b"]["num_tasks"] == 1
    assert list(summary["by_group"]) == ["both"]
    assert unsolved(counts(summary)) == ["t2"]  # t4 has no whole sample
    low, high = summary["success_interval"]
    assert low < 0.5 < high
    # Whole samples: two of t1, two of t2, one of t3; each task's samples end differently. Ten tokens a turn, 4 a strategy's.
    assert summary["distinct_outcomes"] == pytest.approx((2 + 2 + 1) / 3)
    assert (summary["tokens_per_turn"], summary["strategy_tokens_per_turn"]) == (10, 4)
    assert summary["strategy_entropy"] == pytest.approx(1 / 4)
    assert summary["action_entropy"] == pytest.approx(3 / 6)


def test_a_broken_sample_played_again_counts_once() -> None:
    summary = summarise([row("t1", 0, None), row("t1", 0, True)], [1])
    assert (summary["num_failed"], summary["success"]) == (0, 1.0)


def test_nothing_whole_is_no_number() -> None:
    summary = summarise([row("t1", 0, None)], [1])
    assert summary["num_tasks"] == 0
    assert "success" not in summary


def test_sample_file_goes_on_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    SampleFile(path, {"split": "dev"}).add(ROWS)
    with path.open("a") as file:
        file.write('{"task_id": "t9", "sam')  # killed in the middle of a line
    again = SampleFile(path, {"split": "dev"})
    assert again.rows == ROWS
    assert again.done == {("t1", 0), ("t1", 1), ("t2", 0), ("t2", 1), ("t3", 0)}
    assert path.read_text().count("\n") == 1 + len(ROWS)
    with pytest.raises(ValueError, match="same settings"):
        SampleFile(path, {"split": "test"})
    assert len(SampleFile(path, {"split": "dev"}).rows) == len(ROWS)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[1]", b'{"task_id": "t9", "sample": 0}', b"\xff", b"[" * 200_000, b"9" * 5000]
)
def test_a_damaged_sample_is_named_and_nothing_is_lost(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    SampleFile(path, {}).add(ROWS)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + b"".join(rest))
    held = path.read_bytes()
    with pytest.raises(ValueError, match=r"whole samples, got another thing in line 2 of .*s.jsonl'; delete that line"):
        SampleFile(path, {})
    assert path.read_bytes() == held


WRONG = [
    ("success", "yes"), ("success", 7), ("success", None), ("score", "x"), ("score", float("nan")), ("score", 1.5),
    ("turns", None), ("turns", 10**400), ("task_id", ["t1"]), ("sample", "0"), ("sample", -1), ("sample", True), ("kind", 3),
    ("kind", None), ("reached", ["end"]), ("tokens", "x"), ("outcome", "0"), ("surprise", float("inf")), ("stop_reason", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_another_kind_is_named_with_its_line(name: str, value: Any, tmp_path: Path) -> None:
    """What `summarise` would add up, sort by or take for a success."""
    path = tmp_path / "s.jsonl"
    SampleFile(path, {}).add([ROWS[0], {**ROWS[1], name: value}, *ROWS[2:]])
    held = path.read_bytes()
    with pytest.raises(ValueError, match=rf"got {name} .* in line 3 of .*s.jsonl'; delete that line") as caught:
        SampleFile(path, {})
    assert len(str(caught.value)) < 500
    assert path.read_bytes() == held


def test_samples_lie_beside_their_result_under_its_whole_name() -> None:
    names = {name: sample_path(Path("x") / name).name for name in ("a.json", "a", "q-1.5b", "q-1.7b")}
    assert names == {"a.json": "a.samples.jsonl", "a": "a.samples.jsonl", "q-1.5b": "q-1.5b.samples.jsonl",
                     "q-1.7b": "q-1.7b.samples.jsonl"}  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux that is always full")
def test_a_full_disk_names_the_samples(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "s.jsonl", {})
    file.path = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        file.add(ROWS)


def test_a_stopped_evaluation_ends_like_an_unbroken_one(
    guesser: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(evaluation={"num_tasks": 4, "batch_size": 2, "temperature": 1.0})
    task_set = GuessTaskSet()
    tasks = evaluation_tasks(config, task_set)
    given = (config, guesser, task_set, tasks, Distributed(), 2)
    whole = evaluate_split(*given)
    assert [(r["task_id"], r["sample"]) for r in whole] == [(t.id, s) for s in range(2) for t in tasks]

    calls = []
    play = evaluate.play_once

    def stopped(*arguments: Any, **options: Any) -> Any:
        calls.append([task.id for task in arguments[3]])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return play(*arguments, **options)

    monkeypatch.setattr(evaluate, "play_once", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate_split(*given, file=SampleFile(tmp_path / "s.jsonl", {}))
    assert len(SampleFile(tmp_path / "s.jsonl", {}).rows) == 4
    rest = evaluate_split(*given, file=SampleFile(tmp_path / "s.jsonl", {}))
    assert rest == whole
    assert calls[3:] == [[t.id for t in tasks[:2]], [t.id for t in tasks[2:]]]  # sample 0 was not played again
    assert evaluate_split(*given, file=SampleFile(tmp_path / "s.jsonl", {})) == whole
    assert len(calls) == 5


@pytest.fixture
def run_folder(guesser_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run in the guessing game, which `environments` then knows."""
    monkeypatch.setattr(environments, "make", lambda name, **options: GuessTaskSet())
    folder = tmp_path / "runs" / "r"
    shutil.copytree(guesser_folder, folder / "checkpoints" / "iteration_000003" / "model")
    seal(folder / "checkpoints" / "iteration_000003")
    config = configure(evaluation={"num_tasks": 4, "batch_size": 4, "temperature": 1.0})
    dump_config(config, folder / "config.yaml")
    return folder


def test_command_prints_tables_and_writes_json(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(run_folder), "--num-samples", "2", "--k", "1,2", "--save-unsolved", str(tmp_path / "hard.txt")]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"model:   {run_folder}/checkpoints/iteration_000003/model\n")
    assert "dev: 2 samples of each task, 0 broken episodes" in shown
    assert "pass@1" in shown
    (written,) = (run_folder / "evaluations").glob("*.json")
    summary = json.loads(written.read_text())
    assert summary["num_tasks"] == 4
    listed = (tmp_path / "hard.txt").read_text().splitlines()  # as `tasks.file` reads it: a comment, then ids
    assert listed[0].startswith("# not solved in 2 samples by ")
    assert listed[1:] == unsolved(counts(summary))
    # The same model against itself and against the result of the same samples: nothing differs.
    for other in (str(run_folder), str(written)):
        assert main([*asked[:5], "--compare", other]) == 0
        shown = capsys.readouterr().out
        assert "+0.0 points, p = 1 (" in shown
        assert "settings that differ" not in shown
    # U4: neither what was measured before nor an earlier comparison is lost, and all samples there are count.
    for asked_later in (["--num-samples", "1"], ["--num-samples", "1", "--k", "1"]):
        assert main([str(run_folder), *asked_later]) == 0
        capsys.readouterr()
        later = json.loads(written.read_text())
        assert {**later, "comparisons": {}} == summary
        assert list(later["comparisons"]) == [str(run_folder), str(written)]
        assert all(found["success"]["difference"] == 0.0 for found in later["comparisons"].values())
    kept = tmp_path / "kept.json"
    kept.write_text(written.read_text())
    assert main([*asked[:3], "--set", "seed=5", "--compare", str(kept)]) == 2
    said = capsys.readouterr().err
    assert said == "error: --compare must be played with seed 5, got 0; evaluate it with that, by --set\n"
    # What may differ is named, and kept beside the figures; a result of an older version says less, and that is said.
    hotter = [*asked[:3], "--temperature", "2", "--set", 'prompts.templates={"judgment": "x"}', "--compare", str(kept)]
    assert main([*hotter, "--out", str(tmp_path / "hot.json")]) == 0
    assert "settings that differ: evaluation.temperature 2.0 (theirs 1.0), prompts.templates" in capsys.readouterr().out
    assert (
        "evaluation.temperature"
        in json.loads((tmp_path / "hot.json").read_text())["comparisons"][str(kept)]["other_settings"]
    )
    settings = summary.pop("settings")
    kept.write_text(json.dumps({**summary, "worlds": {name: settings[name] for name in ("environment", "seed")}}))
    assert main([*asked[:3], "--compare", str(kept)]) == 0
    assert "settings that differ: unknown; the other result, of an older version" in capsys.readouterr().out


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is loaded or played")


@pytest.fixture
def unplayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "load_policy", never)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    return shown.err


def test_samples_of_other_weights_are_not_reused(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte in the middle of the weights, at the same path and size: another result by default, a refusal with --out."""
    model = str(shutil.copytree(run_folder / "checkpoints" / "iteration_000003" / "model", tmp_path / "m"))
    config = ["--config", str(run_folder / "config.yaml"), "--num-samples", "1"]
    monkeypatch.chdir(tmp_path)
    for out in ([], ["--out", "a.json"]):
        assert main([model, *config, *out]) == 0
    weights = bytearray(Path(model, "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    Path(model, "model.safetensors").write_bytes(weights)
    assert main([model, *config]) == 0
    assert len(list(Path("evaluations").glob("*.json"))) == 2
    capsys.readouterr()
    assert main([model, *config, "--out", "a.json"]) == 2
    assert "hold samples of the same settings, got 'a.samples.jsonl'" in one_line(capsys)


@pytest.mark.parametrize("lost", ["tokenizer.json", "config.json"])
def test_damaged_checkpoint_is_not_evaluated(
    lost: str, run_folder: Path, unplayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = (run_folder / "checkpoints" / f"iteration_{n:06d}" for n in (3, 4))
    shutil.copytree(older, newest)
    (newest / "model" / lost).unlink()
    assert main([str(run_folder)]) == 2
    said = one_line(capsys)
    assert f"{newest}: model/{lost} is missing" in said
    assert f"name an older one, '{older}'" in said
    for given in (newest, newest / "model"):
        assert main([str(given)]) == 2
        assert f"{newest}: model/{lost} is missing" in one_line(capsys)
    assert not (run_folder / "evaluations").exists()


def test_a_cut_configuration_of_a_run_is_not_played_with_defaults(
    run_folder: Path, unplayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run_folder / "config.yaml").read_text()
    for held in ("", text[: text.index("evaluation:")]):
        (run_folder / "config.yaml").write_text(held)
        for given in (run_folder, run_folder / "checkpoints" / "iteration_000003"):
            assert main([str(given)]) == 2
            assert "the run's config.yaml must be whole, as the run wrote it, got " in one_line(capsys)


def test_what_cannot_be_compared_is_noticed_before_anything_is_played(
    run_folder: Path, tmp_path: Path, unplayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"split": "dev", "settings": {}, "tasks": []}
    (tmp_path / "other.json").write_text(json.dumps({**result, "split": "test"}))
    (tmp_path / "worlds.json").write_text(json.dumps(result))
    other = shutil.copytree(run_folder, run_folder.with_name("other"))
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("max_turns: 3", "max_turns: 4"))
    for given, said in (
        (tmp_path / "no.json", "--compare must be a result of hsg evaluate, got"),
        (tmp_path / "other.json", "--compare must be played on the split 'dev', got 'test'"),
        (tmp_path / "worlds.json", "--compare must be played with environment.name 'toy', got None"),
        (other, "--compare must be played with rollout.max_turns 3, got 4"),
        ("no-such-hub-id", "--compare must be a model that transformers can load, got 'no-such-hub-id'"),
        (tmp_path / "no" / "such", "model.path must be an existing folder"),
    ):
        assert main([str(run_folder), "--compare", str(given)]) == 2
        assert said in one_line(capsys)
    assert not (run_folder / "evaluations").exists()


def test_damaged_samples_of_the_other_model_are_noticed_before_the_first_one_plays(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run_folder, run_folder.with_name("other"))
    assert main([str(other), "--num-samples", "1"]) == 0
    (samples,) = (other / "evaluations").glob("*.samples.jsonl")
    samples.write_text(samples.read_text().replace('"success": ', '"success": 1'))
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "load_policy", never)
    assert main([str(run_folder), "--compare", str(other)]) == 2
    assert "--out must hold whole samples, got " in one_line(capsys)


@pytest.mark.parametrize("out", ["/proc/x/y.json", "file/y.json", "folder.json", "pipe"])
def test_where_no_result_can_be_written_nothing_is_loaded(
    out: str,
    run_folder: Path,
    tmp_path: Path,
    unplayed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder.json").mkdir()
    os.mkfifo("pipe")
    assert main([str(run_folder), "--out", out]) == 2
    assert one_line(capsys).startswith("error: --out must be ")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_command_with_its_status(
    number: int,
    status: int,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluate, "play_once", lambda *_, **__: signal.raise_signal(number))
    assert main([str(run_folder), "--num-samples", "2", "--out", str(tmp_path / "r.json")]) == status
    said = f"stopped by {signal.Signals(number).name}; the same command goes on where it was\n"
    assert capsys.readouterr().err.endswith(said)


def test_runs_of_two_seeds_meet_the_same_worlds(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model under another training seed comes to the same in every task."""
    other = run_folder.with_name("other")
    shutil.copytree(run_folder, other, symlinks=True)
    text = (run_folder / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 7\n"))
    assert (other / "config.yaml").read_text() != text
    assert main([str(run_folder), "--num-samples", "2", "--compare", str(other)]) == 0
    assert capsys.readouterr().out.count("(sign flips over tasks; better on 0, worse on 0)") == 2
    results = [next((folder / "evaluations").glob("*.json")) for folder in (run_folder, other)]
    tasks = [json.loads(path.read_text())["tasks"] for path in results]
    assert tasks[0] == tasks[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL_OR_RUN must be given"),
        (["m", "--model", "n"], "MODEL must be given once"),
        (["m", "--num-samples", "0"], "--num-samples must be >= 1, got 0"),
        (["m", "--k", "1,x"], "--k must be whole numbers with commas, got '1,x'"),
        (["m", "--k", "4"], "--k must be in 1..3 (--num-samples), got 4; draw more samples"),
        (["m", "--k", "0"], "--k must be in 1..3 (--num-samples), got 0; pass@1 is"),
        (["m", "--num-tasks", "some"], "--num-tasks must be a whole number or all, got 'some'"),
        (["m", "--out", ""], "--out must be a file, got '.'"),
        (["m", "--save-unsolved", "."], "--save-unsolved must be a file, got '.'"),
        (["m", "--save-unsolved", "no/x.txt"], "--save-unsolved must be in a folder that can be written to, got 'no/x.txt'"),
        (["m", "--save-unsolved", "/proc/x.txt"], "--save-unsolved must be in a folder that can be written to, got '/proc/x"),
        (["nano", "--env", "toy"], "MODEL must name a trained model"),
        (["no/such/model", "--env", "toy"], "must be"),
        (["m", "--env", "moon"], "environment.name must be one of"),
        (["m", "--split", "nowhere"], "--split: split must be one of train, dev, test, got 'nowhere'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
