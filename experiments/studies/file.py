"""What a study file says: the cells of a table, each a few options away from a base config.

    one size       base: a config    set: options of every cell    cells: name -> options that differ
    several sizes  no base: it, `set`, `columns` and the like come from experiments/scales/SCALE.yaml, and what the study
                   has otherwise at one of them stands under `scales: {SCALE: ...}`; one with a base takes nothing of that file

Deliberately absent: running anything (study.py), loops over values (a cell that is worth a row is worth a line).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsg.config.checks import require
from hsg.config.loading import load_config, read_yaml, to_dict
from hsg.experiments.reading.curves import REACHED
from hsg.run.files import folder_digest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ACCELERATE = Path(__file__).resolve().parents[1] / "accelerate"
SCALES = Path(__file__).resolve().parents[1] / "scales"
ROOTS = ("measures", "by_kind", "metrics", "evaluations", "curve", "cpu_seconds")  # of what a cell's result holds
VERSION = 2  # raise it when a cell's result means something else


@dataclass(frozen=True)
class Study:
    """A study file. `samples` of every held-out task are drawn after training, unless a cell says otherwise.

    columns  name of a column -> path of a number in a cell's result, for example measures.pass_at_k.0
    hard     the cell (before training) that decides which tasks are hard: those that none of its samples solves
    paper    cell -> what the paper reports for it, set beside ours; `paper_of`: of which benchmark and measure that is
    launch   the accelerate file of the commands that --dry-run prints
    needs    option of the environment, as coding.data -> the data that it has to name and that this project does not ship
    """

    name: str
    title: str
    base: str
    cells: dict[str, dict[str, Any]]
    set: dict[str, Any] = field(default_factory=dict)
    split: str = "dev"
    samples: int = 16
    columns: dict[str, str] = field(default_factory=dict)
    hard: str | None = None
    paper: dict[str, str] = field(default_factory=dict)
    paper_of: str = "paper"
    curve: str = "reward/success"
    launch: str | None = None
    needs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a study: overrides of the base config, the seed among them, and how many samples of a split judge it."""

    name: str
    seed: int
    base: str
    overrides: tuple[str, ...]
    split: str
    samples: int
    key: str


def read_study(path: Path, scale: str | None = None) -> Study:
    """The study of a file, one of several sizes at `scale` (None: toy). ValueError in one line where it is no study."""
    given = read_yaml(path, "the study")
    name = path.stem
    if "base" not in given:
        scale = "toy" if scale is None else scale
        name, given = f"{name}-{scale}", _at_scale(path, given, scale)
    else:
        require(scale is None, "--scale", "left out for a study that has a base", scale, f"see {str(path)!r}")
    known = {f.name for f in dataclasses.fields(Study)} - {"name"}
    missing, unknown = {"title", "base", "cells"} - set(given), set(given) - known
    if missing or unknown:
        word = f"without {sorted(missing)[0]}" if missing else f"with the unknown key {sorted(unknown)[0]}"
        near = difflib.get_close_matches(sorted(unknown)[0], known, 1) if unknown and not missing else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"the study must have the keys title, base, cells, got {str(path)!r} {word}{hint}")
    if not isinstance(given["cells"], dict) or not all(isinstance(c, dict | None) for c in given["cells"].values()):
        raise ValueError(f"cells must be a mapping of names to options, got {given['cells']!r:.80} in {str(path)!r}")
    for key, kind, rule in (
        ("title", str, "a text"), ("base", str, "the name of a file of experiments/configs"), ("split", str, "a text"),
        ("curve", str, "a text"), ("set", dict, "a mapping of options"), ("columns", dict, "a mapping of names to paths"),
        ("paper", dict, "a mapping of cells to texts"), ("hard", str | None, "the name of a cell"),
        ("paper_of", str, "a text"), ("launch", str | None, "a file of experiments/accelerate"),
        ("needs", dict, "a mapping of options to texts"),
    ):  # fmt: skip
        require(key not in given or isinstance(given[key], kind), key, f"{rule} in {str(path)!r}", given.get(key))
    where = f"in {str(path)!r}"
    cells, columns, paper = given["cells"], given.get("columns", {}), given.get("paper", {})
    require(bool(cells), "cells", f"a mapping of at least one cell {where}", cells)
    in_table = {"cells": cells, "columns": columns, "paper": paper.values(), "paper_of": [given.get("paper_of", "")]}
    for key, texts in in_table.items():
        for text in texts:
            # YAML reads 0.1 and 0.10, or on and yes, as one; the others would break the table's lines.
            plain = isinstance(text, str) and not re.search(r"[|\n`]|<!--", text)
            require(
                plain, key, f"plain texts without | and ` {where}", text, "quote what is a number or a word like on"
            )
    require(given.get("hard") in (None, *cells), "hard", f"a cell {where}", given.get("hard"))
    strangers = sorted(set(map(str, paper)) - set(cells))
    require(not strangers, "paper", f"figures of cells {where}", strangers, f"they are {', '.join(cells)}")
    require(given.get("curve") in (None, *REACHED), "curve", f"one of {', '.join(REACHED)} {where}", given.get("curve"))
    launch = given.get("launch")
    require(launch is None or (ACCELERATE / launch).is_file(), "launch", "a file of experiments/accelerate", launch)
    for found in columns.values():
        known_root = isinstance(found, str) and found.split(".")[0] in ROOTS
        require(known_root, "columns", f"paths that begin with {', '.join(ROOTS)} {where}", found)
    return Study(name=name, **{**given, "cells": {name: options or {} for name, options in cells.items()}})


