"""The table and the plot of a study: mean and spread over seeds, the settings that differ, the paper's figure beside ours.

Deliberately absent: bold print for the best cell (with three seeds the spread says more), smoothing.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.experiments.evaluating.samples import unsolved
from hsg.experiments.reading.curves import SPENT_SIDE_BY_SIDE, draw_band, draw_curves
from hsg.experiments.studies.file import Study, as_options
from hsg.run.files import write_whole

Value = tuple[float, float | None, int]
"""Mean over seeds, their sample standard deviation (None for a single seed), and how many seeds have such a number."""


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
            if hard is not None and name != study.hard:  # that cell solves none of them by definition
                # A task all of whose samples broke has no line, and was not solved.
                result["hard_solved"] = sum(result["per_task"].get(task, (0, 0))[1] > 0 for task in hard)
        if mine:
            seeds[name] = len(mine)
            rows[name] = {c: v for c, path in columns.items() if (v := mean_and_spread(mine, path)) is not None}
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        parts = [f"{c} {part}" for c in columns for part in ("mean", "spread")]
        writer.writerow(["cell", "seeds", *parts, study.paper_of, "settings", "keys"])
        for name, values in rows.items():
            numbers = [n for c in columns for n in (values[c][:2] if c in values else (None, None))]
            keys = " ".join(r["key"] for r in results if r["cell"] == name)
            writer.writerow([name, seeds[name], *numbers, study.paper.get(name), settings(study, name), keys])
    text = markdown(study, list(columns), rows, seeds) + "\n\n" + measured_with(results)
    write_whole(out / "table.md", text + "\n")
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
    shared = [task for task in judged[0] if all(task in r for r in judged)]
    return unsolved({task: [sum(part) for part in zip(*(r[task] for r in judged), strict=True)] for task in shared})


def mean_and_spread(results: Sequence[Mapping[str, Any]], path: str) -> Value | None:
    """Over the seeds of one cell; None where a result has no such number."""
    values = [value for r in results if (value := look_up(r, path)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)


def look_up(result: Any, path: str) -> float | None:
    """The number at a dotted path; a whole number in it is a place in a list, negative from its end."""
    for part in path.split("."):
        if isinstance(result, list):
            place = int(part) if re.fullmatch(r"-?\d+", part) else len(result)
            result = result[place] if -len(result) <= place < len(result) else None
        else:
            result = result.get(part) if isinstance(result, Mapping) else None
    return float(result) if isinstance(result, int | float) and math.isfinite(result) else None


def settings(study: Study, name: str) -> str:
    """What distinguishes a cell, as it would be typed."""
    return ", ".join(as_options(study.cells[name])).replace('"', "") or "as the base config"


def markdown(
    study: Study, columns: Sequence[str], rows: Mapping[str, Mapping[str, Value]], seeds: Mapping[str, int]
) -> str:
    """Mean ± spread over seeds (no spread: one seed, or never trained)."""
    heads = ["", *columns, *([study.paper_of] if study.paper else []), "seeds", "settings"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, values in rows.items():
        shown = [_shown(values.get(column), seeds[name]) for column in columns]
        paper = [study.paper.get(name, "")] if study.paper else []
        lines.append("| " + " | ".join([name, *shown, *paper, str(seeds[name]), f"`{settings(study, name)}`"]) + " |")
    return "\n".join(lines)


def measured_with(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: the commits and versions of the cells, of which a table should have one."""
    found = sorted({f"commit {r['versions']['commit']}, torch {r['versions']['torch']}" for r in results})
    return f"Measured at {' and '.join(found)}."


def _shown(value: Value | None, seeds: int) -> str:
    if value is None:
        return ""
    mean, spread, count = value
    text = _number(mean, 3) if spread is None else f"{_number(mean, 3)} ± {_number(spread, 2)}"
    return text if count == seeds else f"{text} ({count} of {seeds})"


def _number(value: float, digits: int) -> str:
    """So many digits, or all before the point: 20,512 and not 2.05e+04."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def plot(study: Study, results: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Learning curves (band: spread over seeds) against what was spent, and pass@k; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(24, 5), layout="constrained")
    axes = figure.subplots(1, len(SPENT_SIDE_BY_SIDE) + 1)
    for place, name in enumerate(study.cells):
        mine = [r for r in results if r["cell"] == name]
        draw_curves(axes[:-1], [r["curve"] for r in mine if r["curve"]], study.curve, name, place, SPENT_SIDE_BY_SIDE)
        passes = [r["measures"]["pass_at_k"] for r in mine if "pass_at_k" in r["measures"]]
        if passes:
            columns = [p for p in zip(*passes, strict=False)]  # as many k as every seed has
            mean = [statistics.fmean(column) for column in columns]
            spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
            draw_band(axes[-1], range(1, len(columns) + 1), mean, spread, name, place)
    for axis, label in zip(axes, (*SPENT_SIDE_BY_SIDE.values(), "k"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(study.curve)
    axes[-1].set_ylabel(f"pass@k ({study.split})")
    axes[-1].set_xscale("log", base=2)
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(study.title)
    with warnings.catch_warnings():
        # Boxes stand for glyphs that the font lacks (CJK, emoji); the table beside the plot has the names.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(path, dpi=100)
    return path
