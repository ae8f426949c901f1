"""Analyses of a run folder: the judge against oracles by hand, drops, distances, dead groups; one line where impossible."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hsg import environments
from hsg.config.loading import dump_config, make_config
from hsg.config.options import Config
from hsg.environments.toy import wasted_turns
from hsg.experiments.reading.analysis import (
    actions_of,
    analyse,
    join,
    judge_counts,
    main,
    make_oracle,
    off_path_turns,
    read_trajectories,
    with_shares,
)

TOY: dict[str, Any] = {"environment": {"name": "toy"}}


def turn(action: str | None, flagged: bool = False, reward: float = 0.0) -> dict[str, Any]:
    return {"action": action, "flagged": flagged, "reward": reward}


def line(task_id: str, strategy: str | None, *turns: dict[str, Any], judgment: str | None = "said") -> dict[str, Any]:
    return {"kind": "trajectory", "task_id": task_id, "strategy": strategy, "judgment": judgment, "turns": list(turns)}


def make_run(folder: Path, config: Config, lines: dict[int, list[Any]], metrics: list[Any], found: list[Any]) -> Path:
    (folder / "trajectories").mkdir(parents=True)
    dump_config(config, folder / "config.yaml")
    for iteration, records in lines.items():
        path = folder / "trajectories" / f"iteration_{iteration:06d}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, records in (("metrics.jsonl", metrics), ("eval.jsonl", found)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def toy_run(tmp_path: Path) -> Path:
    """Two iterations of one task in the toy world. Iteration 0: turns 0 and 2 are wasted, 0 and 1 flagged: one hit."""
    task = environments.make("toy").tasks("train")[0]
    area, place, goal = (task.data[name] for name in ("area", "place", "goal"))
    strategy = f"Search the {area} first."
    wandering = [turn("look", True), turn(f"go {area}", True), turn(None), turn(f"open {place}"), turn(f"take {goal}")]
    assert wasted_turns(task, strategy, [t["action"] or "" for t in wandering]) == (0, 2)
    straight = [turn(f"go {area}"), turn("wait", True)]
    lines = {
        0: [
            {"kind": "candidates"},
            line(task.id, strategy, *wandering),
            line(task.id, strategy, turn("look", True), judgment=None),  # not judged
            line(task.id, None, turn("look", True)),  # did not see its strategy
        ],
        1: [line(task.id, strategy, *straight)],
    }
    metrics = [
        {
            "iteration": 0,
            "advantage/dead_groups": 0.5,
            "strategy/distance_candidates": 0.2,
            "strategy/distance_selected": 0.4,
        },
        {"iteration": 1, "advantage/dead_groups": 1.0},
    ]
    found = [
        {"label": label, "iteration": i, "score": score, "success": success}
        for label, i, score, success in (
            ("before training", 0, 0.1, 0.0), ("after training", 2, 0.75, 0.5),
            ("strategy blanked", 2, 0.5, 0.25), ("strategies exchanged", 2, 0.25, 0.5), ("test split", 2, 0.9, 0.9),
        )
    ]  # fmt: skip
    return make_run(tmp_path / "run", make_config(TOY), lines, metrics, found)


def test_judge_against_the_toy_world(toy_run: Path) -> None:
    oracle, name, task_set = make_oracle(make_config(TOY))
    task_set.close()
    counts = judge_counts(toy_run, oracle)
    assert name == "the environment's oracle"
    assert counts[0] == {"judged": 5, "flagged": 2, "wasted": 2, "hits": 1}
    assert counts[1] == {"judged": 2, "flagged": 1, "wasted": 1, "hits": 1}
    assert with_shares(counts[0])["precision"] == 0.5
    assert with_shares(counts[1])["recall"] == 1.0
    assert "precision" not in with_shares({"judged": 5, "flagged": 0, "wasted": 2, "hits": 0})


def test_off_the_experts_path_by_hand() -> None:
    """b once, and so not a second time; c is not on it but gained something; looking ahead makes no later step a waste."""
    path = ["a", "b", "d"]
    assert off_path_turns(path, ["a", "x", "b", "b", "c", "d"], [0, 0, 0, 0, 1.5, 0]) == {1, 3}
    assert off_path_turns(path, ["d", "a"], [0, 0]) == set()
    assert off_path_turns(["open", "look", "go", "look"], ["look", "look", "open", "look"], [0] * 4) == {3}
    assert off_path_turns([], [], []) == set()


def test_expert_path_is_the_oracle_where_the_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hsg.environments.toy.wasted_turns")
    oracle, name, task_set = make_oracle(make_config(TOY))
    task = task_set.tasks("train")[0]
    path = task_set.expert_actions(task)
    assert path is not None
    assert name == "the expert's path"
    assert oracle(line(task.id, "any", turn(path[0]), turn("look"), turn(path[1]))) == {1}
    assert oracle(line("no such task", "any", turn("look"))) is None
    assert actions_of(line(task.id, "any", turn(None))) == [""]


def test_iterations_are_joined_counts_added_shares_averaged() -> None:
    rows = {i: {"flagged": 2.0, "advantage/dead_groups": i / 10} for i in range(5)}
    joined = join(rows, 2)
    assert list(joined) == ["1-3", "4-5"]
    assert joined["1-3"] == {"flagged": 6.0, "advantage/dead_groups": pytest.approx(0.1)}
    assert joined["4-5"]["advantage/dead_groups"] == pytest.approx(0.35)
    assert list(join(rows, 9)) == ["1", "2", "3", "4", "5"]


def test_report_of_a_run(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(toy_run)]) == 0
    said = capsys.readouterr().out
    assert said.strip() == (toy_run / "analysis" / "report.md").read_text().strip()
    assert "| 1 | 5 | 2 | 2 | 1 | 0.5 | 0.5 |" in said
    assert "| strategy blanked | 0.500 | 0.250 | +0.250 | +0.250 |" in said
    assert "| strategies exchanged | 0.250 | 0.500 | +0.500 | +0.000 |" in said
    assert "test split" not in said
    assert "| 1 | 0.2 | 0.4 |" in said
    rows = list(csv.DictReader((toy_run / "analysis" / "dead.csv").open()))
    assert [(r["iterations"], r["advantage/dead_groups"]) for r in rows] == [("1", "0.5"), ("2", "1")]
    assert {p.name for p in (toy_run / "analysis").iterdir()} == {
        "report.md", "judge.csv", "strategies.csv", "diversity.csv", "dead.csv"
    }  # fmt: skip


def test_what_cannot_be_computed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without being asked for it is said in the report; asked for by name it is refused."""
    flat = make_run(tmp_path / "flat", make_config({**TOY, "algorithm": "grpo"}), {}, [{"iteration": 0}], [])
    text, tables = analyse(flat)
    assert tables == {}
    assert len(text.split("\n\n")) == 4
    for part, message in (
        ("judge", "error: judge must be enabled in the run, got 'grpo'; its turns were never judged\n"),
        ("strategies", "error: evaluations must be with own, blanked and exchanged strategies after training"),
        (
            "diversity",
            "error: strategy/distance_candidates or strategy/distance_selected must be among the run's metrics",
        ),
        ("dead", "error: advantage/dead_groups or advantage/strategy_dead_groups must be among the run's metrics"),
    ):
        assert f"{part}: not computed: " in text
        assert main([str(flat), "--only", part]) == 2
        said = capsys.readouterr().err
        assert said.startswith(message)
        assert said.count("\n") == 1
    silent = make_run(tmp_path / "silent", make_config({**TOY, "log": {"trajectories": False}}), {}, [], [])
    assert main([str(silent), "--only", "judge"]) == 2
    assert "log.trajectories must be true in the run" in capsys.readouterr().err
    empty = make_run(tmp_path / "empty", make_config(TOY), {0: []}, [], [])
    assert main([str(empty), "--only", "judge"]) == 2
    assert 'trajectories must be those that the run was judged by, got "none in ' in capsys.readouterr().err
    unjudged = make_run(
        tmp_path / "unjudged", make_config(TOY), {0: [line("x", "s", turn("a"), judgment=None)]}, [], []
    )
    assert main([str(unjudged), "--only", "judge"]) == 2
    assert "judged trajectories must be of an environment that knows wasted turns" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "RUN must be a run folder with config.yaml" in capsys.readouterr().err
    assert main([str(flat), "--only", "nothing"]) == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


