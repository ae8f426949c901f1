"""The run folder by hand: everything in it is worked out again from its files, in plain Python, without hsg's maths.

outcomes -> strategy returns -> strategy advantages        candidates -> embeddings -> farthest points
outcomes, flags, penalties -> turn returns -> turn advantages        input_ids, initial model -> old_logprobs
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fakes import FakeEncoder, GuessTaskSet, fake_embed
from test_trainer import configure
from transformers import AutoModelForCausalLM, AutoTokenizer

import hsg.collector
from hsg.ranks.distributed import Distributed
from hsg.run.tracking import RunFolder
from hsg.trainer import Trainer

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"kappa": 0.3, "temperature": {"strategy": 0.9, "action": 1.2}},
    "penalties": {
        "reward": {"format_penalty": 0.5, "length_penalty": True, "invalid_action_penalty": 0.125, "scale": 2.0},
        "delta": 0.4, "advantage": {"turn_baseline": "trajectory", "std": "sample"},
        "temperature": {"strategy": 1.6, "action": 1.6}, "selector": {"start": "first"},
    },
    "window": {"rollout": {"context": "window", "window_turns": 1}, "kappa": 0.3},
    "faults": {"rollout": {"env_threads": 1}, "advantage": {"std": "none"}},
}  # fmt: skip
FAULTS = {
    0: ("start", "raise"),
    4: ("step 1", "nan"),
    6: ("step 1", "raise"),
    7: ("start", "none"),
    8: ("step 1", "none"),
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: Any, guesser_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of each variant, two iterations; with faults, all rollouts of one strategy break."""
    given = VARIANTS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    config = configure(run={"dir": str(root)}, evaluation={"every": 1, "num_tasks": 4}, **given)
    # Ids that would leave the folder, if anyone made a path of them.
    faults = FAULTS if request.param == "faults" else {}
    task_set = GuessTaskSet(prefix="../../\u00e4 b/..\\", faults=lambda n: faults.get(n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hsg.collector, "load_encoder", lambda *_: FakeEncoder())
        run = RunFolder(config, "run")
        trainer = Trainer(config, task_set, str(guesser_folder), Distributed(), run)
        trainer.train()
        trainer.close()
        run.close()
    assert [p.name for p in root.iterdir()] == ["run"]
    return root / "run"


def refuse(name: str) -> None:
    raise AssertionError(f"strict JSON has no {name}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def iterations(folder: Path) -> list[list[dict[str, Any]]]:
    paths = sorted((folder / "trajectories").iterdir())
    assert [p.name for p in paths] == ["iteration_000000.jsonl", "iteration_000001.jsonl"]
    return [lines(path) for path in paths]


def options(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def normalised(value: float, members: list[float], config: dict[str, Any]) -> float:
    """(value - mean) / (std + eps) among the members; 0 where they are all equal."""
    if not members or max(members) == min(members):
        return 0.0
    mean, kind = sum(members) / len(members), config["advantage"]["std"]
    if kind == "none":
        return value - mean
    total = sum((m - mean) ** 2 for m in members)
    return (value - mean) / (math.sqrt(total / (len(members) - (kind == "sample"))) + config["advantage"]["eps"])


def test_files_are_there_and_strict(folder: Path) -> None:
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*")}
    assert {"config.yaml", "metrics.jsonl", "eval.jsonl", "checkpoints/iteration_000000/model/config.json"} <= names
    assert not [name for name in names if "tmp" in name or "train" in name]
    metrics = lines(folder / "metrics.jsonl")
    assert [m.pop("iteration") for m in metrics] == [0, 1]
    for line in metrics:
        assert all(re.fullmatch(r"[a-z]+/[a-z0-9_]+", key) for key in line)
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in line.values())
    evaluations = lines(folder / "eval.jsonl")
    assert [(e["iteration"], e["num_tasks"]) for e in evaluations] == [(1, 4), (2, 4)]


def test_lines_have_their_keys_and_places(folder: Path) -> None:
    config = options(folder)
    for records in iterations(folder):
        by_kind = defaultdict(list)
        for record in records:
            by_kind[record["kind"]].append(record)
        assert {(r["task_index"]) for r in records} == {0, 1}
        assert len({r["task_id"] for r in records}) == 2
        assert len({(r["task_index"], r["task_id"]) for r in records}) == 2
        assert len(by_kind["candidates"]) == 2
        assert [(s["task_index"], s["strategy_index"]) for s in by_kind["strategy"]] == [
            (p, n) for p in range(2) for n in range(2)
        ]
        assert [(t["task_index"], t["strategy_index"], t["rollout_index"]) for t in by_kind["trajectory"]] == [
            (p, n, m) for p in range(2) for n in range(2) for m in range(3)
        ]
        for task in by_kind["candidates"]:
            assert len(task["texts"]) == 4
            assert len(set(task["selected"])) == 2
        for strategy in by_kind["strategy"]:
            task = by_kind["candidates"][strategy["task_index"]]
            assert strategy["candidate_index"] == task["selected"][strategy["strategy_index"]]
            assert strategy["text"] == task["texts"][strategy["candidate_index"]]
        for t in by_kind["trajectory"]:
            assert t["strategy"] == by_kind["strategy"][2 * t["task_index"] + t["strategy_index"]]["text"]
            assert t["split"] == "train"
            broke = t["stop_reason"] in ("env_error", "env_timeout")
            assert (t["outcome"] is None) == broke == (t["error"] is not None)
            for turn in t["turns"]:
                assert {"observation", "response", "action", "reward", "valid", "flagged", "return", "advantage",
                        "format_penalty", "length_penalty"} <= turn.keys()  # fmt: skip
            assert len({turn["observation"] for turn in t["turns"][:1]}) <= 1
        assert len({t["seed"] for t in by_kind["trajectory"]}) == 2  # the rollouts of a task start from one world
    assert config["log"]["tokens"] is True


def test_selection_from_the_candidates(folder: Path) -> None:
    """Farthest points among those that parse, in float64, one after the other."""
    config = options(folder)
    for records in iterations(folder):
        for task in (r for r in records if r["kind"] == "candidates"):
            parsed = [i for i, good in enumerate(task["parsed"]) if good]
            unparsed = [i for i, good in enumerate(task["parsed"]) if not good]
            units = fake_embed(task["texts"]).numpy()
            if not parsed:
                chosen = []
            elif config["selector"]["start"] == "first":
                chosen = [parsed[0]]
            else:
                mean = units[parsed].mean(0)
                chosen = [max(parsed, key=lambda i: (round(float(units[i] @ mean), 9), -i))]
            while len(chosen) < min(2, len(parsed)):
                rest = [i for i in parsed if i not in chosen]
                nearest = {i: round(max(float(units[i] @ units[j]) for j in chosen), 9) for i in rest}
                chosen.append(min(rest, key=lambda i: (nearest[i], i)))
            assert task["selected"] == chosen + unparsed[: 2 - len(chosen)]


def test_strategy_returns_and_advantages(folder: Path) -> None:
    config, checked = options(folder), 0
    for records in iterations(folder):
        for p in sorted({r["task_index"] for r in records}):
            returns: list[float | None] = []
            mine = [r for r in records if r["task_index"] == p]
            strategies = [r for r in mine if r["kind"] == "strategy"]
            for n, strategy in enumerate(strategies):
                rollouts = [r for r in mine if r["kind"] == "trajectory" and r["strategy_index"] == n]
                outcomes = sorted((t["outcome"] for t in rollouts if t["outcome"] is not None), reverse=True)
                if not outcomes:
                    assert (strategy["return"], strategy["advantage"]) == (None, 0.0)
                    returns.append(None)
                    continue
                k = max(1, math.floor(config["delta"] * len(outcomes) + 1e-9))
                value = config["reward"]["scale"] * sum(outcomes[:k]) / k
                value += strategy["format_penalty"] + strategy["length_penalty"]
                assert strategy["return"] == pytest.approx(value, abs=1e-9)
                expected = 0.0 if strategy["parsed"] else -config["reward"]["format_penalty"]
                assert strategy["format_penalty"] == expected
                returns.append(value)
            members = [r for r in returns if r is not None]
            for strategy, value in zip(strategies, returns, strict=True):
                if value is not None:
                    assert strategy["advantage"] == pytest.approx(normalised(value, members, config), abs=1e-7)
                    checked += strategy["advantage"] != 0
    assert checked > 0, "the test needs a strategy group with unequal returns"


def test_turn_returns_and_advantages(folder: Path) -> None:
    config = options(folder)
    mixed = flagged = 0
    for records in iterations(folder):
        groups = defaultdict(list)
        for t in (r for r in records if r["kind"] == "trajectory"):
            groups[t["task_index"], t["strategy_index"]].append(t)
        for group in groups.values():
            valid = [t for t in group if t["outcome"] is not None]
            for t in group:
                for turn in t["turns"]:
                    assert turn["format_penalty"] == (0.0 if turn["action"] else -config["reward"]["format_penalty"])
                    assert -1.0 <= turn["length_penalty"] <= 0.0
                    if t["outcome"] is None:
                        assert (turn["return"], turn["advantage"], turn["flagged"]) == (None, 0.0, False)
                        continue
                    value = config["reward"]["scale"] * t["outcome"] - config["kappa"] * turn["flagged"]
                    value += turn["format_penalty"] + turn["length_penalty"]
                    if turn["action"] is not None and not turn["valid"]:
                        value -= config["reward"]["invalid_action_penalty"]
                    assert turn["return"] == pytest.approx(value, abs=1e-9)
                    flagged += turn["flagged"]
            turns = [turn for t in valid for turn in t["turns"]]
            pooled = config["advantage"]["turn_baseline"] == "pooled"
            members = [turn["return"] for turn in turns] if pooled else [
                config["reward"]["scale"] * t["outcome"] for t in valid
            ]  # fmt: skip
            for turn in turns:
                assert turn["advantage"] == pytest.approx(normalised(turn["return"], members, config), abs=1e-7)
                mixed += turn["advantage"] != 0
    assert mixed > 0
    # In window context the judge reads a prompt that this small model has not learned.
    assert flagged > 0 or config["rollout"]["context"] == "window"


def rows_of(records: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[float]]]:
    """(record with tokens, the advantage of each sampled stretch in order)."""
    rows = []
    for r in records:
        if r["kind"] == "strategy":
            rows.append((r, [r["advantage"]]))
        elif r["kind"] == "trajectory" and "input_ids" in r:
            rows.append((r, [turn["advantage"] for turn in r["turns"]]))
        elif r["kind"] == "trajectory":
            rows += [(turn, [turn["advantage"]]) for turn in r["turns"]]
    return rows


def test_token_fields(folder: Path) -> None:
    config = options(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints/iteration_000000/model")
    for records in iterations(folder):
        rows = rows_of(records)
        assert len(rows) >= 4 + 12
        for row, advantages in rows:
            mask = row["response_mask"]
            fields = ("response_mask", "old_logprobs", "temperatures", "advantages")
            if not advantages:
                assert all(row[name] == [] for name in fields)
                continue
            assert {len(row[name]) for name in fields} == {len(row["input_ids"]) - 1}
            level = "strategy" if "candidate_index" in row else "action"
            heat = config["temperature"][level]
            if row.get("return", 0) is None or row.get("outcome", 0) is None:
                # What broke is not trained: nothing of it is in the mask.
                assert not any(mask)
                assert not any(row["old_logprobs"])
                assert set(row["temperatures"]) == {1.0}
                continue
            spread, stretch = [], -1
            for t, sampled in enumerate(mask):
                stretch += sampled and (t == 0 or not mask[t - 1])
                spread.append(advantages[stretch] if sampled else 0.0)
                assert row["temperatures"][t] == pytest.approx(heat if sampled else 1.0)
                assert (row["old_logprobs"][t] < 0) if sampled else (row["old_logprobs"][t] == 0)
            assert stretch == len(advantages) - 1
            assert row["advantages"] == pytest.approx(spread, abs=1e-6)
            if "response" in row:
                said = [i for i, m in zip(row["input_ids"][1:], mask, strict=True) if m]
                assert tokenizer.decode(said).removesuffix(tokenizer.eos_token) == row["response"]


def test_initial_model_scores_what_it_sampled(folder: Path) -> None:
    """Loaded by transformers alone: log-softmax at the recorded temperature gives old_logprobs within 1e-4."""
    path = folder / "checkpoints" / "iteration_000000" / "model"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    worst, count = 0.0, 0
    for row, advantages in rows_of(iterations(folder)[0]):
        if not advantages:
            continue
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double().numpy()
        for t, sampled in enumerate(row["response_mask"]):
            if sampled:
                scaled = logits[t] / row["temperatures"][t]
                logprob = scaled[ids[0, t + 1]] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
                worst, count = max(worst, abs(logprob - row["old_logprobs"][t])), count + 1
    assert count > 50
    assert worst < 1e-4


def test_metrics_are_those_of_the_records(folder: Path) -> None:
    for records, metrics in zip(iterations(folder), lines(folder / "metrics.jsonl"), strict=True):
        played = [r for r in records if r["kind"] == "trajectory"]
        counted = [t for t in played if t["outcome"] is not None]
        turns = [turn for t in played for turn in t["turns"]]

        def mean(values: Any) -> float:
            held = list(values)
            return sum(held) / len(held)

        assert metrics["reward/outcome"] == pytest.approx(mean(t["outcome"] for t in counted))
        assert metrics["reward/success"] == pytest.approx(mean(t["success"] for t in counted))
        assert metrics["rollout/turns"] == pytest.approx(mean(len(t["turns"]) for t in counted))
        assert metrics["rollout/parse_error_rate"] == pytest.approx(mean(turn["action"] is None for turn in turns))
        for reason in ("done", "max_turns", "max_tokens", "context_full", "parse_error", "env_error", "env_timeout"):
            assert metrics[f"stop/{reason}"] == pytest.approx(mean(t["stop_reason"] == reason for t in played))
        groups = defaultdict(list)
        for t in played:
            groups[t["task_index"], t["strategy_index"]] += [turn["advantage"] != 0 for turn in t["turns"]]
        assert metrics["advantage/frac_mixed"] == pytest.approx(mean(any(g) for g in groups.values()))
        assert metrics["advantage/dead_groups"] == pytest.approx(mean(not any(g) for g in groups.values()))


def test_config_gives_the_run_again(folder: Path) -> None:
    from hsg.config.loading import load_config, to_dict

    assert to_dict(load_config(folder / "config.yaml")) == options(folder)
    assert replace(load_config(folder / "config.yaml"), seed=0).seed == 0
