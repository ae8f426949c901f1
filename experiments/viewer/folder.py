"""A run folder as data for the page: one small index that is always loaded, one chunk of records per task of an iteration.

    metrics.jsonl, eval.jsonl, config.yaml   -> index: columns of numbers, evaluations, options
    trajectories/iteration_*.jsonl           -> index: per trajectory outcome, stop reason, advantage, ... as columns
                                             -> chunks (iteration, task): transcripts and tokens, as they were written

Whatever a file holds is read: half a last line, unknown fields, a null outcome, methods without strategies.  What cannot
be read, and what is no file of a run, is left out and told in `notes`.  Deliberately absent: recomputing anything
(tests/run/test_run_folder.py does).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsg.config.loading import read_yaml
from hsg.run.records import TOKEN_FIELDS
from hsg.run.tracking import RECORD

COLUMNS = ("n", "m", "outcome", "score", "success", "stop", "turns", "flagged", "advantage")
"""What the index holds of each trajectory, as parallel lists; `stop` is an index into `stops`."""

KINDS = ("candidates", "strategy", "trajectory")
MOST = 2**53  # of an index: the page's numbers are exact below
NAMED = 5  # strange files that a note names

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
        "config": read_config(folder, notes),
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
    paths = find_records(folder / "trajectories", notes)
    for place, iteration in enumerate(paths):
        if place % every == 0 or place == len(paths) - 1:
            chunk_of = lambda key, chunk: write_chunk(f"{prefix}-{key}", chunk)  # noqa: E731
            _read_iteration(iteration, paths[iteration], index, tables, chunk_of)
    index |= {name: table.texts for name, table in tables.items()}
    return index


def find_records(folder: Path, notes: list[str]) -> dict[int, Path]:
    """The files of records by their iteration, in its order; others beside them (a copy, say) are noted and not read."""
    try:
        paths = sorted(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        notes.append(f"trajectories could not be read: {error.strerror}")
        return {}
    found: dict[int, Path] = {}
    strange: list[str] = []
    for path in paths:
        match = RECORD.fullmatch(path.name)
        iteration = int(match[1]) if match and path.is_file() else MOST
        if iteration < MOST and path.name == f"iteration_{iteration:06d}.jsonl":
            found[iteration] = path
        elif not (RECORD.fullmatch(f"{path.stem}.jsonl") and path.suffix == ".tmp"):  # that one is being written
            strange.append(path.name)
    if strange:
        names = ", ".join(strange[:NAMED]) + (", ..." if len(strange) > NAMED else "")
        word = "file is no record" if len(strange) == 1 else "files are no records"
        notes.append(f"trajectories: {len(strange)} {word} (iteration_000000.jsonl) and not read: {names}")
    return dict(sorted(found.items()))


def _read_iteration(
    iteration: int, path: Path, index: dict[str, Any], tables: dict[str, _Names], write_chunk: WriteChunk
) -> None:
    """Add one file's tasks to the index, and write their chunks."""
    lost: Counter[str] = Counter()
    records: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in read_lines(path, index["notes"]):
        task, kind = record.get("task_index"), record.get("kind")
        if type(task) is int and abs(task) < MOST and kind in KINDS:
            records[task][kind].append(record)
        else:
            lost["records without a task_index or of an unknown kind"] += 1
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
        for record in (*kinds["strategy"], *trajectories):
            _keep_turns(record, lost)
        index["groups"][-1]["learns"] = _learns(
            [*kinds["strategy"], *(turn for r in trajectories for turn in r["turns"])]
        )
        for record in trajectories:
            _add_row(record, columns, tables["stops"])
        for record in (*kinds["strategy"], *trajectories):
            index["hasTokens"] |= _compress(record, lost)
        write_chunk(f"{iteration}-{task}", chunk)
    index["notes"] += [f"{path.name}: {what}, left out: {number}" for what, number in lost.items()]


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


def _learns(owners: list[dict[str, Any]]) -> bool | None:
    """Whether anything is learned from a group: equal outcomes may still have flagged turns, and unequal ones no say.

    None: no advantage is told.
    """
    advantages = [value for owner in owners if (value := number(owner.get("advantage"))) is not None]
    return any(value != 0 for value in advantages) if advantages else None


def _keep_turns(record: dict[str, Any], lost: Counter[str]) -> None:
    """Leave the turns that are objects, in a list: from here on nothing asks again."""
    given = record.get("turns")
    listed = given if isinstance(given, list) else []
    record["turns"] = [turn for turn in listed if isinstance(turn, dict)]
    strange = len(listed) - len(record["turns"]) + (given is not None and not isinstance(given, list))
    if strange:
        lost["turns that are no objects"] += strange


def _add_row(record: dict[str, Any], columns: dict[str, list[Any]], stops: _Names) -> None:
    turns = record["turns"]
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


def _compress(record: dict[str, Any], lost: Counter[str]) -> bool:
    """Token fields as ids, sampled places and their values, in the record and its turns. True where there were any."""
    found = False
    for owner in (record, *record["turns"]):
        if "tokens" in owner:  # the page's own name: what a file has under it is something else
            del owner["tokens"]
            lost["fields called tokens"] += 1
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
        elif any(values not in (None, []) for values in fields):
            lost["token fields that are not all lists"] += 1
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
        if path.exists():
            notes.append(f"{path.name} could not be read: it is no file")
        return
    lost = 0
    try:
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
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error.strerror}")
    if lost:
        notes.append(f"{path.name}: {lost} line{'s' if lost > 1 else ''} could not be read")


def read_config(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The run's options; none where config.yaml is missing, and where it is broken, which is noted."""
    path = folder / "config.yaml"
    try:
        config = read_yaml(path, "config.yaml") if path.exists() else {}
        return json.loads(json.dumps(config))  # YAML knows sets, dates and circles, the page does not
    except (ValueError, TypeError, RecursionError) as error:
        notes.append(f"options could not be read: {' '.join(str(error).split())}")
        return {}
