"""Upstream's episode files (apple/ml-llarp, datasets/*.pickle): read with an unpickler that can build data and nothing else.

    file      {"all_eps": [...], "idx_to_name": {number: name}, "all_transforms": ...}
    episode   instruction, instruct_id, goal_preds, subgoals, start_preds, and numbers that point into idx_to_name:
              name_to_receptacle (n, 2) thing -> place, markers (m, 5) points to push at

A pickle may name any function of any module and have it called.  Here it gets numpy's arrays and Python's plain containers;
whoever asks for more is refused by name, before anything of it runs.

What a thing is (its category) is said by the goals alone: "EXISTS X: ball" beside "holding(056_tennis_ball_:0000)".  Things
that no goal asks for are called by a category that their id spells out, else by their id in words.

Deliberately absent: transforms (nothing here measures metres), scenes, the renderer; writing such files.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hsg.environments.langr.goals import JOINS, parse_goal, parse_predicate
from hsg.environments.langr.words import DOORS, ROOM, place_name, thing_name
from hsg.environments.langr.world import Episode

SUFFIX = ".pickle"
_KEPT = ("instruction", "instruct_id", "goal_preds", "subgoals", "start_preds", "name_to_receptacle", "markers")
_ARRAYS = {  # numpy moved its modules with version 2; a file names those of the version that wrote it
    (module, name)
    for package in ("numpy.core", "numpy._core")
    for module, name in (
        (f"{package}.multiarray", "_reconstruct"),
        (f"{package}.multiarray", "scalar"),
        (f"{package}.numeric", "_frombuffer"),
    )
} | {("numpy", "ndarray"), ("numpy", "dtype")}
_PLAIN = ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
_BROKEN = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError,
    MemoryError, OverflowError, RecursionError,
)  # fmt: skip


class _Refused(Exception):
    """What a file asked for beyond data."""


class _Reader(pickle.Unpickler):
    """An unpickler of builtin containers and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS or (module == "builtins" and name in _PLAIN):
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("a persistent id")


class EpisodeFile:
    """The episodes of one file, kept as they stand there; `episode` turns one into ours."""

    def __init__(self, path: Path) -> None:
        """ValueError in one line: no such file, a pickle that asks for more than data, other contents than upstream's."""
        self._path = path
        data = _read(path)
        try:
            self._names: dict[int, str] = {int(k): str(v) for k, v in data["idx_to_name"].items()}
            # The rest of an episode is most of it, and 150,000 of them are upstream's training set.
            self._rows = [tuple(item[key] for key in _KEPT) for item in data["all_eps"]]
            self.instruct_ids: list[str] = [str(row[1]) for row in self._rows]
        except _BROKEN as error:
            raise ValueError(_fault(path, f"{type(error).__name__} {error}")) from None
        if not self._rows:
            raise ValueError(_fault(path, "no episode"))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def kinds(self) -> set[str]:
        """The kinds of its instructions; what stands behind "_" in an instruct_id is a variant."""
        return {name.split("_")[0] for name in self.instruct_ids}

    def mentions(self) -> Iterator[tuple[str, str]]:
        """(id without its numbers, category) for every thing of which a goal and its subgoals say what it is."""
        for i, row in enumerate(self._rows):
            try:
                yield from _mentions(row[2], row[3])
            except _BROKEN as error:
                raise ValueError(_fault(self._path, f"episode {i}: {error}")) from None

    def things(self) -> set[str]:
        """The ids of all things that stand in its houses."""
        try:
            return {self._names[int(thing)] for row in self._rows for thing, _ in row[5]}
        except _BROKEN as error:
            raise ValueError(_fault(self._path, f"{type(error).__name__} {error}")) from None

    def episode(self, index: int, categories: Categories) -> Episode:
        """One episode. ValueError in one line where it is not of upstream's form."""
        instruction, instruct_id, goal, subgoals, start, placed, markers = self._rows[index]
        try:
            pairs = [(self._names[int(a)], self._names[int(b)]) for a, b in placed]
            things = tuple((thing, categories.of(thing), place_name(place)) for thing, place in pairs)
            known = frozenset(thing for thing, _, _ in things)
            doors = [place_name(self._names[int(marker[0])]) for marker in markers]
            opened = {p[1] for p in (parse_predicate(s, known) for s in start) if p[0].startswith("opened_")}
            named = {place for _, _, place in things} | set(doors) | opened
            # Upstream's house has all of these, also where nothing stands at one of them.
            places = (*(p for p in ROOM if p not in DOORS or p in named), *sorted(named - set(ROOM)))
            return Episode(
                instruction=str(instruction),
                instruct_id=str(instruct_id),
                places=places,
                things=things,
                opened=frozenset(opened),
                goal=parse_goal(goal, known),
                subgoals=tuple(
                    tuple(parse_predicate(p, known) for p in subgoal) for subgoal in subgoals or () if subgoal
                ),
            )
        except _BROKEN as error:
            raise ValueError(_fault(self._path, f"episode {index}: {error}")) from None


