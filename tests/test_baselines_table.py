"""The table of the baselines from made-up cells: what counts as finished, what is added up, who stands first."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import baselines
from experiments.baselines import cell_name, collect, curve, is_finished, main, mean_curve, summarise
from hsg.algorithms import ALGORITHMS
from hsg.configfile import load_config


def write(folder: Path, turns: list[int], reached: dict[int, float], *, finished: bool = True) -> None:
    """A run of iterations with so many turns, evaluated after some of them; an iteration is 2 s and 10 tokens a turn."""
    folder.mkdir(parents=True)
    lines = [{"iteration": i, "cost/environment_turns": n, "cost/sampled_tokens": 10 * n, "time/iteration_seconds": 2.0}
             for i, n in enumerate(turns)]  # fmt: skip
    found = [{"iteration": i, "label": "training", "success": s, "score": s / 2} for i, s in reached.items()]
    if finished:
        found.append({**found[-1], "label": "after training"})
    for name, held in (("metrics.jsonl", lines), ("eval.jsonl", found)):
        (folder / name).write_text("".join(json.dumps(x) + "\n" for x in held))


def test_curve_adds_up_what_was_spent(tmp_path: Path) -> None:
    write(tmp_path / "c", [5, 7, 9], {0: 0.1, 2: 0.3, 3: 0.4})
    assert curve(tmp_path / "c") == [
        {"iteration": 0, "environment_turns": 0, "sampled_tokens": 0, "seconds": 0, "success": 0.1, "score": 0.05},
        {"iteration": 2, "environment_turns": 12, "sampled_tokens": 120, "seconds": 4, "success": 0.3, "score": 0.15},
        {"iteration": 3, "environment_turns": 21, "sampled_tokens": 210, "seconds": 6, "success": 0.4, "score": 0.2},
    ]


def test_only_finished_cells_count(tmp_path: Path) -> None:
    write(tmp_path / "cells" / "grpo-0", [5], {1: 0.5})
    write(tmp_path / "cells" / "grpo-1", [5], {1: 0.9}, finished=False)
    assert is_finished(tmp_path / "cells" / "grpo-0")
    assert not is_finished(tmp_path / "cells" / "grpo-1")
    assert not is_finished(tmp_path / "cells" / "grpo-2")
    assert [(row["seed"], row["success"]) for row in collect(tmp_path, ["grpo"], [0, 1, 2])] == [(0, 0.5)]


def test_table_by_hand(tmp_path: Path) -> None:
    """Last evaluations 0.4 and 0.6: mean 0.5, spread sqrt(0.02); best first."""
    for seed, end in ((0, 0.4), (1, 0.6)):
        write(tmp_path / "cells" / f"grpo-{seed}", [10, 10 + seed], {0: 0.1, 1: 0.2 + seed / 10, 2: end})
    write(tmp_path / "cells" / "reinforcepp-baseline-0", [20], {1: 0.7})
    rows = collect(tmp_path, ["grpo", "reinforce++ baseline"], [0, 1])
    first, second = summarise(rows)
    assert (first["method"], first["success"], first["success_spread"]) == ("reinforce++ baseline", 0.7, "")
    assert (second["seeds"], second["success"], second["environment_turns"]) == (2, 0.5, 20.5)
    assert second["success_spread"] == pytest.approx(0.02**0.5)
    points = mean_curve([row for row in rows if row["method"] == "grpo"], "environment_turns")
    assert points[0] == (0, 0.1, 0)
    assert points[1] == (10, pytest.approx(0.25), pytest.approx(0.005**0.5))
    assert points[2] == (20.5, 0.5, pytest.approx(0.02**0.5))


def test_whole_study_and_what_a_second_call_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Six cells, one fails; called again it is the only one that is played. Another number of turns is another study."""
    played = []

    def play(config: Path, out: Path, method: str, seed: int, turns: int, overrides: list[str]) -> bool:
        folder = out / "cells" / cell_name(method, seed)
        if is_finished(folder):
            return True
        played.append(folder.name)
        if (method, seed, len(played) <= 6) == ("rloo", 1, True):
            return False
        write(folder, [turns], {0: 0.0, 1: 0.1 * seed})
        return True

    monkeypatch.setattr(baselines, "prepare", lambda options: None)
    monkeypatch.setattr(baselines, "play_cell", play)
    command = [
        "--out",
        str(tmp_path / "s"),
        "--methods",
        "grpo",
        "rloo",
        "strata",
        "--seeds",
        "0",
        "1",
        "--turns",
        "50",
        "--jobs",
        "2",
    ]
    assert main(command) == 1
    assert "error: rloo-1 must finish" in capsys.readouterr().err
    assert len(played) == 6
    assert main(command) == 0
    assert played[6:] == ["rloo-1"]
    lines = list(csv.DictReader((tmp_path / "s" / "curves.csv").open()))
    assert len(lines) == 12
    assert {float(line["environment_turns"]) for line in lines if line["iteration"] == "1"} == {50.0}
    assert [line["seeds"] for line in csv.DictReader((tmp_path / "s" / "table.csv").open())] == ["2"] * 3
    assert (tmp_path / "s" / "curves.png").is_file()
    assert main([*command[:-3], "60"]) == 2
    assert "must be a folder of the same study" in capsys.readouterr().err


def test_every_trained_method_has_its_cells() -> None:
    """Each name loads, none overrides what makes a fair comparison, and every one starts from the same warm start."""
    from experiments.warmstart import _settings_that_matter

    assert set(ALGORITHMS) - set(baselines.METHODS) == set(baselines.UNTRAINED)
    configs = {name: load_config(baselines.CONFIG, options) for name, options in baselines.METHODS.items()}
    shared = _settings_that_matter(configs["strata"])
    for name, config in configs.items():
        assert _settings_that_matter(config) == shared, name
        per_iteration = config.num_tasks * config.num_strategies * config.num_rollouts
        assert per_iteration == 128, name
        assert config.optimizer == configs["strata"].optimizer, name


def test_unknown_method_is_refused(capsys: Any) -> None:
    assert main(["--methods", "grop"]) == 2
    assert capsys.readouterr().err.startswith("error: --methods must be among strata, ")
