"""Learning curves of one or more run folders, drawn from their own files.

    python -m hsg.experiments.reading.curves runs/a runs/b --out curves.png             what each of them measured
    python -m hsg.experiments.reading.curves runs/a-0 runs/a-1 runs/b-0 --against-cost  success against iterations, environment
                                                                                            turns, sampled tokens and seconds

The thin line is the data, the thick one its mean over nearby iterations.  Against cost, runs that differ in their seed alone
are one line, their mean, in a band of their spread (StraTA's figure 3); of long ones, only means over nearby iterations.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require, require_folder_there
from hsg.config.loading import read_yaml

PANELS = {
    "reward/outcome": "outcome of training rollouts",
    "reward/success": "success of training rollouts",
    "rollout/turns": "turns per episode",
    "judge/flagged_share": "share of flagged turns",
    "strategy/distance_selected": "distance of kept strategies",
    "update/entropy": "entropy (nats per token)",
}
WINDOW = 9  # iterations in a moving mean, of a run that is long enough
SPENT = {
    "iteration": "iteration",
    "environment_turns": "environment turns",
    "sampled_tokens": "sampled tokens",
    "seconds": "seconds of training",
}
SPENT_SIDE_BY_SIDE = {
    **{name: label for name, label in SPENT.items() if name != "seconds"},
    "processor_seconds": "processor seconds of training",
}
"""For runs that shared a machine: the wall time of each is that of all of them. Without engines in processes of their own."""
REACHED = ("reward/success", "reward/outcome", "reward/score", "evaluation/success", "evaluation/score")
OWN_EVALUATIONS = ("warm start", "before training", "training", "after training")
"""Labels of evaluations of the policy itself on the held-out tasks; the others take its strategy away, or are of another."""


def write_curves(folders: Sequence[str | Path], out: str | Path) -> Path | None:
    """Draw the curves of some run folders into one PNG. None where matplotlib is not installed or nothing was written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None

    names = labels([Path(folder) for folder in folders])
    runs = {name: (read_metrics(folder), read_evaluations(folder)) for name, folder in zip(names, folders, strict=True)}
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
                axis.plot(x, moving_mean(y, window_of(len(y))), color=colour, linewidth=2, label=name)
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
    dev = [e for e in evaluations if e.get(key) is not None and e["label"] != "test split"]
    line = [e for e in dev if e["label"] in OWN_EVALUATIONS]
    axis.plot([e["iteration"] for e in line], [e[key] for e in line], color=colour, marker="o")
    marks = {"strategy blanked": "v", "strategies exchanged": "x", "supervised control": "s"}
    for e in dev:
        if e["label"] in marks:
            axis.plot(e["iteration"], e[key], marks[e["label"]], color=colour, label=e["label"])
    axis.set_title(f"{key} on held-out tasks")


def learning_curve(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()
) -> dict[str, list[float | None]]:
    """What a run had spent after every iteration, what its rollouts came to, and what its evaluations did.

    Rollouts that were dropped are paid for and not counted among those that succeeded, so methods that drop some are
    compared by evaluation/success. An evaluation before training is the first point, at no cost.
    """
    reached = {e["iteration"]: e for e in evaluations if e["label"] in OWN_EVALUATIONS}
    curve: dict[str, list[float | None]] = defaultdict(list)
    spent = dict.fromkeys(("environment_turns", "sampled_tokens", "seconds", "processor_seconds"), 0.0)
    for line in [*([{}] if 0 in reached else []), *lines]:
        iteration = line["iteration"] + 1 if line else 0
        if line:
            spent["environment_turns"] += line["cost/environment_turns"]
            spent["sampled_tokens"] += line["cost/sampled_tokens"]
            spent["seconds"] += line["time/iteration_seconds"]
            spent["processor_seconds"] += line.get("time/processor_seconds", 0.0)  # older runs have not counted them
        held_out = {f"evaluation/{name}": value for name, value in reached.get(iteration, {}).items()}
        for name, value in (
            ("iteration", iteration), *spent.items(),
            *((n, {**line, **held_out}.get(n)) for n in REACHED),
        ):  # fmt: skip
            curve[name].append(value)
    return dict(curve)


