"""What readers of the papers asked for, from a run folder alone: is the judge right, do strategies matter, do they differ?

    hsg analysis runs/NAME                          runs/NAME/analysis/report.md, and a CSV of each part
    hsg analysis runs/NAME --only judge dead        these, or a refusal

    judge        flagged turns against those that an oracle calls wasted: precision = hits / flagged, recall = hits / wasted
    strategies   evaluations under the policy's own strategies, blanked ones, those of another task    (eval.jsonl)
    diversity    mean pairwise cosine distance of the candidates, and of those that were kept          (metrics.jsonl)
    dead         share of groups whose advantages are all 0, rollouts and strategies                   (metrics.jsonl)

The oracle is the environment's own `wasted_turns` where it has one (the toy world). Else the flags are held against the
expert's path: agreement, and no bound for anything, since there is more than one way to the goal, a turn off the path may
follow its strategy, and one on it may come at the wrong time. A judgment that could not be read flags nothing. Where a number
needs what the run did not do or keep, one line says so.
Deliberately absent: playing anything, a judgment of judgments that no oracle knows of.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require, require_folder_there
from hsg.config.loading import load_config
from hsg.config.options import Config
from hsg.experiments.reading.curves import OWN_EVALUATIONS, is_number, read_evaluations, read_metrics, read_objects
from hsg.run.tracking import find_records

Row = dict[str, float]
Table = list[list[str]]
Oracle = Callable[[Mapping[str, Any]], "set[int] | None"]
"""A trajectory's line -> its wasted turns (0-based); None: it cannot say."""

COUNTS = ("judged", "flagged", "wasted", "hits")
MAX_LINES = 10  # lines of the table; iterations are joined to fit
DISTANCES = ("strategy/distance_candidates", "strategy/distance_selected")
DEAD = ("advantage/dead_groups", "advantage/strategy_dead_groups")


# ----------------------------------------------------------------------------------------------------------- judge


def judge_counts(folder: Path, oracle: Oracle) -> dict[int, Row]:
    """Iteration -> judged, flagged and wasted turns, and hits (both), over the trajectories that were judged."""
    counts: dict[int, Row] = {}
    for iteration, line in read_trajectories(folder):
        if line["judgment"] is None or (wasted := oracle(line)) is None:
            continue
        flagged = {k for k, turn in enumerate(line["turns"]) if turn["flagged"]}
        row = counts.setdefault(iteration, dict.fromkeys(COUNTS, 0.0))
        row["judged"] += len(line["turns"])
        row["flagged"] += len(flagged)
        row["wasted"] += len(wasted)
        row["hits"] += len(flagged & wasted)
    return counts


