"""Evaluate one model as a benchmark reports it: whole splits, several seeds, success per kind of task and overall.

    python experiments/evaluate.py --config experiments/configs/alfworld_qwen2.5-7b.yaml --model FOLDER \\
        --splits valid_seen valid_unseen --seeds 0 1 2 [--out results.json]

One line per kind of task: mean over the seeds +- their sample standard deviation, in percent.  A seed changes the policy's
random numbers; the tasks are the same for all.  Deliberately absent: training, choosing among checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.config import Config
from hsg.configfile import load_config
from hsg.distributed import Distributed
from hsg.evaluation import evaluate, evaluation_tasks, over_seeds
from hsg.protocol import TaskSet
from hsg.trainer import make_policy


def evaluate_splits(
    config: Config, task_set: TaskSet, model: str, splits: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One summary (see `over_seeds`) per split; `evaluation.num_tasks` tasks of each. ValueError: unknown split."""
    tasks = {split: evaluation_tasks(config, task_set, split) for split in splits}
    distributed = Distributed()
    try:
        policy = make_policy(config, model, distributed.device)

        def play(split: str, seed: int) -> dict[str, Any]:
            label = f"{split} seed {seed}"
            return evaluate(config, policy, task_set, tasks[split], distributed, label=label, seed=seed)

        return [over_seeds([play(split, seed) for seed in seeds]) for split in splits]
    finally:
        distributed.close()


def print_summary(summary: dict[str, Any]) -> None:
    """A table: one line per kind of task and one for all."""
    print(f"\n{summary['split']}: {summary['num_seeds']} seeds, {summary['num_failed']} broken episodes")
    print(f"{'':<50}{'tasks':>6}{'success %':>15}{'score %':>15}{'turns':>7}")
    for name, row in [*summary["by_kind"].items(), ("all", summary)]:
        print(
            f"{name:<50}{row['num_tasks']:>6}{_percent(row['success']):>15}{_percent(row['score']):>15}"
            f"{row['turns'][0]:>7.1f}"
        )


def _percent(value: tuple[float, float | None]) -> str:
    mean, spread = value
    return f"{100 * mean:.1f}" + ("" if spread is None else f" +- {100 * spread:.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 and one line where the input is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", help="YAML file with what differs from the defaults")
    parser.add_argument("--model", help="folder or hub id; default: model.path of the configuration")
    parser.add_argument("--splits", nargs="+", help="default: evaluation.split")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the summaries there, as JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one option, repeatable")
    options = parser.parse_args(arguments)
    import environments

    try:
        config = load_config(options.config, options.set)
        model = options.model or config.model.path
        if model == "nano":
            raise ValueError("--model must name a trained model, got nano, which has learned nothing; give a folder")
        task_set = environments.make(config.environment.name, **config.environment.options)
        try:
            splits = options.splits or [config.evaluation.split]
            summaries = evaluate_splits(config, task_set, model, splits, options.seeds)
        finally:
            task_set.close()
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0
    for summary in summaries:
        print_summary(summary)
    if options.out is not None:
        options.out.write_text(json.dumps(summaries, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
