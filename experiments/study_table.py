"""The table and the plot of a study: mean and spread over seeds, the settings that differ, the paper's figure beside ours.

Deliberately absent: bold print for the best cell (with three seeds the spread says more), smoothing.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.curves import SPENT, draw_curves, line_style
from experiments.samples import unsolved
from experiments.study_file import Study

Value = tuple[float, float | None]
"""Mean over seeds and their sample standard deviation; None for a single seed."""


def write_results(study: Study, results: Sequence[Mapping[str, Any]], out: Path) -> str:
    """table.csv, table.md and plot.png in `out`; returns the table as Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    hard = hard_tasks(study, results)
    columns = dict(study.columns)
    if hard is not None:
        columns[f"hard tasks solved (of {len(hard)})"] = "hard_solved"
    rows: dict[str, dict[str, Value]] = {}
    seeds: dict[str, int] = {}
    for name in study.cells:
        mine = [dict(r) for r in results if r["cell"] == name]
        for result in mine:
            result["hard_solved"] = None if hard is None else sum(result["per_task"][task][1] > 0 for task in hard)
        if mine:
            seeds[name] = len(mine)
            rows[name] = {c: v for c, path in columns.items() if (v := mean_and_spread(mine, path)) is not None}
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        parts = [f"{c} {part}" for c in columns for part in ("mean", "spread")]
        writer.writerow(["cell", "seeds", *parts, study.paper_of, "settings"])
        for name, values in rows.items():
            numbers = [n for c in columns for n in (values.get(c) or (None, None))]
            writer.writerow([name, seeds[name], *numbers, study.paper.get(name), settings(study, name)])
    text = markdown(study, list(columns), rows, seeds)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_curves(study, results, out / "curves.csv")
    plot(study, results, out / "plot.png")
    return text


def write_curves(study: Study, results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line per cell, seed and iteration: what was spent so far, and what was reached."""
    drawn = [r for r in results if r["curve"]]
    if not drawn:
        path.unlink(missing_ok=True)
        return
    names = list(drawn[0]["curve"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["cell", "seed", *names])
        for r in drawn:
            writer.writerows(
                [r["cell"], r["seed"], *values] for values in zip(*(r["curve"][n] for n in names), strict=True)
            )


def hard_tasks(study: Study, results: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Tasks that no sample of the study's `hard` cell solves; None where the study names no such cell."""
    judged = [r["per_task"] for r in results if r["cell"] == study.hard]
    if not judged:
        return None
    return unsolved({task: [sum(part) for part in zip(*(r[task] for r in judged), strict=True)] for task in judged[0]})


def mean_and_spread(results: Sequence[Mapping[str, Any]], path: str) -> Value | None:
    """Over the seeds of one cell; None where a result has no such number."""
    values = [value for r in results if (value := look_up(r, path)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def look_up(result: Any, path: str) -> float | None:
    """The number at a dotted path; a whole number in it is a place in a list, negative from its end."""
    for part in path.split("."):
        if isinstance(result, list):
            place = int(part)
            result = result[place] if -len(result) <= place < len(result) else None
        else:
            result = result.get(part) if isinstance(result, Mapping) else None
    return float(result) if isinstance(result, int | float) and math.isfinite(result) else None


def settings(study: Study, name: str) -> str:
    """What distinguishes a cell, as it would be typed."""
    return ", ".join(f"{key}={value}" for key, value in study.cells[name].items()) or "as the base config"


def markdown(
    study: Study, columns: Sequence[str], rows: Mapping[str, Mapping[str, Value]], seeds: Mapping[str, int]
) -> str:
    """Mean ± spread over seeds (no spread: one seed, or never trained)."""
    heads = ["", *columns, *([study.paper_of] if study.paper else []), "seeds", "settings"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, values in rows.items():
        shown = [_shown(values.get(column)) for column in columns]
        paper = [study.paper.get(name, "")] if study.paper else []
        lines.append("| " + " | ".join([name, *shown, *paper, str(seeds[name]), f"`{settings(study, name)}`"]) + " |")
    return "\n".join(lines)


def _shown(value: Value | None) -> str:
    if value is None:
        return ""
    mean, spread = value
    return f"{mean:.3g}" if spread is None else f"{mean:.3g} ± {spread:.2g}"


def plot(study: Study, results: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Learning curves (band: spread over seeds) against what was spent, and pass@k; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(24, 5), layout="constrained")
    axes = figure.subplots(1, len(SPENT) + 1)
    for place, name in enumerate(study.cells):
        mine = [r for r in results if r["cell"] == name]
        draw_curves(axes[:-1], [r["curve"] for r in mine if r["curve"]], study.curve, name, place)
        passes = [r["measures"]["pass_at_k"] for r in mine if "pass_at_k" in r["measures"]]
        if passes:
            length = min(map(len, passes))
            y = [statistics.fmean(p[k] for p in passes) for k in range(length)]
            axes[-1].plot(range(1, length + 1), y, label=name, **line_style(place))
    for axis, label in zip(axes, (*SPENT.values(), "k"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(study.curve)
    axes[-1].set_ylabel(f"pass@k ({study.split})")
    axes[-1].set_xscale("log", base=2)
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(study.title)
    figure.savefig(path, dpi=100)
    return path
