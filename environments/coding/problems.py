"""Problems from JSON lines: one row -> one `Problem`, its asserts -> calls and the answers expected of them.

    assert candidate(nums = [3,3], target = 6) == [0,1]        -> Case("nums=[3, 3], target=6", [0, 1])
    assert is_same_list(candidate(head=...), list_node([1,2])) -> Case("head=...", {"list_node": [1, 2]})

Fields of a row, as newfacade/LeetCodeDataset names them (https://huggingface.co/datasets/newfacade/LeetCodeDataset):
    task_id, entry_point, test    required; `test` defines check(candidate), made of the asserts above
    problem_description           or meta.question_title or query: what the agent reads, public examples included
    starter_code, difficulty      or meta.lang_code, meta.difficulty
    prompt                        imports and helpers that are run before a solution
    completion, response          a canonical solution; an answer of words and code, for demonstrations
    split, strategy, attempt      ours: the split where a file holds several; a strategy in words; a broken first attempt

A public example is a test whose inputs stand in the description ("Input: ... Output: ...").  Of LeetCodeDataset's training
rows nine in ten have no other tests than these.  Asserts are read, never run.  Deliberately absent: asserts of other forms
(refused with the row's name), tolerances (the data set compares exactly).
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hsg.environments.coding.driver import encode

DIFFICULTIES = ("Easy", "Medium", "Hard")
SPLITS = ("train", "dev", "test")
DEV_SHARE = 10  # without a dev file every so manieth training problem, by a checksum of its id, is dev
PACKAGED = Path(__file__).parent / "problems.jsonl"

_EXAMPLE = re.compile(
    r"Input:\s*(.*?)\s*Output:\s*(.*?)\s*(?:Explanation|Example|Constraints|Note|\n\s*\n|$)", re.DOTALL
)
_CONSTANTS = {"null": None, "true": True, "false": False, "inf": float("inf"), "nan": float("nan")}
_NODES = {"is_same_list": "list_node", "is_same_tree": "tree_node"}


@dataclass(frozen=True)
class Case:
    """One test: the source of the arguments, the expected answer as `driver.encode` writes it."""

    arguments: str
    expected: Any
    public: bool = False


@dataclass(frozen=True)
class Problem:
    """One row. Its tests are read when they are first needed: most rows of a large file never are."""

    id: str
    split: str
    row: Mapping[str, Any]

    @cached_property
    def description(self) -> str:
        return str(self._find("problem_description", "question_title") or self.row.get("query") or "").strip()

    @cached_property
    def starter_code(self) -> str:
        return str(self._find("starter_code", "lang_code") or "").strip()

    @property
    def difficulty(self) -> str:
        """Easy, Medium, Hard, or "" where the row does not say."""
        return str(self._find("difficulty", "difficulty") or "")

    @property
    def prelude(self) -> str:
        return str(self.row.get("prompt") or "")

    @property
    def entry_point(self) -> str:
        return str(self.row["entry_point"])

    @property
    def solution(self) -> str | None:
        return self.row.get("completion") or None

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """All tests, in the order of the row."""
        public = {inputs for inputs in map(_inputs, _EXAMPLE.findall(self.description)) if inputs}
        try:
            return tuple(_read_cases(str(self.row["test"]), public))
        except (ValueError, SyntaxError, RecursionError) as error:
            raise ValueError(
                f"coding.data must hold asserts `candidate(...) == value`, got problem {self.id!r}: {error}; leave it out"
            ) from error

    def _find(self, name: str, name_in_meta: str) -> Any:
        return self.row.get(name) or (self.row.get("meta") or {}).get(name_in_meta)


def read_problems(data: str | None) -> tuple[dict[str, list[Problem]], list[Path]]:
    """Problems by split, and the files they came from. See `make_task_set` for `data`."""
    path = PACKAGED if data is None else Path(data).expanduser()
    if path.is_dir():
        files = {split: file for split in SPLITS for file in _candidates(path, split) if file.is_file()}
        if "train" not in files:
            raise ValueError(
                f"coding.data must hold train.jsonl or train.jsonl.gz, got {str(path)!r}; see its documentation"
            )
    elif path.is_file():
        files = {"": path}
    else:
        raise ValueError(
            f"coding.data must be a file of JSON lines or a folder of them, got {str(path)!r}; no such path"
        )
    problems: dict[str, list[Problem]] = {}
    seen: set[str] = set()
    for split, file in files.items():
        for number, row in _rows(file):
            problem = _problem(row, split, f"{file.name}:{number}")
            if problem.id in seen:
                raise ValueError(f"coding.data must name each problem once, got {problem.id!r} again; drop one of them")
            seen.add(problem.id)
            problems.setdefault(problem.split, []).append(problem)
    if "dev" not in problems and "train" in problems:
        train = problems["train"]
        held_out = [p for p in train if zlib.crc32(p.id.encode()) % DEV_SHARE == 0]
        if held_out and len(held_out) < len(train):
            problems["dev"] = [Problem(p.id, "dev", p.row) for p in held_out]
            problems["train"] = [p for p in train if zlib.crc32(p.id.encode()) % DEV_SHARE != 0]
    return {split: problems[split] for split in SPLITS if split in problems}, list(files.values())


def _candidates(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.jsonl.gz", folder / f"{split}.jsonl"


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"coding.data must be JSON lines, got {file.name}:{number}: {error}") from error


def _problem(row: Any, split: str, place: str) -> Problem:
    missing = [
        name
        for name in ("task_id", "entry_point", "test")
        if not isinstance(row, dict) or not isinstance(row.get(name), str) or not row[name]
    ]
    if missing:
        raise ValueError(f"coding.data must give every row a {missing[0]}, got none at {place}; see problems.py")
    split = split or row.get("split") or "train"
    if split not in SPLITS:
        raise ValueError(f"coding.data must use the splits {', '.join(SPLITS)}, got {split!r} at {place}; rename it")
    return Problem(row["task_id"], split, row)


def _read_cases(test: str, public: set[str]) -> Iterator[Case]:
    body = [node for node in ast.parse(test).body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(body) != 1 or not body[0].body:
        raise ValueError("`test` defines no check(candidate)")
    for statement in body[0].body:
        source = ast.unparse(statement)
        call, expected = _split_assert(statement)
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "candidate"):
            raise ValueError(f"an assert of another form: {source:.80}")
        arguments = ", ".join([*map(ast.unparse, call.args), *map(ast.unparse, call.keywords)])
        yield Case(arguments, expected, _values(call) in public)


def _split_assert(statement: ast.stmt) -> tuple[ast.expr | None, Any]:
    """The call of the candidate and the encoded answer expected of it; (None, None) for another form."""
    test = statement.test if isinstance(statement, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
        return test.left, encode(_literal(test.comparators[0]))
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 2:
        kind = _NODES.get(test.func.id)
        node = test.args[1]
        if kind and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == kind:
            values = _literal(node)
            if kind == "tree_node":
                values = _used_values(values)
            return test.args[0], {kind: encode(values)} if values else None
    return None, None


def _used_values(values: list[Any]) -> list[Any]:
    """A tree's values level by level as `driver.encode` writes them: none past the last open place, no None at the end."""
    used: list[Any] = []
    places = 1
    for value in values:
        if not places:
            break
        places += -1 if value is None else 1
        used.append(value)
    while used and used[-1] is None:
        used.pop()
    return used


class _Named(ast.NodeTransformer):
    """Replaces null, true, false, inf and nan by what they stand for."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        if node.id not in _CONSTANTS:
            raise ValueError(f"{node.id} is no constant")
        return ast.Constant(_CONSTANTS[node.id])


def _literal(node: ast.expr) -> Any:
    """The value of a literal; of tree_node([...]) and list_node([...]) the list."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NODES.values() and node.args:
        node = node.args[0]
    return ast.literal_eval(_Named().visit(node))


def _values(call: ast.Call) -> str:
    """The inputs of a call without their names: the descriptions name some of them otherwise."""
    return repr([_literal(node) for node in [*call.args, *(keyword.value for keyword in call.keywords)]])


def _inputs(example: tuple[str, str]) -> str:
    """The inputs of an example in a description, as `_values` writes them; "" where they cannot be read."""
    try:
        call = ast.parse(f"candidate({example[0]})", mode="eval").body
        return _values(call) if isinstance(call, ast.Call) else ""
    except (ValueError, SyntaxError, RecursionError):
        return ""