WHOLE = line("x", "s", turn("a"))
NULL = '{"label": "after training", "iteration": 1, "score": null, "success": null}\n'


@pytest.mark.parametrize(("file", "text", "said"), [
    ("trajectories/iteration_000000.jsonl", json.dumps(WHOLE) + "\n" + json.dumps(WHOLE)[:30], "line 2 of "),
    ("trajectories/iteration_000000.jsonl", "[]\n", "line 1 of "),
    ("trajectories/iteration_000000.jsonl", "{}\n", "an object as a run writes it with kind"),
    ("trajectories/iteration_000000.jsonl", '{"kind": "trajectory"}\n', "a trajectory as a run writes it"),
    ("trajectories/iteration_000000.jsonl", json.dumps({**WHOLE, "turns": None}), "a trajectory as a run writes it"),
    ("trajectories/iteration_000000.jsonl", json.dumps({**WHOLE, "task_id": ["x"]}), "a trajectory as a run writes it"),
    ("trajectories/iteration_000000.jsonl", json.dumps({**WHOLE, "strategy": 5}), "a trajectory as a run writes it"),
    ("trajectories/iteration_000000.jsonl", json.dumps({**WHOLE, "turns": [{**turn("a"), "action": 5}]}), "a trajectory as"),
    ("trajectories/iteration_000000.jsonl", json.dumps({**WHOLE, "turns": [{**turn("a"), "flagged": "no"}]}), "a trajectory"),
    ("metrics.jsonl", '{"advantage/dead_groups": 1}\n', "an object as a run writes it with iteration"),
    ("metrics.jsonl", '{"iteration": 0, "advantage/dead_groups": null}\n', "must be a finite number, got None"),
    ("metrics.jsonl", '{"iteration": 0, "x": 1' + 400 * "0" + "}\n", "x in line 1 of "),
    ("metrics.jsonl", '{"iteration": 0}\n{"iteration": 0}\n', "metrics.jsonl must be 1, as a run counts them, got 0"),
    ("metrics.jsonl", '{"iteration": -1}\n', "metrics.jsonl must be 0, as a run counts them, got -1"),
    ("eval.jsonl", '{"label": 5, "iteration": 1}\n', "label in line 1 of "),
    ("eval.jsonl", '{"label": "training", "iteration": "x"}\n', "must be a whole number >= 0, got 'x'"),
    ("eval.jsonl", '{"label": "training", "iteration": 1, "score": "x"}\n', "must be a finite number, got 'x'"),
    ("eval.jsonl", '{"score": 1}\n', "an object as a run writes it with label, iteration"),
    ("eval.jsonl", NULL + NULL.replace("after training", "strategy blanked"), "evaluations must"),
])  # fmt: skip
def test_files_that_no_run_wrote_are_named(
    file: str, text: str, said: str, toy_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report, where the other parts are still computed; asked for by name, it is bad input."""
    (toy_run / file).write_text(text)
    part = {"t": "judge", "m": "dead", "e": "strategies"}[file[0]]
    assert main([str(toy_run)]) == 0
    told = [told for told in capsys.readouterr().out.splitlines() if told.startswith(f"{part}: not computed: ")]
    assert len(told) == 1
    assert said in told[0]
    assert main([str(toy_run), "--only", part]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_environment_that_is_not_here_leaves_the_other_parts(
    toy_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy_run / "config.yaml"
    config.write_text(config.read_text().replace("name: toy", "name: somelab.gone", 1))
    assert main([str(toy_run)]) == 0
    out = capsys.readouterr().out
    assert "judge: not computed: environment.name must be one that can be made here, got 'somelab.gone'" in out
    assert "Share of groups" in out


def test_strange_files_are_not_the_runs(toy_run: Path) -> None:
    before = list(read_trajectories(toy_run))
    first = toy_run / "trajectories" / "iteration_000000.jsonl"
    for name in ("iteration_old_000000.jsonl", "iteration_000000 copy.jsonl", "notes.jsonl"):
        (first.parent / name).write_bytes(first.read_bytes())
    (first.parent / "iteration_000099.jsonl").mkdir()
    assert list(read_trajectories(toy_run)) == before
