"""Learning curves: what was spent adds up, evaluations stand where they were made, equal runs are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsg.experiments.reading.curves import (
    group_by_configuration,
    labels,
    learning_curve,
    main,
    mean_curve,
    window_of,
    write_cost_curves,
)

LINE = {
    "iteration": 0,
    "cost/environment_turns": 10,
    "cost/sampled_tokens": 7.0,
    "time/iteration_seconds": 3.0,
    "reward/success": 0.5,
}
LINES = [LINE, {**LINE, "iteration": 1, "reward/success": 1.0}]


def test_spending_adds_up() -> None:
    curve = learning_curve(LINES)
    assert curve["iteration"] == [1, 2]
    assert curve["environment_turns"] == [10, 20]
    assert curve["sampled_tokens"] == [7, 14]
    assert curve["seconds"] == [3, 6]
    assert curve["reward/success"] == [0.5, 1.0]
    assert curve["evaluation/success"] == [None, None]


def test_evaluations_stand_where_they_were_made() -> None:
    """One before training, at no cost, and two after iteration 2, of which the last counts; variants are no point of it."""
    given = (
        ("before training", 0, 0.1),
        ("training", 2, 0.2),
        ("after training", 2, 0.3),
        ("strategy blanked", 2, 0.0),
    )
    found = [{"label": label, "iteration": i, "success": s, "score": 0.0} for label, i, s in given]
    curve = learning_curve(LINES, found)
    assert curve["environment_turns"] == [0, 10, 20]
    assert curve["reward/success"] == [None, 0.5, 1.0]
    assert curve["evaluation/success"] == [0.1, None, 0.3]


def test_mean_curve_by_hand() -> None:
    """Seeds of 3 and 4 iterations, evaluated every second one and at their ends: (0, 2) are shared, then the ends."""
    one = {"turns": [0, 5, 9, 14], "success": [0.0, None, 0.2, 0.4]}
    two = {"turns": [0, 5, 11, 16, 20], "success": [0.2, None, 0.4, None, 0.6]}
    points = mean_curve([one, two], "turns", "success")
    assert [p[:2] for p in points] == [(0, pytest.approx(0.1)), (10, pytest.approx(0.3)), (17, pytest.approx(0.5))]
    assert [p[2] for p in points] == pytest.approx([0.02**0.5] * 3)
    assert [p[1] for p in mean_curve([one], "turns", "success")] == [0.0, 0.2, 0.4]
    assert mean_curve([{"turns": [1], "success": [None]}], "turns", "success") == []


def make_run(folder: Path, seed: int, kappa: float = 0.1) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "run": {"name": folder.name}, "kappa": kappa}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    found = {"label": "training", "iteration": 2, "success": 0.1 * seed, "score": 0.0}
    (folder / "eval.jsonl").write_text(json.dumps(found) + "\n")
    return folder


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / n, s, k) for n, s, k in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2))]
    assert group_by_configuration(runs) == {"a (2 seeds)": runs[:2], "c": runs[2:]}
    (tmp_path / "x").mkdir()
    same_name = make_run(tmp_path / "x" / "c", 0, 0.3)
    assert group_by_configuration([runs[2], same_name]) == {str(runs[2]): [runs[2]], str(same_name): [same_name]}


def test_curves_against_cost_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / str(seed), seed)) for seed in range(2)]
    out = tmp_path / "c.png"
    assert main([*runs, "--against-cost", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert write_cost_curves(runs, tmp_path / "none.png", "reward/outcome") is None  # no line has it
    assert not (tmp_path / "none.png").exists()
    assert main([*runs, "--against-cost", "evaluation/nothing", "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        "error: --against-cost must be one of reward/success, reward/outcome, reward/score, evaluation/success, "
        "evaluation/score, got 'evaluation/nothing'\n"
    )
    (tmp_path / "0" / "metrics.jsonl").write_text('{"iteration": 0}\n')
    assert main([*runs, "--against-cost", "--out", str(out)]) == 2
    assert "runs must be runs that count their environment turns" in capsys.readouterr().err


def test_folders_of_one_name_are_two_runs_and_one_folder_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    runs = [make_run(tmp_path / "a", 0), make_run(tmp_path / "x" / "a", 1)]
    assert labels(runs) == list(map(str, runs))
    assert labels([runs[0], tmp_path / "x"]) == ["a", "x"]
    assert main([str(runs[0]), f"{runs[0]}/", "--against-cost", "--out", str(tmp_path / "c.png")]) == 2
    assert "runs must be different folders" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["no/such/c.png", ".", "", "c.jpg"])
def test_a_picture_goes_where_it_can(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", 0)
    assert main(["a", "--out", out]) == 2
    assert capsys.readouterr().err == f"error: --out must be a .png file in a folder that is there, got {out!r}\n"


@pytest.mark.parametrize(("file", "text", "said"), [
    ("metrics.jsonl", "", "runs must be runs that count their environment turns"),
    ("metrics.jsonl", '{"x": 1}', "an object as a run writes it with iteration"),
    ("metrics.jsonl", '{"iteration": 0, "cost/environment_turns": "x"}', "must be a finite number, got 'x'"),
    ("eval.jsonl", '{"label": "training"}', "an object as a run writes it with label, iteration"),
    ("eval.jsonl", '{"label": "training", "iteration": 1, "success": "y"}', "must be a finite number, got 'y'"),
    ("config.yaml", "!!set {a}", "the run's configuration must be"),
])  # fmt: skip
def test_what_no_run_wrote_is_named(file: str, text: str, said: str, tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "a", 0)
    (run / file).write_text(text)
    assert main([str(run), "--against-cost", "--out", str(tmp_path / "c.png")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("count", "window"), [(0, 1), (4, 1), (16, 1), (24, 3), (40, 5), (71, 7), (72, 9), (4000, 9)])
def test_a_mean_is_over_an_eighth_of_the_run_at_most(count: int, window: int) -> None:
    assert window_of(count) == window
