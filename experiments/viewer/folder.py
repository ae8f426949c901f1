"""A run folder as data for the page: one small index that is always loaded, one chunk of records per task of an iteration.

    metrics.jsonl, eval.jsonl, config.yaml   -> index: columns of numbers, evaluations, options
    trajectories/iteration_*.jsonl           -> index: per trajectory outcome, stop reason, advantage, ... as columns
                                             -> chunks (iteration, task): transcripts and tokens, as they were written

Whatever a file holds is read: half a last line, unknown fields, a null outcome, methods without strategies.  What cannot
be read is left out and counted in `notes`.  Deliberately absent: recomputing anything (tests/test_run_folder.py does).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsg.configfile import read_yaml
from hsg.records import TOKEN_FIELDS

COLUMNS = ("n", "m", "outcome", "score", "success", "stop", "turns", "flagged", "advantage")
"""What the index holds of each trajectory, as parallel lists; `stop` is an index into `stops`."""

WriteChunk = Callable[[str, Any], None]


@dataclass
class _Names:
    """Texts by number, so that a text that comes a thousand times is stored once."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: Any) -> int:
        text = text if isinstance(text, str) else ""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]


def read_run(folder: Path, prefix: str, write_chunk: WriteChunk, *, every: int = 1) -> dict[str, Any]:
    """The index of one run; its chunks go to `write_chunk(f"{prefix}-{iteration}-{task_index}", chunk)` as they are read.

    every  keep the trajectories of each `every`-th iteration, and of the last
    """
    notes: list[str] = []
    metrics = list(read_lines(folder / "metrics.jsonl", notes))
    names = sorted({name for line in metrics for name in line if name != "iteration" and "/" in name})
    index: dict[str, Any] = {
        "name": folder.resolve().name,
        "config": read_config(folder),
        "metrics": {
            "iteration": [number(line.get("iteration")) for line in metrics],
            "columns": {name: [number(line.get(name)) for line in metrics] for name in names},
        },
        "evaluations": list(read_lines(folder / "eval.jsonl", notes)),
        "groups": [],
        "trajectories": {name: [] for name in COLUMNS},
        "hasTokens": False,
        "notes": notes,
    }
    tables = {name: _Names() for name in ("tasks", "kinds", "stops", "texts")}
    paths = sorted((folder / "trajectories").glob("iteration_*.jsonl"))
    for place, path in enumerate(paths):
        if place % every == 0 or path is paths[-1]:
            _read_iteration(path, index, tables, lambda key, chunk: write_chunk(f"{prefix}-{key}", chunk))
    index |= {name: table.texts for name, table in tables.items()}
    return index


def _read_iteration(path: Path, index: dict[str, Any], tables: dict[str, _Names], write_chunk: WriteChunk) -> None:
    """Add one file's tasks to the index, and write their chunks."""
    digits = path.stem.rpartition("_")[2]
    if not digits.isdecimal():
        return
    iteration = int(digits)
    records: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in read_lines(path, index["notes"]):
        task = record.get("task_index")
        if isinstance(task, int) and isinstance(record.get("kind"), str):
            records[task][record["kind"]].append(record)
    columns = index["trajectories"]
    for task, kinds in sorted(records.items()):
        trajectories = sorted(kinds["trajectory"], key=lambda r: (_place(r, "strategy"), _place(r, "rollout")))
        head = next((r for name in ("trajectory", "candidates", "strategy") for r in kinds[name]), {})
        given = head.get("task_id")
        task_id = given if isinstance(given, str) else ""
        index["groups"].append(
            {
                "i": iteration, "p": task, "t": tables["tasks"].number(task_id),
                "k": tables["kinds"].number(head.get("task_kind") or task_kind(task_id)),
                "start": len(columns["n"]), "count": len(trajectories), **_strategies(kinds, tables["texts"]),
            }
        )  # fmt: skip
        chunk: dict[str, Any] = {"strategies": kinds["strategy"], "trajectories": trajectories}
        for record in trajectories:
            _add_row(record, columns, tables["stops"])
        for record in (*kinds["strategy"], *trajectories):
            index["hasTokens"] |= _compress(record)
        write_chunk(f"{iteration}-{task}", chunk)


