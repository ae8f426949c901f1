"""Many samples of fixed tasks: kept line by line, so that a stopped evaluation goes on, and summed up from the lines.

    first line      {"settings": ...}                       what was asked; other settings are refused
    every other     {"task_id", "kind", "sample", "outcome", "score", "success", "turns", "stop_reason", "reached",
                     "tokens", "strategy_tokens", "surprise", "strategy_surprise"}

Deliberately absent: anything that plays.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.files import write_whole
from hsg.intervals import paired_test, wilson_interval
from hsg.measures import outcome_of, surprise
from hsg.pass_at_k import distinct_outcomes, pass_at_k
from hsg.types import Trajectory

Row = dict[str, Any]
FIELDS = (
    "task_id", "kind", "sample", "outcome", "score", "success", "turns", "stop_reason", "reached", "tokens",
    "strategy_tokens", "surprise", "strategy_surprise",
)  # fmt: skip


def row_of(trajectory: Trajectory, sample: int) -> Row:
    """What is kept of one episode; `outcome` None where the environment broke.

    reached   the end that it came to (`hsg.measures.outcome_of`), for counting different ones
    surprise  sum of -log p (nats) over its tokens, those of strategies in turns apart from all others
    """
    strategy, action = surprise(trajectory)
    return {
        "task_id": trajectory.task.id, "kind": trajectory.task.kind, "sample": sample,
        "outcome": trajectory.outcome if trajectory.valid else None, "score": trajectory.score,
        "success": trajectory.success, "turns": len(trajectory.turns), "stop_reason": trajectory.stop_reason.value,
        "reached": str(outcome_of(trajectory)), "tokens": len(strategy) + len(action), "strategy_tokens": len(strategy),
        "surprise": sum(action), "strategy_surprise": sum(strategy),
    }  # fmt: skip


class SampleFile:
    """The lines of one evaluation. Opening it reads what is there; half a last line is dropped.

    ValueError where the file belongs to other settings, or is no such file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[Row] = []
        head = json.dumps({"settings": settings}, sort_keys=True)
        if path.is_file() and path.stat().st_size:
            first, *rest = path.read_bytes().split(b"\n")
            if first.rstrip(b"\r") != head.encode():
                raise ValueError(
                    f"--out must be new or hold samples of the same settings, got {str(path)!r}; choose another file"
                )
            for number, line in enumerate(rest[:-1], 2):  # behind the last line end stands half a line, or nothing
                self.rows.append(_read_row(line, f"line {number} of {str(path)!r}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(line + "\n" for line in (head, *map(json.dumps, self.rows))))

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; they are on disk when this returns."""
        self.rows += rows
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def done(self) -> set[tuple[str, int]]:
        """(task, sample) pairs that need not be played again; broken ones are."""
        return {(row["task_id"], row["sample"]) for row in self.rows if row["outcome"] is not None}


def _read_row(line: bytes, where: str) -> Row:
    """A row from its line. ValueError for a line that `row_of` has not made."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= set(FIELDS):
        raise ValueError(
            f"--out must hold whole samples, got another thing in {where}; delete that line, and its sample is played again"
        )
    return row


def summarise(
    rows: Sequence[Row], ks: Sequence[int], groups: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Success, score, turns and pass@k over tasks: overall, by kind of task and by group of kinds.

    groups  name -> kinds. A task counts as often as any other, however many of its samples broke; a task all of whose
            samples broke is left out. A broken sample that was played again counts once.
    """
    latest = {(row["task_id"], row["sample"]): row for row in rows}
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in latest.values():
        by_task[row["task_id"]].append(row)
    tasks = [_task(task_id, samples) for task_id, samples in by_task.items()]
    whole = [task for task in tasks if task["num_samples"]]
    kinds = sorted({task["kind"] for task in whole})
    named = {name: [task for task in whole if task["kind"] in members] for name, members in (groups or {}).items()}
    counted = [row for row in latest.values() if row["outcome"] is not None]
    return {
        **_measures(whole, ks),
        **_exploration(counted),
        "num_failed": len(latest) - len(counted),
        "success_spread": _spread(counted),
        "by_kind": {kind: _measures([task for task in whole if task["kind"] == kind], ks) for kind in kinds},
        "by_group": {name: _measures(members, ks) for name, members in named.items() if members},
        "tasks": tasks,
    }


def _task(task_id: str, samples: Sequence[Row]) -> dict[str, Any]:
    counted = [row for row in samples if row["outcome"] is not None]
    task = {"task_id": task_id, "kind": samples[0]["kind"], "num_samples": len(counted)}
    task["num_solved"] = sum(row["success"] for row in counted)
    for name in ("success", "score", "turns"):
        task[name] = statistics.fmean(row[name] for row in counted) if counted else None
    return task


def _measures(tasks: Sequence[dict[str, Any]], ks: Sequence[int]) -> dict[str, Any]:
    measures: dict[str, Any] = {"num_tasks": len(tasks)}
    if not tasks:
        return measures
    for name in ("success", "score", "turns"):
        measures[name] = statistics.fmean(task[name] for task in tasks)
    # Samples of one task are not independent of each other, so that the number of tasks is what counts.
    measures["success_interval"] = list(wilson_interval(measures["success"], len(tasks)))
    for k in ks:
        enough = [pass_at_k(t["num_samples"], t["num_solved"], k) for t in tasks if t["num_samples"] >= k]
        if enough:
            measures.setdefault("pass_at_k", {})[str(k)] = statistics.fmean(enough)
    return measures


def _exploration(rows: Sequence[Row]) -> dict[str, float]:
    """SGE's own measures (arXiv 2603.02045); what nothing was sampled for is left out."""
    by_task: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_task[row["task_id"]].append(row["reached"])
    total = {
        name: sum(row[name] for row in rows)
        for name in ("turns", "tokens", "strategy_tokens", "surprise", "strategy_surprise")
    }
    parts = {
        "tokens_per_turn": (total["tokens"], total["turns"]),
        "strategy_tokens_per_turn": (total["strategy_tokens"], total["turns"]),
        "strategy_entropy": (total["strategy_surprise"], total["strategy_tokens"]),
        "action_entropy": (total["surprise"], total["tokens"] - total["strategy_tokens"]),
    }
    found = {name: value / count for name, (value, count) in parts.items() if count}
    return found | ({"distinct_outcomes": distinct_outcomes(list(by_task.values()))} if by_task else {})


def _spread(rows: Sequence[Row]) -> float | None:
    """Sample standard deviation of the samples' mean success: how far one evaluation lies from the next."""
    rounds: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        rounds[row["sample"]].append(row["success"])
    return statistics.stdev(map(statistics.fmean, rounds.values())) if len(rounds) > 1 else None


def unsolved(counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Ids of the tasks that no sample solved (the hard set of SGE), from id -> (whole samples, solved ones).

    A task whose samples all broke is not among them.
    """
    return [task_id for task_id, (num_samples, num_solved) in counts.items() if num_samples and not num_solved]


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Paired comparison of two summaries on the tasks that both have: mean differences (one - other) and p-values.

    ValueError where they share no task.
    """
    theirs = {task["task_id"]: task for task in other["tasks"] if task["num_samples"]}
    pairs = [
        (task, theirs[task["task_id"]]) for task in one["tasks"] if task["num_samples"] and task["task_id"] in theirs
    ]
    if not pairs:
        raise ValueError("--compare must have played tasks of this split, got none; evaluate it on the same split")
    result: dict[str, Any] = {"num_tasks": len(pairs)}
    for name in ("success", "score"):
        differences = [a[name] - b[name] for a, b in pairs]
        result[name] = {
            "difference": statistics.fmean(differences), "p_value": paired_test(differences),
            "better": sum(d > 0 for d in differences), "worse": sum(d < 0 for d in differences),
        }  # fmt: skip
    return result