def _at_scale(path: Path, given: dict[str, Any], scale: str) -> dict[str, Any]:
    """What a study of several sizes says at one of them: the scale's file, the study, what it has otherwise there."""
    known = sorted(file.stem for file in SCALES.glob("*.yaml"))
    require(scale in known, "--scale", f"one of {', '.join(known)}", scale)
    own = given.pop("scales", {})
    mappings = isinstance(own, dict) and all(isinstance(layer, dict) for layer in own.values())
    require(
        mappings and set(own) <= set(known), "scales", f"a mapping of {', '.join(known)} to keys in {str(path)!r}", own
    )
    here = own.get(scale, {})
    layers = [given, here] if "base" in here else [read_yaml(SCALES / f"{scale}.yaml", "the scale"), given, here]
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = key in ("set", "cells") and isinstance(value, dict) and isinstance(merged.get(key, {}), dict)
            merged[key] = {**merged.get(key, {}), **value} if both else value
    return merged


def make_cells(study: Study, seeds: Sequence[int], extra: Sequence[str] = ()) -> list[Cell]:
    """Every cell and seed; what is never trained does not depend on the seed and stands once."""
    cells: dict[tuple[str, str], Cell] = {}
    for name, changed in study.cells.items():
        options = {**study.set, **changed}
        samples = options.pop("samples", study.samples)
        whole = isinstance(samples, int) and not isinstance(samples, bool) and samples >= 1
        require(whole, f"samples of cell {name}", "a whole number >= 1", samples)
        try:
            plain = [*as_options(options), *extra]
        except (TypeError, ValueError):  # ValueError: a value that holds itself
            raise ValueError(f"options of cell {name} must be plain values, got {options!r:.200}") from None
        own = [item for item in plain if item.split("=")[0].strip().startswith(("seed", "run."))]
        require(not own, f"options of cell {name}", "none that the study sets itself", own[:1], "--seeds sets the seed")
        trained = load_config(CONFIGS / study.base, plain).train.iterations > 0
        for seed in seeds if trained else seeds[:1]:
            overrides = (*plain, f"seed={seed if trained else 0}")
            config = to_dict(load_config(CONFIGS / study.base, overrides))
            for section in ("run", "log"):
                del config[section]
            # Of files and folders what they hold counts, and not their names.
            for section, option in (("tasks", "file"), ("model", "path"), ("model", "encoder"), ("judge", "model")):
                config[section][option] = contents(config[section][option])
            key = _digest([VERSION, config, study.split, samples])
            cells.setdefault((name, key), Cell(name, seed, study.base, overrides, study.split, samples, key))
    return list(cells.values())


@functools.cache  # the cells of a study name the same ones
def contents(name: str | None) -> str | None:
    """The text of that file, or a digest of that folder; the name itself where there is neither, as of a model on the hub."""
    path = Path(name or "")
    if name and path.is_dir():
        return folder_digest(path)
    return path.read_text(encoding="utf-8", errors="replace") if name and path.is_file() else name


def as_options(options: Mapping[str, Any]) -> list[str]:
    """KEY=VALUE of each option, as `--set` takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in options.items()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