def read_trajectories(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(iteration, line) of every trajectory that the run kept. ValueError: as `read_objects`, or for a line of other kinds."""
    for iteration, path in find_records(folder).items():
        for number, line in enumerate(read_objects(path, ("kind",)), 1):
            if line["kind"] == "trajectory":
                whole = _is_trajectory(line)
                require(whole, f"line {number} of {path}", "a trajectory as a run writes it", sorted(line))
                yield iteration, line


def _is_trajectory(line: Mapping[str, Any]) -> bool:
    texts = isinstance(line.get("task_id"), str) and isinstance(line.get("strategy", 0), str | None)
    turns = line.get("turns")
    if not (texts and "judgment" in line and isinstance(turns, list)):
        return False
    return all(
        isinstance(turn, dict)
        and isinstance(turn.get("action", 0), str | None)
        and isinstance(turn.get("flagged"), bool)
        and (turn.get("reward", "") is None or is_number(turn.get("reward")))
        for turn in turns
    )


def make_oracle(config: Config) -> tuple[Oracle, str, Any]:
    """An oracle for the runs of a configuration, what it is called, and the task set to close after its use."""
    from hsg import environments

    name = config.environment.name
    try:
        task_set = environments.make(name, **config.environment.options)
    except Exception as error:  # an engine that is not here takes the other parts of the report with it otherwise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"environment.name must be one that can be made here, got {name!r}: {reason}") from error
    module = importlib.import_module(environments.module_of(name))
    tasks = {task.id: task for task in task_set.tasks(config.environment.train_split)}
    known: Any = getattr(module, "wasted_turns", None)
    paths: dict[str, list[str] | None] = {}

    def wasted(line: Mapping[str, Any]) -> set[int] | None:
        if line["task_id"] not in tasks or line["strategy"] is None:
            return None
        return set(known(tasks[line["task_id"]], line["strategy"], actions_of(line)))

    def off_path(line: Mapping[str, Any]) -> set[int] | None:
        name = line["task_id"]
        if name not in paths:
            paths[name] = task_set.expert_actions(tasks[name]) if name in tasks else None
        path = paths[name]
        return (
            None
            if path is None
            else off_path_turns(path, actions_of(line), [t["reward"] or 0.0 for t in line["turns"]])
        )

    return (wasted, "the environment's oracle", task_set) if known else (off_path, "the expert's path", task_set)


def off_path_turns(path: Sequence[str], actions: Sequence[str], rewards: Sequence[float]) -> set[int]:
    """0-based turns that neither gained anything nor are of the expert's path: each action as often as it stands there."""
    left, off = Counter(path), set()
    for turn, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
        if left[action] > 0:
            left[action] -= 1
        elif reward <= 0:
            off.add(turn)
    return off


def actions_of(line: Mapping[str, Any]) -> list[str]:
    """The actions of a trajectory; one that could not be read is an empty text, which no environment understands."""
    return [turn["action"] or "" for turn in line["turns"]]


# ------------------------------------------------------------------------------------------------------- all parts


def analyse_judge(folder: Path, config: Config) -> tuple[dict[int, Row], str]:
    """Counts of every iteration and the name of the oracle. ValueError where nothing can be counted."""
    require(config.judge.enabled, "judge", "enabled in the run", config.algorithm, "its turns were never judged")
    require(config.log.trajectories, "log.trajectories", "true in the run", False, "its judgments were not kept")
    kept = any(True for _ in read_trajectories(folder))
    require(kept, "trajectories", "those that the run was judged by", f"none in {str(folder / 'trajectories')!r}")
    oracle, name, task_set = make_oracle(config)
    try:
        counts = judge_counts(folder, oracle)
    finally:
        task_set.close()
    rule = "of an environment that knows wasted turns or expert actions"
    require(bool(counts), "judged trajectories", rule, f"none in {str(folder)!r}")
    return counts, name


def analyse_metrics(folder: Path, names: Sequence[str]) -> dict[int, Row]:
    """Iteration -> these metrics. ValueError where the run has none of them."""
    rows = {line["iteration"]: {name: line[name] for name in names if name in line} for line in read_metrics(folder)}
    kept = {iteration: row for iteration, row in rows.items() if row}
    require(bool(kept), " or ".join(names), "among the run's metrics", f"none in {str(folder / 'metrics.jsonl')!r}")
    return kept


def analyse_strategies(folder: Path) -> Table:
    """Lines of a table: score and success of the last own evaluation, and what is lost without its strategies."""
    played = (e for e in read_evaluations(folder) if e.get("score") is not None and e.get("success") is not None)
    lines = list(played)  # of the others every episode failed
    own = [e for e in lines if e["label"] in OWN_EVALUATIONS]
    others = [e for e in lines if e["label"] in ("strategy blanked", "strategies exchanged")]
    remedy = "run it with evaluation.final=true evaluation.without_strategy=true"
    at_end = bool(own) and bool(others) and own[-1]["iteration"] == others[-1]["iteration"]
    found = ", ".join(sorted({e["label"] for e in lines})) or "none"
    require(at_end, "evaluations", "with own, blanked and exchanged strategies after training",
            f"{found} in {str(folder / 'eval.jsonl')!r}", remedy)  # fmt: skip
    table = [["", "score", "success", "score lost", "success lost"]]
    for e in (own[-1], *others):
        lost = [] if e is own[-1] else [f"{own[-1][name] - e[name]:+.3f}" for name in ("score", "success")]
        table.append([e["label"], f"{e['score']:.3f}", f"{e['success']:.3f}", *(lost or ["", ""])])
    return table


def join(rows: Mapping[int, Row], num_lines: int = MAX_LINES) -> dict[str, Row]:
    """Neighbouring iterations joined into at most `num_lines` lines: counts add up, everything else is averaged."""
    places = sorted(rows)
    width = -(-len(places) // num_lines)
    joined = {}
    for begin in range(0, len(places), width):
        part = places[begin : begin + width]
        label = f"{part[0] + 1}" if len(part) == 1 else f"{part[0] + 1}-{part[-1] + 1}"
        names = dict.fromkeys(name for place in part for name in rows[place])
        held = {name: [rows[place][name] for place in part if name in rows[place]] for name in names}
        joined[label] = {n: sum(values) / (1 if n in COUNTS else len(values)) for n, values in held.items()}
    return joined


def with_shares(row: Row) -> Row:
    """The row with precision and recall, each where it is defined."""
    found = dict(row)
    if row.get("flagged"):
        found["precision"] = row["hits"] / row["flagged"]
    if row.get("wasted"):
        found["recall"] = row["hits"] / row["wasted"]
    return found


PARTS = ("judge", "strategies", "diversity", "dead")


def analyse(folder: Path, asked: Sequence[str] | None = None) -> tuple[str, dict[str, Table]]:
    """The report as Markdown, and part -> its whole table. Parts that are asked for by name must be possible (ValueError)."""
    require_folder_there(str(folder), "RUN")
    require((folder / "config.yaml").is_file(), "RUN", "a run folder with config.yaml", str(folder))
    config = load_config(folder / "config.yaml")
    sections: list[str] = []
    tables: dict[str, Table] = {}
    for part in asked or PARTS:
        try:
            title, tables[part], short = analyse_part(part, folder, config)
        except ValueError as error:
            if asked:
                raise
            sections.append(f"{part}: not computed: {error}")
        else:
            sections.append(f"{title}\n\n{markdown(short)}")
    return "\n\n".join(sections), tables


def analyse_part(part: str, folder: Path, config: Config) -> tuple[str, Table, Table]:
    """Title of a part, its whole table, and the one to read. ValueError where the run does not hold what it needs."""
    if part == "strategies":
        table = analyse_strategies(folder)
        return "Strategies taken away after training:", table, table
    if part == "judge":
        rows, oracle = analyse_judge(folder, config)
        title = f"Flagged turns against {oracle}:"
    elif part == "diversity":
        rows, title = analyse_metrics(folder, DISTANCES), "Mean pairwise cosine distance of strategies:"
    else:
        rows, title = analyse_metrics(folder, DEAD), "Share of groups whose advantages are all 0:"
    return title, iteration_table({str(place + 1): row for place, row in rows.items()}), iteration_table(join(rows))


def iteration_table(rows: Mapping[str, Row]) -> Table:
    """Heads and lines, a column for every number that some line has."""
    shown = {label: with_shares(row) for label, row in rows.items()}
    names = list(dict.fromkeys(name for row in shown.values() for name in row))
    lines = [[label, *(f"{row[n]:.4g}" if n in row else "" for n in names)] for label, row in shown.items()]
    return [["iterations", *names], *lines]


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, or a part that was asked for by name and cannot be computed."""
    parser = Parser(
        description=(__doc__ or "").splitlines()[0], epilog="example: hsg analysis runs/a --only judge dead"
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts, each of which must be possible (default: all)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: analysis in the run folder)")
    try:
        options = parser.parse_args(arguments)
        text, tables = analyse(options.run, options.only)
    except ValueError as error:
        return refuse(error)
    out = options.out or options.run / "analysis"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text(text + "\n", encoding="utf-8")
        for part, table in tables.items():
            with (out / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(table)
    except OSError as error:
        return refuse(ValueError(f"--out must be a folder that can be written, got {str(out)!r}: {error.strerror}"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
