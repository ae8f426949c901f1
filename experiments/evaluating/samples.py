"""Many samples of fixed tasks: kept line by line, so that a stopped evaluation goes on, and summed up from the lines.

    first line      {"settings": ...}                       what was asked; other settings are refused
    every other     {"task_id", "kind", "sample", "outcome", "score", "success", "turns", "stop_reason", "reached",
                     "tokens", "strategy_tokens", "surprise", "strategy_surprise"}

Deliberately absent: anything that plays, comparisons (comparison.py).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.measure.intervals import wilson_interval
from hsg.measure.measures import outcome_of, surprise
from hsg.measure.pass_at_k import distinct_outcomes, pass_at_k
from hsg.run.files import write_whole
from hsg.types import Trajectory

Row = dict[str, Any]
LIMIT = 1e15  # beyond what any evaluation counts, and a float still adds it up


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """A whole number from 0: True is none, and no sum of them overflows."""
    return type(value) is int and 0 <= value <= LIMIT


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LIMIT  # not NaN


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


FIELDS: dict[str, Callable[[Any], bool]] = {
    "task_id": is_text, "kind": is_text, "sample": is_count, "outcome": lambda v: v is None or is_number(v),
    "score": is_share, "success": lambda v: isinstance(v, bool), "turns": is_count, "stop_reason": is_text,
    "reached": is_text, "tokens": is_count, "strategy_tokens": is_count, "surprise": is_number,
    "strategy_surprise": is_number,
}  # fmt: skip
"""What a line holds, and the rule of each value."""


def row_of(trajectory: Trajectory, sample: int) -> Row:
    """What is kept of one episode; `outcome` None where the environment broke.

    reached   the end that it came to (`hsg.measure.measures.outcome_of`), for counting different ones
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


def sample_path(out: Path) -> Path:
    """The samples of a result lie beside it under its whole name: q-1.5b and q-1.7b are two evaluations."""
    return out.with_name(f"{out.name.removesuffix('.json')}.samples.jsonl")


class SampleFile:
    """The lines of one evaluation. Opening it reads what is there; half a last line is dropped.

    ValueError where the file belongs to other settings, is no such file, or cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[Row] = []
        head = json.dumps({"settings": settings}, sort_keys=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                first, *rest = path.read_bytes().split(b"\n")
                if first.rstrip(b"\r") != head.encode():
                    raise ValueError(
                        f"--out must be new or hold samples of the same settings, got {str(path)!r}; choose another file"
                    )
                for number, line in enumerate(rest[:-1], 2):  # behind the last line end stands half a line, or nothing
                    self.rows.append(_read_row(line, f"line {number} of {str(path)!r}"))
            write_whole(path, "".join(line + "\n" for line in (head, *map(json.dumps, self.rows))))
        except OSError as error:
            reason = f"got {str(path)!r} for its samples: {error.strerror or error}"
            raise ValueError(f"--out must be where files can be written, {reason}; choose another file") from None

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; they are on disk when this returns. OSError names the file."""
        self.rows += rows
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:  # that of a full disk says nothing of where
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def done(self) -> set[tuple[str, int]]:
        """(task, sample) pairs that need not be played again; broken ones are."""
        return {(row["task_id"], row["sample"]) for row in self.rows if row["outcome"] is not None}


def _read_row(line: bytes, where: str) -> Row:
    """A row from its line. ValueError for a line that `row_of` has not made."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    got = "another thing"
    if isinstance(row, dict) and row.keys() >= FIELDS.keys():
        wrong = [name for name, holds in FIELDS.items() if not holds(row[name])]
        if not wrong:
            return row
        got = f"{wrong[0]} {row[wrong[0]]!r:.100}"
    raise ValueError(
        f"--out must hold whole samples, got {got} in {where}; delete that line, and its sample is played again"
    )


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