def mean_curve(curves: Sequence[Mapping[str, Any]], spent: str, reached: str) -> list[tuple[float, float, float]]:
    """(mean spent, mean reached, spread) where every seed was measured: the places they share, and their last ones.

    Long curves, one point an iteration, are moving means of each seed: tasks differ from iteration to iteration.
    """
    kept = [[i for i, value in enumerate(c[reached]) if value is not None] for c in curves]
    if not all(kept):
        return []
    shared = sorted(set.intersection(*map(set, kept)))
    places = [[i] * len(curves) for i in shared]
    ends = [k[-1] for k in kept]
    places += [] if shared and ends == places[-1] else [ends]
    window = window_of(len(places))
    x, y = (
        [moving_mean([curve[name][place[seed]] for place in places], window) for seed, curve in enumerate(curves)]
        for name in (spent, reached)
    )
    several = len(curves) > 1
    return [
        (statistics.fmean(xs), statistics.fmean(ys), statistics.stdev(ys) if several else 0.0)
        for xs, ys in zip(zip(*x, strict=True), zip(*y, strict=True), strict=True)
    ]


def line_style(place: int) -> dict[str, Any]:
    """How the line of the given place looks, the same in every panel: ten colours, then the same ones dashed."""
    return {"color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}


def draw_curves(
    axes: Sequence[Any],
    curves: Sequence[Mapping[str, Any]],
    reached: str,
    label: str,
    place: int,
    spent: Mapping[str, str] = SPENT,
) -> None:
    """One line in each panel, one for each of `spent`: the mean over equal runs (see `learning_curve`), band: their spread."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for axis, name in zip(axes, spent, strict=True):
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 150k: six digits run into each other
        if points := mean_curve(curves, name, reached) if curves else []:
            x, mean, spread = zip(*points, strict=True)
            draw_band(axis, x, mean, spread, label, place)


def draw_band(
    axis: Any, x: Sequence[float], mean: Sequence[float], spread: Sequence[float], label: str, place: int
) -> None:
    """A line in a band of one spread to each side."""
    axis.plot(x, mean, label=label, **line_style(place))
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=line_style(place)["color"], alpha=0.1, linewidth=0)


def write_cost_curves(
    folders: Sequence[str | Path], out: str | Path, reached: str = "evaluation/success"
) -> Path | None:
    """Draw `reached` of some runs against what they spent. None where matplotlib is missing, or no run has such a number.

    reached  one of `REACHED`. ValueError where a run has not counted its turns.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    groups = group_by_configuration(folders)
    figure = Figure(figsize=(20, 5), layout="constrained")
    axes = figure.subplots(1, len(SPENT))
    for place, (label, members) in enumerate(groups.items()):
        logs = [(read_metrics(folder), read_evaluations(folder)) for folder in members]
        for folder, (metrics, _) in zip(members, logs, strict=True):
            counted = bool(metrics) and all("cost/environment_turns" in line for line in metrics)
            require(counted, "runs", "runs that count their environment turns", str(folder), "run it again")
        draw_curves(axes, [learning_curve(*lines) for lines in logs], reached, label, place)
    for axis, title in zip(axes, SPENT.values(), strict=True):
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(reached)
    drawn = bool(axes[0].lines)
    if drawn:
        axes[-1].legend(fontsize="small")
        figure.savefig(out, dpi=110)
    return Path(out) if drawn else None


def group_by_configuration(folders: Sequence[str | Path]) -> dict[str, list[Path]]:
    """Runs whose configurations differ in nothing but seed, run and log, under the name of the first of them."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for folder in map(Path, folders):
        config = read_yaml(folder / "config.yaml", "the run's configuration")
        # str: a configuration that no run wrote may hold what JSON has no word for.
        same = json.dumps({k: v for k, v in config.items() if k not in ("seed", "run", "log")}, default=str)
        groups[same].append(folder)
    labelled = {}
    for name, (first, *others) in zip(
        labels([members[0] for members in groups.values()]), groups.values(), strict=True
    ):
        labelled[f"{name} ({len(others) + 1} seeds)" if others else name] = [first, *others]
    return labelled


def labels(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, or the whole path of those that share a name."""
    names = Counter(folder.name for folder in folders)
    return [folder.name if names[folder.name] == 1 else str(folder) for folder in folders]


def window_of(count: int) -> int:
    """How many iterations a mean is over: a run has to be eight times as long, else it shows another run than there was."""
    widest = min(WINDOW, count // 8)
    return max(1, widest if widest % 2 else widest - 1)


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean over the window around each value, cut at both ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Every iteration's metrics. ValueError: as `read_objects`, where iterations do not count up, or for what is no number."""
    lines = read_lines(folder, "metrics.jsonl", ("iteration",))
    for place, line in enumerate(lines):
        where = f"line {place + 1} of {Path(folder) / 'metrics.jsonl'}"
        require(
            line["iteration"] == place, f"iteration in {where}", f"{place}, as a run counts them", line["iteration"]
        )
        for name, value in line.items():
            require(is_number(value), f"{name} in {where}", "a finite number", value)
    return lines


def read_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """Every evaluation, in the order they were made. ValueError: as `read_objects`, or for what is no number."""
    lines = read_lines(folder, "eval.jsonl", ("label", "iteration"))
    for place, line in enumerate(lines):
        where = f"line {place + 1} of {Path(folder) / 'eval.jsonl'}"
        require(isinstance(line["label"], str), f"label in {where}", "a text", line["label"])
        whole = isinstance(line["iteration"], int) and line["iteration"] >= 0
        require(whole, f"iteration in {where}", "a whole number >= 0", line["iteration"])
        for name in ("score", "success", "turns"):  # null, or not there, where every episode failed
            value = line.get(name)
            require(value is None or is_number(value), f"{name} in {where}", "a finite number", value)
    return lines


def is_number(value: object) -> bool:
    """Whether it can be drawn: not true, not a text, not 10**400."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def read_lines(folder: str | Path, name: str, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of one .jsonl file of a run folder; none where it does not exist yet.

    needs  keys that every line must have. ValueError names the line that lacks one, or that was cut.
    """
    path = Path(folder) / name
    return list(read_objects(path, needs)) if path.is_file() else []


def read_objects(
    path: Path,
    needs: Sequence[str] = (),
    *,
    until: float = math.inf,
    remedy: str = "take the line out, or name a run whose files are whole",
) -> Iterator[dict[str, Any]]:
    """The object of each line. ValueError names the line that is none (a full disk cut it), or lacks a key of `needs`.

    `until`: lines that begin at this byte or behind it are not read.
    """
    rule = " with ".join(["an object as a run writes it", *([", ".join(needs)] if needs else [])])
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if lines.tell() - len(text) >= until:
                break
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):  # RecursionError: brackets without end
                found = None
            if not isinstance(found, dict) or not all(key in found for key in needs):
                require(False, f"line {number} of {path}", rule, text.decode(errors="replace"), remedy)
            yield found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 drawn, 2 bad input, or nothing to draw with."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", default="curves.png", help="the PNG to write")
    parser.add_argument(
        "--against-cost",
        nargs="?",
        const="evaluation/success",
        metavar="MEASURE",
        help="draw it against what was spent, equal runs of several seeds as one line (evaluation/success)",
    )
    try:
        options = parser.parse_args(arguments)
        measure = options.against_cost
        require(measure in (None, *REACHED), "--against-cost", f"one of {', '.join(REACHED)}", measure)
        for run in options.runs:
            require_folder_there(run, "runs")
            there = (Path(run) / "metrics.jsonl").is_file()
            require(there, "runs", "run folders with metrics.jsonl", run, "train one first")
        once = len({Path(run).resolve() for run in options.runs}) == len(options.runs)
        require(once, "runs", "different folders", options.runs, "name each once")
        out = Path(options.out)
        fits = out.suffix == ".png" and out.parent.is_dir() and not out.is_dir()
        require(fits, "--out", "a .png file in a folder that is there", options.out)
        rule, remedy = "installed to draw", "pip install hsg[notebooks]"
        require(find_spec("matplotlib") is not None, "matplotlib", rule, "no such package", remedy)
        if measure is None:
            written = write_curves(options.runs, options.out)
        else:
            written = write_cost_curves(options.runs, options.out, measure)
        require(written is not None, "runs", f"folders that have measured {measure or 'an iteration'}", options.runs)
    except ValueError as error:
        return refuse(error)
    except OSError as error:  # a full disk, say
        return refuse(error, 1)
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
