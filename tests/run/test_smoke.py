"""The smoke run as a user starts it: launcher, warm start, two iterations; then its folder is recomputed by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import test_run_folder as by_hand
from test_docs import documented_metrics

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of smoke.yaml with tokens logged, its warm start made inside the command."""
    root = tmp_path_factory.mktemp("smoke")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "experiments/accelerate/cpu.yaml"]
    command = [*launcher, "experiments/run.py", "--config", "experiments/configs/smoke.yaml"]
    overrides = ["log.tokens=true", f"run.dir={root}", "run.name=smoke", f"warmstart.cache_dir={root / 'cache'}"]
    for pair in overrides:
        command += ["--set", pair]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "run folder:" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return root / "smoke"


def test_iteration_0_has_something_to_learn_from(folder: Path) -> None:
    """A strategy group and a rollout group with unequal returns, and at least one flagged turn."""
    records = by_hand.iterations(folder)[0]
    strategies, rollouts = defaultdict(set), defaultdict(set)
    flagged = 0
    for r in records:
        if r["kind"] == "strategy":
            strategies[r["task_index"]].add(r["return"])
        if r["kind"] == "trajectory":
            rollouts[r["task_index"], r["strategy_index"]].add(r["outcome"])
            flagged += sum(turn["flagged"] for turn in r["turns"])
    assert any(len(returns) > 1 for returns in strategies.values())
    assert any(len(outcomes) > 1 for outcomes in rollouts.values())
    assert flagged >= 1


def test_both_levels_by_hand(folder: Path) -> None:
    by_hand.test_strategy_returns_and_advantages(folder)
    by_hand.test_turn_returns_and_advantages(folder)


def test_tokens_and_log_probs_by_hand(folder: Path) -> None:
    by_hand.test_token_fields(folder)
    by_hand.test_initial_model_scores_what_it_sampled(folder)


def test_first_update_has_ratio_one_everywhere(folder: Path) -> None:
    metrics = by_hand.lines(folder / "metrics.jsonl")[0]
    assert metrics["update/log_ratio_max"] < 1e-4
    assert metrics["update/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_every_metric_is_explained(folder: Path) -> None:
    for metrics in by_hand.lines(folder / "metrics.jsonl"):
        assert set(metrics) - {"iteration"} <= set(documented_metrics())


def test_no_token_is_forwarded_in_vain(folder: Path) -> None:
    """Sampled lengths differ here, so that some padding of the rollout is allowed; the update has none."""
    for metrics in by_hand.lines(folder / "metrics.jsonl"):
        assert metrics["cost/rollout_positions"] <= 1.25 * metrics["cost/unique_tokens"]
        assert metrics["cost/update_positions"] <= 1.15 * metrics["cost/update_unique_tokens"]
        assert metrics["cost/head_positions"] <= 1.05 * metrics["cost/trained_tokens"]
        assert metrics["cost/judge_positions"] > 0
        assert metrics["rollout/logprob_gap_max"] < 1e-4
        assert 0 < metrics["time/matmul_share"] < 1.5