def _strategies(kinds: dict[str, list[dict[str, Any]]], texts: _Names) -> dict[str, Any]:
    """Candidates (texts by number), which were kept, and what each kept strategy brought."""
    drawn = kinds["candidates"][0] if kinds["candidates"] else {}
    all_texts = drawn.get("texts") if isinstance(drawn.get("texts"), list) else []
    kept = sorted(kinds["strategy"], key=lambda r: _place(r, "strategy"))
    return {
        "candidates": [texts.number(text) for text in all_texts or ()],
        "strategies": [
            {
                "n": _place(r, "strategy"), "text": texts.number(r.get("text")), "return": number(r.get("return")),
                "advantage": number(r.get("advantage")), "candidate": number(r.get("candidate_index")),
            }
            for r in kept
        ],
    }  # fmt: skip


def _add_row(record: dict[str, Any], columns: dict[str, list[Any]], stops: _Names) -> None:
    turns = record.get("turns")
    turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    record["turns"] = turns
    advantages = [value for turn in turns if (value := number(turn.get("advantage"))) is not None]
    row = {
        "n": _place(record, "strategy"), "m": _place(record, "rollout"),
        "outcome": number(record.get("outcome")), "score": number(record.get("score")),
        "success": int(record.get("success") is True), "stop": stops.number(record.get("stop_reason")),
        "turns": len(turns), "flagged": sum(turn.get("flagged") is True for turn in turns),
        "advantage": round(sum(advantages) / len(advantages), 4) if advantages else None,
    }  # fmt: skip
    for name, value in row.items():
        columns[name].append(value)
    for name in ("task_id", "task_index", "task_kind", "kind"):  # the index has them
        record.pop(name, None)
    if isinstance(record.get("seed"), int):  # up to 2**63, which a number of the page cannot hold
        record["seed"] = str(record["seed"])


def _compress(record: dict[str, Any]) -> bool:
    """Token fields as ids, sampled places and their values, in the record and its turns. True where there were any."""
    found = False
    for owner in (record, *record.get("turns", ())):
        fields = [owner.pop(name, None) for name in TOKEN_FIELDS]
        owner.pop("values", None)  # a critic's: nothing here shows them
        if all(isinstance(values, list) for values in fields) and fields[0]:
            ids, mask, *values = fields
            at = [i for i, sampled in enumerate(mask) if sampled]
            owner["tokens"] = {"ids": ids, "at": [i + 1 for i in at]}  # mask speaks of the next id
            for name, column in zip(("logprob", "temperature", "advantage"), values, strict=True):
                owner["tokens"][name] = [
                    None if (value := number(column[i] if i < len(column) else None)) is None else round(value, 4)
                    for i in at
                ]
            found = True
    return found


def _place(record: dict[str, Any], name: str) -> int:
    value = record.get(f"{name}_index")
    return value if isinstance(value, int) else 0


def number(value: Any) -> float | int | None:
    """A finite number as it is, anything else as None."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and abs(value) < 1e300 and math.isfinite(value) else None


def task_kind(task_id: str) -> str:
    """The kind of task, for run folders that do not say: what stands before the last slash of its id."""
    return task_id.rpartition("/")[0]


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; lines that are none (half written, say) are left out and noted."""
    if not path.is_file():
        return
    lost = 0
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line, parse_constant=lambda name: None)
            except (ValueError, RecursionError):
                lost += bool(line.strip())
                continue
            if isinstance(record, dict):
                yield record
            else:
                lost += 1
    if lost:
        notes.append(f"{path.name}: {lost} line{'s' if lost > 1 else ''} could not be read")


def read_config(folder: Path) -> dict[str, Any]:
    """The run's options; none where config.yaml is missing or broken."""
    try:
        config = read_yaml(folder / "config.yaml", "config.yaml")
        return json.loads(json.dumps(config))  # YAML knows sets, dates and circles, the page does not
    except (ValueError, TypeError, RecursionError):
        return {}
