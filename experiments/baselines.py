"""One table, equal conditions: every method on the toy world, from one warm start, for the same number of environment turns.

    python -m experiments.baselines --seeds 0 1 2 --turns 20000 --out runs/baselines-toy     (make baselines-toy)

    cells/<method>-<seed>/   one run folder each; a finished cell is kept, an interrupted one begins again
    curves.csv               one line per evaluation: turns, sampled tokens, seconds so far, success, score
    table.csv, curves.png    mean and spread over the seeds, best success first

The toy world is a test world: the order here says nothing of a benchmark.  Deliberately absent: tuning of any method, a
choice among checkpoints, seconds that were spent on evaluation.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from experiments.curves import read_lines
from hsg.algorithms import ALGORITHMS
from hsg.configfile import load_config, to_dict

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "experiments" / "configs" / "baselines_toy.yaml"
UNTRAINED = ("prompting", "react")  # their prompts are for models that read instructions
METHODS: dict[str, list[str]] = {
    **{name: [f"algorithm={name}"] for name in ALGORITHMS if name not in UNTRAINED},
    "reinforce++ baseline": ["algorithm=reinforce++", "reinforce.baseline=group"],
    # One warm start for all: it has learned conversations, so GiGPO's window of two turns stays outside.
    "gigpo": ["algorithm=gigpo", "rollout.context=conversation"],
    # Episodes have 8 turns here, so the stages are 3, 6, 8 instead of 10, 20, 30.
    "scaling_inter": ["algorithm=scaling_inter", "rollout.turns_per_stage=3", "rollout.iterations_per_stage=10"],
}
AXES = {"environment_turns": "environment turns", "sampled_tokens": "sampled tokens", "seconds": "seconds of training"}
FIELDS = ("method", "seed", "iteration", *AXES, "success", "score")


def cell_name(method: str, seed: int) -> str:
    return f"{method.replace('++', 'pp').replace(' ', '-')}-{seed}"


def is_finished(folder: Path) -> bool:
    """Whether a cell's last evaluation was written: it is the run's last act but the drawing."""
    return any(e["label"] == "after training" for e in read_lines(folder, "eval.jsonl"))


def play_cell(config: Path, out: Path, method: str, seed: int, turns: int, overrides: Sequence[str]) -> bool:
    """Run one cell in a process of its own unless it is finished. Returns whether it worked; its words are in <cell>.log."""
    cells = out / "cells"
    folder = cells / cell_name(method, seed)
    if is_finished(folder):
        return True
    shutil.rmtree(folder, ignore_errors=True)
    cells.mkdir(parents=True, exist_ok=True)
    options = [*METHODS[method], f"train.max_environment_turns={turns}", *overrides,
               f"seed={seed}", f"run.dir={cells}", f"run.name={folder.name}"]  # fmt: skip
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--config", str(config)]
    command += [part for option in options for part in ("--set", option)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (cells / f"{folder.name}.log").open("w", encoding="utf-8") as log:
        return subprocess.run(command, env=environment, stdout=log, stderr=log).returncode == 0


def curve(folder: Path) -> list[dict[str, float]]:
    """What a run had spent and reached at each of its evaluations; the first one is the warm start."""
    metrics = read_lines(folder, "metrics.jsonl")
    names = {"environment_turns": "cost/environment_turns", "sampled_tokens": "cost/sampled_tokens",
             "seconds": "time/iteration_seconds"}  # fmt: skip
    spent = {axis: [0.0, *accumulate(line[name] for line in metrics)] for axis, name in names.items()}
    points = {}
    for e in read_lines(folder, "eval.jsonl"):
        if "success" in e:  # of two evaluations after one iteration the last counts
            at = {axis: values[e["iteration"]] for axis, values in spent.items()}
            points[e["iteration"]] = {"iteration": e["iteration"], **at, "success": e["success"], "score": e["score"]}
    return list(points.values())


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per method from the last evaluation of each seed: mean and sample spread, best success first."""
    last: dict[tuple[str, int], dict[str, Any]] = {(row["method"], row["seed"]): row for row in rows}
    table = []
    for method in dict.fromkeys(row["method"] for row in rows):
        ends = [row for (of, _), row in last.items() if of == method]
        line: dict[str, Any] = {"method": method, "seeds": len(ends)}
        for name in ("success", "score", *AXES):
            values = [float(row[name]) for row in ends]
            line[name] = statistics.fmean(values)
            line[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else ""
        table.append(line)
    return sorted(table, key=lambda line: -line["success"])


def mean_curve(rows: Sequence[dict[str, Any]], axis: str) -> list[tuple[float, float, float]]:
    """(x, mean success, spread) at the evaluations that every seed has: the common iterations, and the ends."""
    seeds = {seed: [row for row in rows if row["seed"] == seed] for seed in {row["seed"] for row in rows}}
    by_number = [{row["iteration"]: row for row in of[:-1]} for of in seeds.values()]
    common = sorted(set.intersection(*(set(of) for of in by_number)))
    groups = [[of[i] for of in by_number] for i in common] + [[of[-1] for of in seeds.values()]]
    points = []
    for group in groups:
        reached = [row["success"] for row in group]
        spread = statistics.stdev(reached) if len(reached) > 1 else 0.0
        points.append((statistics.fmean(row[axis] for row in group), statistics.fmean(reached), spread))
    return points


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Success against turns, tokens and seconds. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(AXES), figsize=(18, 6), layout="constrained", sharey=True)
    for place, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        held = [row for row in rows if row["method"] == method]
        for panel, (axis, title) in zip(panels, AXES.items(), strict=True):
            x, y, spread = zip(*mean_curve(held, axis), strict=True)
            colour = pyplot.get_cmap("tab20")(place % 20)
            panel.plot(x, y, color=colour, marker="o", markersize=3, label=method)
            low, high = ([a + sign * b for a, b in zip(y, spread, strict=True)] for sign in (-1, 1))
            panel.fill_between(x, low, high, color=colour, alpha=0.12)
            panel.set_xlabel(title)
            panel.grid(alpha=0.3)
    panels[0].set_ylabel("success on held-out tasks")
    panels[-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def collect(out: Path, methods: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The evaluations of all finished cells."""
    rows = []
    for method in methods:
        for seed in seeds:
            folder = out / "cells" / cell_name(method, seed)
            if is_finished(folder):
                rows += [{"method": method, "seed": seed, **point} for point in curve(folder)]
    return rows


def print_table(table: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'':<22}{'seeds':>6}{'success':>16}{'score':>16}{'turns':>9}{'tokens':>10}{'seconds':>9}")
    for line in table:
        shown = [
            f"{line[k]:.3f}" + (f" +- {s:.3f}" if (s := line[f"{k}_spread"]) != "" else "")
            for k in ("success", "score")
        ]
        print(f"{line['method']:<22}{line['seeds']:>6}{shown[0]:>16}{shown[1]:>16}{line['environment_turns']:>9.0f}"
              f"{line['sampled_tokens']:>10.0f}{line['seconds']:>9.0f}")  # fmt: skip


def run_all(options: argparse.Namespace) -> int:
    """All cells, then the table of those that worked. Exit status 1 where one did not."""
    cells = [(method, seed) for seed in options.seeds for method in options.methods]
    failed = []

    def one(cell: tuple[str, int]) -> None:
        worked = play_cell(options.config, options.out, *cell, options.turns, options.set)
        failed.extend([] if worked else [cell])
        print(f"{cell_name(*cell)} {'done' if worked else 'FAILED'}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, cells))
    rows = collect(options.out, options.methods, options.seeds)
    if rows:
        write_csv(options.out / "curves.csv", [{name: row[name] for name in FIELDS} for row in rows])
        table = summarise(rows)
        write_csv(options.out / "table.csv", table)
        drawn = draw(rows, options.out / "curves.png")
        print_table(table)
        print(f"\n{options.out}/table.csv, curves.csv{', curves.png' if drawn else ''}")
    for cell in failed:
        print(f"error: {cell_name(*cell)} must finish, got an error; see {options.out}/cells/{cell_name(*cell)}.log",
              file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


def prepare(options: argparse.Namespace) -> None:
    """The one warm start, before cells could make it at the same time. ValueError: bad input."""
    import environments
    from experiments.warmstart import warm_start

    for method in options.methods:
        load_config(options.config, [*METHODS[method], *options.set])
    config = load_config(options.config, options.set)
    if config.model.path == "nano":
        task_set = environments.make(config.environment.name, **config.environment.options)
        try:
            warm_start(config, task_set)
        finally:
            task_set.close()


def check_same_study(options: argparse.Namespace) -> None:
    """Cells of one folder belong to one study: other turns or options would stand in one table. ValueError if they differ."""
    study = {"turns": options.turns, "set": options.set, "config": to_dict(load_config(options.config, options.set))}
    path = options.out / "study.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != study:
        raise ValueError(
            f"--out must be a folder of the same study, got {str(options.out)!r}, whose study.json differs"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(study, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="what all methods share")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=20_000, help="environment turns of every cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/baselines-toy"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every method, repeatable")
    options = parser.parse_args(arguments)
    try:
        if unknown := [name for name in options.methods if name not in METHODS]:
            raise ValueError(f"--methods must be among {', '.join(METHODS)}, got {unknown[0]!r}")
        check_same_study(options)
        prepare(options)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