class Categories:
    """What things are called: learned from the goals of files.

    mentions  (name, category); the more frequent one stands
    before    has the first say
    """

    def __init__(self, mentions: Iterable[tuple[str, str]], before: Categories | None = None) -> None:
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        for name, category in mentions:
            counted[name][category] += 1
        self._known = {name: max(sorted(found), key=found.__getitem__) for name, found in counted.items()}
        if before is not None:
            self._known |= before._known
        self._spelled: dict[str, str] = {}

    def of(self, thing: str) -> str:
        """The category of an object's id, or its name where no file says."""
        name = thing_name(thing)
        if name in self._known:
            return self._known[name]
        if name not in self._spelled:
            words = f" {name} "
            fits = sorted(c for c in set(self._known.values()) if f" {c} " in words or f" {c}s " in words)
            self._spelled[name] = max(fits, key=len, default=name)
        return self._spelled[name]


class Library:
    """The files of a folder, each under its name.

    All but `train`, upstream's 150,000 episodes, are read at once, and all are called by what these say of things, so that
    names do not change when `train` is read, which then has its say on things that no other file knows.
    """

    def __init__(self, folder: Path) -> None:
        """ValueError in one line: no file there, or one that is none of upstream's."""
        self._paths = {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}
        if not self._paths:
            raise ValueError(
                f"langr.data must be a folder with episode files (*{SUFFIX}), got {str(folder)!r}; "
                "leave it out for our own houses"
            )
        self.names = tuple(self._paths)
        self._files = {name: EpisodeFile(path) for name, path in self._paths.items() if name != "train"}
        self._categories = Categories(mention for file in self._files.values() for mention in file.mentions())
        self._categories_of_train: Categories | None = None
        self._lock = threading.Lock()

    def file(self, name: str) -> EpisodeFile:
        if name not in self._files:
            with self._lock:
                if name not in self._files:
                    self._files[name] = EpisodeFile(self._paths[name])
        return self._files[name]

    def episode(self, name: str, index: int) -> Episode:
        return self.file(name).episode(index, self._categories_in(name))

    def categories(self) -> tuple[str, ...]:
        """What stands in the houses of all files but `train`."""
        files = (file for name, file in self._files.items() if name != "train")
        return tuple(sorted({self._categories.of(thing) for file in files for thing in file.things()}))

    def _categories_in(self, name: str) -> Categories:
        if name != "train":
            return self._categories
        if self._categories_of_train is None:
            self._categories_of_train = Categories(self.file(name).mentions(), before=self._categories)
        return self._categories_of_train


def _mentions(goal: Any, subgoals: Any) -> Iterator[tuple[str, str]]:
    """The categories that a goal names, in order, beside the things that its subgoals hold, in order."""
    inputs = [category for expression in _expressions(goal) for category in _inputs(expression)]
    held = [p[len("holding(") :].split(")")[0].strip() for s in subgoals or () for p in s if p.startswith("holding(")]
    held = list(dict.fromkeys(held))
    if len(inputs) == len(held):  # else a thing is only to be left alone, or all of a kind are meant
        yield from zip((thing_name(thing) for thing in held), inputs, strict=True)


def _expressions(goal: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(goal, dict) and goal.get("expr_type") in JOINS:
        yield goal
        for part in goal.get("sub_exprs") or ():
            yield from _expressions(part)


def _inputs(expression: Mapping[str, Any]) -> list[str]:
    return [item["expr_type"] for item in expression.get("inputs") or ()]


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Reader(file).load()
    except _Refused as asked:
        more = f"one that asks for {asked}; take it from its source"
        raise ValueError(f"langr.data must hold pickles of numpy arrays and plain data, got {path}, {more}") from None
    except OSError as error:
        raise ValueError(f"langr.data must hold files that can be read, got {path}: {error.strerror}") from None
    except _BROKEN as error:
        raise ValueError(_fault(path, f"{type(error).__name__}: {error}")) from None


def _fault(path: Path, found: str) -> str:
    said = " ".join(found.split())[:200]
    return f"langr.data must hold episode files as apple/ml-llarp has them, got {path}: {said}; download it again (Git LFS)"
