"""Learning curves of one or more run folders, drawn from their own files.

    python experiments/curves.py runs/a runs/b --out curves.png

Deliberately absent: smoothing that hides (the thin line is the data, the thick one its mean over nearby iterations).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = {
    "reward/outcome": "outcome of training rollouts",
    "reward/success": "success of training rollouts",
    "rollout/turns": "turns per episode",
    "judge/flagged_share": "share of flagged turns",
    "strategy/distance_selected": "distance of kept strategies",
    "update/entropy": "entropy (nats per token)",
}
WINDOW = 9  # iterations in a moving mean


def write_curves(folders: Sequence[str | Path], out: str | Path) -> Path | None:
    """Draw the curves of some run folders into one PNG. None where matplotlib is not installed or nothing was written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None

    runs = {
        Path(folder).name: (read_lines(folder, "metrics.jsonl"), read_lines(folder, "eval.jsonl")) for folder in folders
    }
    if not any(metrics for metrics, _ in runs.values()):
        return None
    figure = Figure(figsize=(18, 7), layout="constrained")  # not pyplot's: a notebook's figures stay its own
    panels = figure.subplots(2, 4).flatten()
    for place, (name, (metrics, evaluations)) in enumerate(runs.items()):
        colour = f"C{place}"
        for axis, (key, title) in zip(panels, PANELS.items(), strict=False):
            points = [(line["iteration"], line[key]) for line in metrics if key in line]
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(x, y, color=colour, alpha=0.25, linewidth=1)
                axis.plot(x, moving_mean(y), color=colour, linewidth=2, label=name)
            axis.set_title(title)
        _evaluations(panels[6], "score", evaluations, colour)
        _evaluations(panels[7], "success", evaluations, colour)
    for axis in panels:
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    path = Path(out)
    figure.savefig(path, dpi=110)
    return path


def _evaluations(axis: Any, key: str, evaluations: Sequence[dict[str, Any]], colour: str) -> None:
    """The policy's own evaluations as a line, its variants (strategy blanked, ...) and the control as marks."""
    dev = [e for e in evaluations if key in e and e["label"] != "test split"]
    line = [e for e in dev if e["label"] in ("warm start", "before training", "training", "after training")]
    axis.plot([e["iteration"] for e in line], [e[key] for e in line], color=colour, marker="o")
    marks = {"strategy blanked": "v", "strategies exchanged": "x", "supervised control": "s"}
    for e in dev:
        if e["label"] in marks:
            axis.plot(e["iteration"], e[key], marks[e["label"]], color=colour, label=e["label"])
    axis.set_title(f"{key} on held-out tasks")


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean over the window around each value, cut at both ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def read_lines(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """The objects of one .jsonl file of a run folder; none where it does not exist yet."""
    path = Path(folder) / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", default="curves.png", help="the PNG to write")
    options = parser.parse_args(arguments)
    missing = [run for run in options.runs if not (Path(run) / "metrics.jsonl").is_file()]
    if missing:
        print(
            f"error: runs must be run folders with metrics.jsonl, got {missing[0]!r}; train one first", file=sys.stderr
        )
        return 2
    written = write_curves(options.runs, options.out)
    if written is None:
        print(
            "error: matplotlib must be installed to draw, got no such package; pip install hsg[notebooks]",
            file=sys.stderr,
        )
        return 2
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
