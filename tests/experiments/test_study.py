"""Studies: cells that are equal run once, a finished cell is kept, a broken one is named, the table by hand."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hsg.config.algorithms import ALGORITHMS
from hsg.config.loading import load_config
from hsg.experiments import study as studies
from hsg.experiments.reading.curves import REACHED, SPENT_SIDE_BY_SIDE, learning_curve
from hsg.experiments.studies import file as study_file
from hsg.experiments.studies.cell import result_path, summarise_metrics
from hsg.experiments.studies.elsewhere import commands
from hsg.experiments.studies.file import Cell, Study, make_cells, read_study
from hsg.experiments.studies.plan import check_splits, dry_run
from hsg.experiments.studies.table import hard_tasks, look_up, mean_and_spread, write_results
from hsg.experiments.study import changed, environment_of_cells, main, run_study
from hsg.experiments.warmstart import settings_that_matter

STUDIES = Path(studies.__file__).parent / "studies"
STUDY = Study(
    "s", "A study", "toy_sge.yaml",
    {"base": {"train.iterations": 0}, "A": {}, "same as A": {"kappa": 0.1}, "B": {"temperature.strategy": 0.7, "samples": 4}},
    columns={"pass@1": "measures.pass_at_k.0", "pass@2": "measures.pass_at_k.1"}, hard="base", paper={"A": "9.9"},
)  # fmt: skip


SIXTEEN = ",".join(map(str, range(1, 17)))
SCALED = [(path, scale) for path in sorted(STUDIES.glob("ablate-*.yaml")) for scale in ("toy", "cpu", "paper")]
PLAIN = [(path, None) for path in sorted(STUDIES.glob("*.yaml")) if not path.stem.startswith("ablate-")]


@pytest.mark.parametrize(("path", "scale"), [*SCALED, *PLAIN], ids=str)
def test_every_study_file_can_be_planned(path: Path, scale: str | None) -> None:
    study = read_study(path, scale)
    cells = make_cells(study, [0, 1])
    assert {cell.name for cell in cells} == set(study.cells)
    assert study.hard is None or study.hard in study.cells
    assert set(study.paper) <= set(study.cells)


def test_ablations_share_the_whole_method() -> None:
    """The cell that is all of StraTA has one key in every study of a scale, so it is run once."""
    same = {
        "components": "full StraTA",
        "delta": "delta 0.5",
        "sigma": "sigma 8",
        "kappa": "kappa 0.1",
        "groups": "4 x 8",
    }
    for scale, also in (
        ("toy", {"size": "64 wide, StraTA"}),
        ("cpu", {"size": "128 wide, StraTA"}),
        ("paper", {"size": "7B, StraTA"}),
    ):
        keys = set()
        for name, cell in {**same, **also}.items():
            study = read_study(STUDIES / f"ablate-{name}.yaml", scale)
            keys |= {c.key for c in make_cells(study, [0]) if c.name == cell}
        assert len(keys) == 1, scale


def test_a_scale_changes_one_cell_and_keeps_the_others() -> None:
    """64 samples before training find the hard tasks at toy; the paper has 8 of every cell."""
    toy, paper = (read_study(STUDIES / "ablate-sge.yaml", scale) for scale in ("toy", "paper"))
    assert list(toy.cells) == list(paper.cells)
    for study, first, others in ((toy, 64, 16), (paper, 8, 8)):
        samples = {cell.name: cell.samples for cell in make_cells(study, [0])}
        assert samples.pop("before training") == first
        assert set(samples.values()) == {others}


@pytest.mark.slow
def test_commands_of_the_paper_are_printed_without_its_data(capsys: Any) -> None:
    """Real problems are not shipped: what is left unchecked is said, and where the data goes stands in each command."""
    study = read_study(STUDIES / "ablate-sge.yaml", "paper")
    dry_run(study, make_cells(study, [0]))
    said = capsys.readouterr().out
    assert "# not checked: the data. FOLDER is to be the folder of LeetCodeDataset's" in said
    assert said.count("--set 'coding.data=FOLDER'") == len(study.cells)
    assert "num_tasks=1" not in said


def test_every_cell_of_groups_plays_equally_much() -> None:
    study = read_study(STUDIES / "ablate-groups.yaml")
    for cell in make_cells(study, [0]):
        config = load_config(STUDIES.parent / "configs" / study.base, cell.overrides)
        assert config.num_strategies * config.num_rollouts == 32


def test_layers_of_a_study_of_several_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale's file, over it the study, over that what the study has at the scale; another base takes nothing of the file."""
    monkeypatch.setattr(study_file, "SCALES", tmp_path)
    (tmp_path / "toy.yaml").write_text("base: toy_sge.yaml\nset: {kappa: 0.2, sigma: 2}\nsplit: test\nsamples: 5")
    (tmp_path / "cpu.yaml").write_text("base: smoke.yaml")
    path = tmp_path / "studies" / "s.yaml"
    path.parent.mkdir()
    path.write_text(
        "title: a\ncells: {x: }\nset: {sigma: 3}\nsamples: 6\nscales: {cpu: {base: toy_grpo.yaml, samples: 7}}"
    )
    study = read_study(path)
    assert (study.name, study.base, study.split, study.samples) == ("s-toy", "toy_sge.yaml", "test", 6)
    assert study.set == {"kappa": 0.2, "sigma": 3}
    study = read_study(path, "cpu")
    assert (study.name, study.base, study.split, study.samples) == ("s-cpu", "toy_grpo.yaml", "dev", 7)
    assert study.set == {"sigma": 3}
    for text, scale, message in (
        ("title: a\ncells: {x: }", "big", "--scale must be one of cpu, toy, got 'big'"),
        ("title: a\ncells: {x: }\nscales: {big: {}}", "toy", "scales must be a mapping of cpu, toy to keys"),
        (GOOD, "toy", "--scale must be left out for a study that has a base, got 'toy'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_study(path, scale)


def test_equal_cells_share_a_key_and_what_is_not_trained_stands_once() -> None:
    cells = make_cells(STUDY, [0, 1, 2])
    by_name: dict[str, list[Cell]] = {name: [c for c in cells if c.name == name] for name in STUDY.cells}
    assert [len(by_name[name]) for name in STUDY.cells] == [1, 3, 3, 3]
    assert [c.key for c in by_name["A"]] == [c.key for c in by_name["same as A"]]
    assert len({c.key for c in cells}) == 1 + 3 + 3
    assert {c.samples for c in by_name["B"]} == {4}
    assert make_cells(STUDY, [7])[0].key == by_name["base"][0].key
    assert by_name["A"][1].overrides == ("seed=1",)
    assert make_cells(STUDY, [1], ["kappa=0.2"])[1].key != by_name["A"][1].key


def test_what_a_named_file_holds_is_part_of_the_key(tmp_path: Path) -> None:
    """A list of tasks or a model that changed under its name is another cell."""
    listed, model = tmp_path / "tasks.txt", tmp_path / "model"
    listed.write_text("a")
    model.mkdir()
    (model / "config.json").write_text("{}")
    extra = [f"tasks.file={listed}", f"model.path={model}"]

    def key() -> str:
        study_file.contents.cache_clear()
        return make_cells(STUDY, [1], extra)[1].key

    keys = [key(), key()]
    listed.write_text("b")
    keys.append(key())
    (model / "config.json").write_text("[]")
    keys.append(key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_what_a_study_must_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    for text, message in (
        ("title: a", "must have the keys title, base, cells"),
        ("title: a\nbase: b\ncells: {}\ncell: {}", "with the unknown key cell; did you mean cells?"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\npaper: {y: '5'}", "paper must be figures of cells in"),
        (
            "title: a\nbase: smoke.yaml\ncells: {x: }\nlaunch: gpu9.yaml",
            "launch must be a file of experiments/accelerate",
        ),
        ("title: a\nbase: b\ncells: [1]", "cells must be a mapping"),
        ("title: a\nbase: smoke.yaml\ncells: {x: {kapa: 1}}", "did you mean kappa"),
        ("title: a\nbase: 5\ncells: {x: }", "base must be the name of a file"),
        ("title: a\nbase: smoke.yaml\ncells: {}", "at least one cell"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\nset: [1]", "set must be a mapping of options"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\nset:", "set must be a mapping of options"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\ncolumns: {a: 1}", "columns must be paths that begin with measures"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\ncolumns: {a: measure.x}", "columns must be paths that begin with"),
        ("title: a\nbase: smoke.yaml\ncells: {0.1: , 0.10: }", "cells must be plain texts without | and `"),
        ("title: a\nbase: smoke.yaml\ncells: {on: , yes: }", "got True; quote what is a number"),
        ("title: a\nbase: smoke.yaml\ncells: {a|b: }", "got 'a|b'"),
        ("title: a\nbase: smoke.yaml\ncells: {<!-- end -->: }", "cells must be plain texts"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\npaper: {x: 71.0}", "paper must be plain texts"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\ncurve: reward/sucess", "curve must be one of reward/success"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\nhard: y", "hard must be a cell in"),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\nsplit: 5", "split must be a text"),
        (
            "title: a\nbase: smoke.yaml\ncells: {x: }\nsplit: nope",
            "split: split must be one of train, dev, test, got 'nope'",
        ),
        ("title: a\nbase: smoke.yaml\ncells: {x: }\nlaunch: 5", "launch must be a file of experiments/accelerate"),
        (
            "title: a\nbase: smoke.yaml\ncells: {x: }\nsamples:",
            "samples of cell x must be a whole number >= 1, got None",
        ),
        (
            "title: a\nbase: smoke.yaml\ncells: {x: {samples: 0}}",
            "samples of cell x must be a whole number >= 1, got 0",
        ),
        ("title: a\nbase: smoke.yaml\ncells: {x: {kappa: !!set {a}}}", "options of cell x must be plain values"),
    ):
        path.write_text(text)
        assert main([str(path)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert main([str(tmp_path / "none.yaml")]) == 2


GOOD = "title: a\nbase: smoke.yaml\ncells: {x: }"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1,a"], "--seeds must be whole numbers with commas, got '1,a'"),
        (["--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["--sead", "1"], "unrecognized arguments: --sead 1"),
        (["--out", "s.yaml"], "--out must be a folder that can be written, got 's.yaml'"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(GOOD)
    assert main(["s.yaml", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


WHOLE = {
    "seed": 0, "versions": {"commit": "0", "torch": "2"}, "measures": {"pass_at_k": [0.5]}, "per_task": {"t": [1, 1]},
    "curve": {name: [None] for name in (*REACHED, *SPENT_SIDE_BY_SIDE)},
}  # fmt: skip
DAMAGED = [
    {"measures": None}, {"measures": {"pass_at_k": ["x"]}}, {"curve": [1]}, {"curve": {"iteration": [1], "seconds": []}},
    {"curve": {**WHOLE["curve"], "seconds": ["x"]}}, {"per_task": {"t": []}}, {"versions": {}},
]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "[" * 100_000, *(json.dumps({**WHOLE, **part}) for part in DAMAGED)]
)
def test_a_damaged_result_is_named_and_kept(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "s.yaml").write_text(GOOD)
    path = result_path(tmp_path, make_cells(read_study(tmp_path / "s.yaml"), [0])[0])
    path.parent.mkdir()
    path.write_text(text)
    assert main([str(tmp_path / "s.yaml"), "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert f"got '{path}'; delete that file" in capsys.readouterr().err
    assert path.read_text() == text
    path.write_text(json.dumps(WHOLE))
    assert main([str(tmp_path / "s.yaml"), "--seeds", "0", "--out", str(tmp_path)]) == 0


def test_an_interrupt_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "s.yaml").write_text(GOOD)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "run_study", interrupted)
    assert main([str(tmp_path / "s.yaml"), "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on with the cells that have no result\n"


def test_finished_cells_stay_and_broken_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started = []

    def fake(command: list[str], **_: Any) -> Any:
        cell = json.loads(command[-1])
        started.append(cell["key"])
        if "temperature.strategy=0.7" not in cell["overrides"]:
            (tmp_path / "cells" / f"{cell['key']}.json").write_text("{}")
        return type("Done", (), {"wait": lambda self: 0})()

    monkeypatch.setattr(studies.subprocess, "Popen", fake)
    cells = make_cells(STUDY, [0])
    failed = run_study(STUDY, cells, tmp_path, 2)
    assert [cell.name for cell in failed] == ["B"]
    assert len(started) == 3  # base, A (shared) and B
    assert "B seed 0: FAILED, see" in capsys.readouterr().out
    before = result_path(tmp_path, cells[0]).stat().st_mtime_ns
    run_study(STUDY, cells, tmp_path, 1)
    assert len(started) == 4  # B alone, once more
    assert result_path(tmp_path, cells[0]).stat().st_mtime_ns == before


def test_studies_share_finished_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another study with an equal cell starts nothing, and its table has the result under its own name."""
    made = {"seed": 0, "measures": {"pass_at_k": [0.5]}, "per_task": {"t": [1, 1]}, "curve": {}}
    made |= {"versions": {"commit": "0123abc", "torch": "2"}}

    def fake(command: list[str], **_: Any) -> Any:
        (tmp_path / "out" / "cells" / f"{json.loads(command[-1])['key']}.json").write_text(json.dumps(made))
        return type("Done", (), {"wait": lambda self: 0})()

    monkeypatch.setattr(studies.subprocess, "Popen", fake)
    for name, cell in (("one", "A"), ("other", "B")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(GOOD.replace("x:", f"{cell}:") + "\ncolumns: {p: measures.pass_at_k.0}")
        assert main([str(path), "--seeds", "0", "--out", str(tmp_path / "out")]) == 0
        assert f"| {cell} | 0.5 |" in (tmp_path / "out" / name / "table.md").read_text()
        monkeypatch.setattr(studies.subprocess, "Popen", None)  # calling it again would be an error


def test_a_cell_that_another_study_runs_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its lock is held nobody else starts it, and once its result is there nobody does at all."""
    cell = make_cells(STUDY, [0])[0]
    started: list[Any] = []
    failed: list[list[Cell]] = []
    asked = threading.Event()
    lock = studies.locked
    monkeypatch.setattr(studies, "_start_cell", lambda *given: started.append(given))
    monkeypatch.setattr(studies, "locked", lambda path: (asked.set(), lock(path))[1])
    with lock(tmp_path / "cells" / f"{cell.key}.log"):
        waiting = threading.Thread(target=lambda: failed.append(run_study(STUDY, [cell], tmp_path, 1)))
        waiting.start()
        assert asked.wait(60)
        result_path(tmp_path, cell).write_text("{}")
    waiting.join()
    assert (started, failed) == ([], [[]])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_to_the_cells(
    number: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two cells run and two wait: those that run get the signal and are waited for, the others never begin."""
    (tmp_path / "s.yaml").write_text(
        "title: a\nbase: smoke.yaml\ncells: {a: {kappa: 1}, b: {kappa: 2}, c: {kappa: 3}, d: {kappa: 4}}"
    )
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def fake(command: list[str], **_: Any) -> Any:
        started.append(start(["sleep", "600"]))
        if len(started) == 2:
            os.kill(os.getpid(), number)
        return started[-1]

    monkeypatch.setattr(studies.subprocess, "Popen", fake)
    assert main([str(tmp_path / "s.yaml"), "--seeds", "0", "--jobs", "2", "--out", str(tmp_path)]) == status
    assert [process.returncode for process in started] == [-number, -number]
    assert capsys.readouterr().err.endswith("; the same command goes on with the cells that have no result\n")


def test_a_changed_study_has_a_folder_of_its_own() -> None:
    """Its table would pass for the study's, and be put into docs/results.md as that."""
    other = changed(STUDY, ["train.max_environment_turns=1500", "run/x=../../y"])
    assert re.fullmatch(
        rf"{STUDY.name}\+train.max_environment_turns=1500\+run_x=\.\._\.\._y\+[0-9a-f]{{8}}", other.name
    )
    long = "tasks.file=" + 100 * "a"
    names = {
        changed(STUDY, ["kappa=1", item]).name for item in (long + "b", long + "c", "tasks.file=a/b", "tasks.file=a_b")
    }
    assert len(names) == 4
    assert changed(STUDY, ["kappa=1"]).name == f"{STUDY.name}+kappa=1"
    assert other.title.endswith("(train.max_environment_turns=1500, run/x=../../y)")
    assert changed(STUDY, []) is STUDY
    based = changed(STUDY, ["kappa=1"], "smoke.yaml")
    assert (based.name, based.base) == (f"{STUDY.name}+base=smoke.yaml+kappa=1", "smoke.yaml")


def test_a_lone_cell_sees_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has chosen among them: an empty CUDA_VISIBLE_DEVICES hides all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in environment_of_cells(1)
    assert environment_of_cells(2)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment_of_cells(1)["CUDA_VISIBLE_DEVICES"] == "3"


def result(cell: str, passes: list[float], per_task: dict[str, list[int]]) -> dict[str, Any]:
    versions = {"commit": "0123abc", "torch": "2"}
    return {"cell": cell, "key": cell * 2, "measures": {"pass_at_k": passes}, "per_task": per_task, "curve": {}} | {
        "versions": versions
    }


def test_table_by_hand(tmp_path: Path) -> None:
    results = [
        result("base", [0.1, 0.2], {"t": [2, 0], "u": [2, 1], "v": [2, 0]}),
        result("A", [0.2, 0.5], {"t": [2, 1], "u": [2, 2], "v": [2, 0]}),
        result("A", [0.4, 0.5], {"t": [2, 2], "u": [2, 2], "v": [2, 1]}),
    ]
    assert hard_tasks(STUDY, results) == ["t", "v"]
    assert mean_and_spread(results[1:], "measures.pass_at_k.0") == (pytest.approx(0.3), pytest.approx(0.1 * 2**0.5), 2)
    lines = write_results(STUDY, results, tmp_path).splitlines()
    assert lines[0] == "|  | pass@1 | pass@2 | hard tasks solved (of 2) | paper | seeds | settings |"
    assert lines[2] == "| base | 0.1 | 0.2 |  |  | 1 | `train.iterations=0` |"
    assert lines[3] == "| A | 0.3 ± 0.14 | 0.5 ± 0 | 1.5 ± 0.71 | 9.9 | 2 | `as the base config` |"
    assert lines[4:] == ["", "Measured at commit 0123abc, torch 2."]  # a cell without results has no line
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert rows[0].startswith("cell,seeds,pass@1 mean,pass@1 spread")
    assert rows[2].startswith("A,2,0.3")
    assert rows[2].endswith(",AA AA")
    del results[2]["measures"]["pass_at_k"][1]
    other = replace(STUDY, paper={})
    assert "| A | 0.3 ± 0.14 | 0.5 (1 of 2) |" in write_results(other, results, tmp_path)
    results[0]["versions"] = {"commit": "9", "torch": "2"}
    assert write_results(other, results, tmp_path).endswith("at commit 0123abc, torch 2 and commit 9, torch 2.")


def test_numbers_at_a_path() -> None:
    found = {"a": {"b": [1, 2.5]}, "c": "text", "n": float("nan")}
    assert look_up(found, "a.b.1") == 2.5
    assert look_up(found, "a.b.-1") == 2.5
    for nothing in ("a.b.2", "a.x", "c", "n", "a.b", "a.b.first"):
        assert look_up(found, nothing) is None


def test_metrics_at_first_and_on_average() -> None:
    found = summarise_metrics([{"iteration": 0, "a/b": 1.0}, {"iteration": 1, "a/b": 3.0, "c": 5.0}])
    assert found["first"] == {"iteration": 0, "a/b": 1.0}
    assert found["mean"] == {"iteration": 0.5, "a/b": 2.0, "c": 5.0}
    assert summarise_metrics([]) == {"first": {}, "mean": {}}


def test_curves_are_written(tmp_path: Path) -> None:
    costs = {"cost/environment_turns": 10, "cost/sampled_tokens": 7.0, "time/iteration_seconds": 3.0}
    curve = learning_curve([{"iteration": i, "reward/success": 0.5, **costs} for i in range(2)])
    results = [{**result("A", [0.5], {"t": [1, 1]}), "seed": 3, "curve": curve}]
    write_results(replace(STUDY, hard=None, curve="reward/success"), results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [(r["cell"], r["seed"], r["environment_turns"], r["evaluation/success"]) for r in rows] == [
        ("A", "3", "10.0", ""), ("A", "3", "20.0", "")
    ]  # fmt: skip
    assert (tmp_path / "plot.png").is_file()


def test_names_that_the_plot_has_no_letters_for_are_no_warnings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = replace(STUDY, title="比較 🚀", hard=None, cells={"策略": {}, "🚀": {}})
    results = [result(name, [0.5, 0.75], {"t": [2, 1]}) for name in study.cells]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = write_results(study, results, tmp_path)
    assert "| 策略 |" in text
    assert "| 🚀 |" in text
    assert (tmp_path / "plot.png").is_file()


def test_baselines_meet_equal_conditions() -> None:
    """Every trained method, one warm start, equal trajectories, turns and optimizer; a window would be another model."""
    study = read_study(STUDIES / "baselines_toy.yaml")
    cells = {cell.name: cell for cell in make_cells(study, [0]) if not cell.name.startswith("warm start")}
    configs = {n: load_config(STUDIES.parent / "configs" / study.base, c.overrides) for n, c in cells.items()}
    assert set(ALGORITHMS) - {c.algorithm for c in configs.values()} == {"prompting", "react"}
    first = configs["StraTA"]
    for name, config in configs.items():
        assert settings_that_matter(config) == settings_that_matter(first), name
        assert config.num_tasks * config.num_strategies * config.num_rollouts == 128, name
        assert (config.optimizer, config.evaluation) == (first.optimizer, first.evaluation), name
        assert config.train.max_environment_turns == first.train.max_environment_turns, name
        assert config.train.iterations == first.train.iterations, name


@pytest.mark.slow
def test_a_real_cell_in_its_own_process(tmp_path: Path, guesser_folder: Path) -> None:
    """Two cells of the toy world with an untaught model: what is written is what the table needs."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"title: t\nbase: toy_sge.yaml\nsamples: 2\ncolumns: {{pass@1: measures.pass_at_k.0}}\nhard: base\n"
        f"set: {{model.path: {guesser_folder}, num_tasks: 1, num_rollouts: 1, rollout.max_turns: 2, "
        f"evaluation.num_tasks: 2, rollout.max_action_tokens: 8, evaluation.final: false}}\n"
        "cells: {base: {train.iterations: 0}, A: {train.iterations: 1}}\n"
    )
    assert main([str(path), "--seeds", "3", "--out", str(tmp_path / "out"), "--jobs", "2"]) == 0
    results = [json.loads(p.read_text()) for p in (tmp_path / "out" / "cells").glob("*.json")]
    trained = next(r for r in results if r["cell"] == "A")
    assert trained["seed"] == 3
    assert len(trained["per_task"]) == 2
    assert len(trained["curve"]["iteration"]) == 1
    assert trained["measures"]["num_samples"] == 2
    assert next(r for r in results if r["cell"] == "base")["curve"] == {}
    assert set(trained["metrics"]) == {"first", "mean"}
    assert (tmp_path / "out" / "tiny" / "table.md").is_file()
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1  # what is not trained leaves no run


def test_commands_of_a_cluster_name_runs_by_their_key(capsys: Any) -> None:
    """Equal cells are one run whichever study prints them, told once, and a run that is finished is not begun again."""
    study = replace(STUDY, launch="fsdp.yaml")
    cells = [cell for cell in make_cells(study, [1]) if cell.name != "base"]
    train, judge = commands(study, cells[0])
    assert train.startswith(
        "accelerate launch --config_file experiments/accelerate/fsdp.yaml experiments/run.py --resume auto "
    )
    assert train.endswith(f"--set 'seed=1' --set 'run.name={cells[0].key}'")
    assert judge.endswith(f"/evaluate.py runs/{cells[0].key} --split dev --num-samples 16 --k {SIXTEEN} --out "
                          f"runs/studies/evaluations/{cells[0].key}.json")  # fmt: skip
    assert "--set 'temperature.strategy=0.7'" in commands(study, cells[2])[0]
    (only,) = commands(study, make_cells(study, [1])[0])  # never trained: no run that could be evaluated
    assert "experiments/evaluate.py --config experiments/configs/toy_sge.yaml --set 'train.iterations=0'" in only
    dry_run(study, cells)
    said = capsys.readouterr().out
    assert said.count("experiments/run.py") == said.count("experiments/evaluate.py") == 2  # A, the same as A, B
    assert "# same as A, seed 1: the same run as above" in said
    assert "not checked: weights and tokenizer of nano" in said


def test_what_the_commands_left_makes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of two cells, one is trained and evaluated, the other not yet; an evaluation of fewer samples is none of it."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "title: a\nbase: smoke.yaml\nsamples: 2\ncells: {A: {kappa: 1}, B: {kappa: 2}}\n"
        "columns: {p2: measures.pass_at_k.1, turns: curve.environment_turns.-1, entropy: measures.action_entropy}"
    )
    asked = ["s.yaml", "--seeds", "0", "--collect"]
    assert main(asked) == 2
    assert "--out must be where a cell was run and evaluated, got 'runs/studies'" in capsys.readouterr().err
    cell = make_cells(read_study(Path("s.yaml")), [0])[0]
    run = Path("runs") / cell.key
    run.mkdir(parents=True)
    costs = {"cost/environment_turns": 10, "cost/sampled_tokens": 7.0, "time/iteration_seconds": 3.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i, **costs}) + "\n" for i in range(2)))
    evaluated = Path("runs/studies/evaluations") / f"{cell.key}.json"
    evaluated.parent.mkdir(parents=True)
    task = {"task_id": "t", "num_samples": 2, "num_solved": 1}
    found = {"pass_at_k": {"1": 0.5, "2": 0.75}, "score": 0.6, "action_entropy": 0.25, "tasks": [task]}
    evaluated.write_text(json.dumps(found))
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "  B seed 0: not there yet" in said
    assert "| A | 0.75 | 20 | 0.25 | 1 | `kappa=1` |" in said
    evaluated.write_text(json.dumps({**found, "pass_at_k": {"1": 0.5}}))
    assert main(asked) == 2
    assert "an evaluation must be what the printed command writes" in capsys.readouterr().err


def test_a_cell_that_cannot_be_built_is_named() -> None:
    """A judge without room, a split that is not there: before any cell is begun."""
    with pytest.raises(ValueError, match="split: split must be one of train, dev, test, got 'nope'"):
        check_splits(make_cells(replace(STUDY, split="nope"), [0]))
    wrong = replace(STUDY, cells={"wrong": {"prompts.templates": {"strategy": "{nothing}"}}})
    with pytest.raises(ValueError, match="cell wrong: "):
        dry_run(wrong, make_cells(wrong, [0]))


@pytest.mark.parametrize("option", ["seed=4", "run.name=x"])
def test_what_a_study_sets_itself_is_refused(option: str, capsys: Any) -> None:
    """It would be overridden, and nobody told."""
    assert main(["experiments/studies/ablate-delta.yaml", "--set", option, "--dry-run"]) == 2
    assert "must be none that the study sets itself" in capsys.readouterr().err
