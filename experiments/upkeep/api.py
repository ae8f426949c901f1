"""docs/api.md, every name of `import hsg`, from docstrings and signatures: `make docs`

    def f(x: Tensor, k: int = 1) -> Tensor:     ###  `f`   (its file)
        \"\"\"What it does.                        f(x: Tensor, k: int = 1) -> Tensor
                                                What it does.
        x (B, T) -> (B,)  ...                   x (B, T) -> (B,)  ...
        Why it is so.\"\"\"

Of a docstring the first paragraph is taken, and each one with shapes or with a table of arguments.  Signatures are the
source's own words.  Deliberately absent: names that are not on the face, a second place where one is described.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import hsg

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "api.md"
WIDTH = 120
MAX_FIELDS = 16  # a record with more of them is the configuration, which has a page of its own
HIDDEN = ("state_dict", "load_state_dict")  # what checkpoints alone call
SHAPE = re.compile(r"\((?:\.\.\.|[A-Z])(?:[-+*]\w)?,(?: ?(?:[A-Z]\b|\.\.\.)(?:[-+*]\w)?,?)*\)")
TABLE = re.compile(r"^\w+  +\S", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        "# What `import hsg` gives",
        "",
        *_wrapped(
            "Written by `make docs` from signatures and docstrings; a test keeps it true. Every name is imported as "
            "`from hsg import NAME`, and loaded only then. Axis letters: P tasks, C candidates, N strategies, M rollouts of "
            "each, G members of a group, K turns, B rows, T tokens, V vocabulary, D embedding. What functions "
            "pass to each other are the [records](#records); those that are not on this page stand in "
            "[hsg/types.py](../hsg/types.py)."
        ),
        "",
    ]
    for title, homes in hsg._GROUPS.items():
        names = [name for told in homes.values() for name in told.split()]
        listed = ", ".join(f"`{name}`" for name in names)
        lines += _wrapped(f"- [{title}](#{title.lower().replace(' ', '-')}): {listed}", indent="  ")
    for title, homes in hsg._GROUPS.items():
        lines += ["", f"## {title}"]
        for home, listed in homes.items():
            for name in listed.split():
                lines += ["", *_entry(home, name)]
    return "\n".join(lines) + "\n"


def _entry(home: str, name: str) -> Iterator[str]:
    """The lines of one name: heading, signature, words, methods."""
    module = importlib.import_module(f"hsg.{name}" if home == "hsg" else home)
    source = Path(inspect.getsourcefile(module) or "").resolve().relative_to(ROOT).as_posix()
    written = inspect.getsource(module)
    tree = ast.parse(written)
    node, doc = (tree, ast.get_docstring(tree)) if home == "hsg" else find(tree, name)
    yield f"### `{name}`"
    yield ""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        told = signature(node, source=written)
        yield from ("```", *told.splitlines(), "```", "")
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        yield from ("```", *(ast.get_source_segment(written, node) or "").splitlines(), "```", "")
    first, *others = re.split(r"\n\s*\n", doc or "")
    yield from _wrapped(f"{' '.join(first.split())} ([{source}](../{source}))")
    for paragraph in others:
        if SHAPE.search(paragraph) or (TABLE.search(paragraph) and home != "hsg"):
            yield from ("", "```", *textwrap.dedent(paragraph).splitlines(), "```")
    methods = list(_methods(node))
    if methods:
        yield ""
        yield from methods


def find(tree: ast.Module, name: str) -> tuple[ast.stmt, str]:
    """What defines a name in a module, and its docstring: of a constant, the text below it."""
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return node, ast.get_docstring(node) or ""
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            told = following.value if isinstance(following, ast.Expr) else None
            if name in assigned:
                return node, told.value if isinstance(told, ast.Constant) and isinstance(told.value, str) else ""
    raise ValueError(f"{name} must be defined in its module, got none; mend hsg/__init__.py")


def signature(node: Function | ast.ClassDef, width: float = WIDTH, source: str = "") -> str:
    """As it is called; over `width` with a parameter on each line. Of a class: its constructor's or its fields.

    source  where the node comes from: fields whose line says what they mean keep these words
    """
    meanings: list[str] = []
    if isinstance(node, ast.ClassDef):
        made = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
        is_record = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        if made is not None:
            parameters, returned = _parameters(made)[1:], ""
        elif is_record:
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            parameters, returned = [_field(field) for field in fields], ""
            meanings = [_meaning(field, source) for field in fields]
            if len(fields) > MAX_FIELDS:
                parameters, meanings = ["..."], []
        else:
            bases = ", ".join(map(ast.unparse, node.bases))
            return f"class {node.name}({bases})" if bases else f"class {node.name}"
    else:
        parameters, returned = _parameters(node), f" -> {ast.unparse(node.returns)}" if node.returns else ""
        if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
            return f"{node.name}{returned}"
        if parameters and parameters[0] in ("self", "cls"):
            parameters = parameters[1:]
    line = f"{node.name}({', '.join(parameters)}){returned}"
    if len(line) <= width and not any(meanings):
        return line
    meanings = meanings or [""] * len(parameters)
    listed = [f"    {parameter},{meaning}" for parameter, meaning in zip(parameters, meanings, strict=True)]
    return "\n".join([f"{node.name}(", *listed, f"){returned}"])


def _parameters(node: Function) -> list[str]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    told = [_parameter(a, d) for a, d in zip(positional, defaults, strict=True)]
    if given.posonlyargs:
        told.insert(len(given.posonlyargs), "/")
    if given.vararg:
        told.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        told.append("*")
    told += [_parameter(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*told, *([f"**{_parameter(given.kwarg, None)}"] if given.kwarg else [])]


def _parameter(given: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(given.annotation)}" if given.annotation else ""
    spaced = " = " if kind else "="
    return f"{given.arg}{kind}" + (f"{spaced}{ast.unparse(default)}" if default is not None else "")


def _field(field: ast.AnnAssign) -> str:
    value = field.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        made = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        told = f"{made['default_factory']}()" if "default_factory" in made else made.get("default")
    else:
        told = None if value is None else ast.unparse(value)
    return f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" + (f" = {told}" if told else "")


def _meaning(field: ast.AnnAssign, source: str) -> str:
    """The comment behind a field, with the space before it; empty where there is none."""
    comment = re.search(r"  # .*$", source.splitlines()[field.end_lineno - 1]) if source and field.end_lineno else None
    return comment[0] if comment else ""


def _methods(node: ast.AST) -> Iterator[str]:
    """One line for each method of a class or function of a module that is called from outside, with its first sentence."""
    if not isinstance(node, (ast.ClassDef, ast.Module)):
        return
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and method.name not in HIDDEN:
            told = " ".join((ast.get_docstring(method) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=[.?!]) (?=[A-Z`])", told)[0]
            yield from _wrapped(f"- `{signature(method, math.inf)}`{': ' if sentence else ''}{sentence}", indent="  ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
