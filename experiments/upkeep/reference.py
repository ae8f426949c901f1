"""The configuration reference, docs/configuration.md, from the dataclasses themselves: `make docs`

A field's meaning is the comment behind it, after the comment lines above it.  Deliberately absent: a second place where
an option is described, rules (a wrong value is answered with its rule).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsg.config.algorithms import ALGORITHMS
from hsg.config.options import Config

OUT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def reference() -> str:
    """The whole page as Markdown."""
    lines = [
        "# Configuration",
        "",
        "Written by `make docs` from `hsg/config/options.py`; a test keeps it true. A YAML file holds what differs from these",
        "defaults, `--set section.key=value` comes last. `null` means what the meaning says of it. Options of an",
        "environment stand in a section of its name (`toy: {num_train: 50}`).",
        "",
    ]
    for title, cls in _sections(Config, ""):
        lines += [f"## {title or 'top level'}", ""]
        doc = cls.__doc__ if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(") else ""
        lines += [" ".join(inspect.cleandoc(doc).split()), ""] if doc else []
        lines += ["| option | default | values | meaning |", "|---|---|---|---|"]
        meanings = _meanings(cls)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                continue
            key = f"{title}.{field.name}" if title else field.name
            meaning = meanings.get(field.name, "").replace("None:", "null:").replace("<", "&lt;")
            cells = (f"`{key}`", f"`{_default(field)}`", _values(hints[field.name]), meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += ["## Bundles", "", "What each value of `algorithm` sets before the file and `--set`:", ""]
    for name, bundle in ALGORITHMS.items():
        what = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in bundle.items())
        lines.append(f"- `{name}`: {what or 'the defaults'}")
    return "\n".join(lines) + "\n"


def _sections(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
    yield prefix, cls
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _sections(typing.cast(type, hint), f"{prefix}.{name}" if prefix else name)


def _meanings(cls: type) -> dict[str, str]:
    """Field -> the comment behind it, with the comment lines above it before that."""
    found, above = {}, []
    depth = 0  # a default may go on over several lines
    name = ""
    for line in textwrap.dedent(inspect.getsource(cls)).splitlines():
        stripped = line.strip()
        if stripped.startswith("def "):
            break
        if stripped.startswith("#") and not depth:
            above.append(stripped.lstrip("# "))
            continue
        field = re.match(r"(\w+): ", stripped)
        code, _, comment = stripped.partition("  # ")
        if field and not depth:
            name = field[1]
            found[name] = " ".join([*above, *([comment] if comment else [])])
            above = []
        elif depth and comment:
            found[name] = f"{found[name]} {comment}".strip()
        depth = max(0, depth + sum(code.count(c) for c in "([{") - sum(code.count(c) for c in ")]}"))
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    assert field.default_factory is not dataclasses.MISSING
    return _yaml(field.default_factory())


def _yaml(value: Any) -> str:
    """As it would stand in a YAML file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _values(hint: Any) -> str:
    """The kinds of value in words; the choices where they are few."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " \u00b7 ".join(f"`{choice}`" for choice in arguments)
    if type(None) in arguments:
        return " or ".join([*(_values(a) for a in arguments if a is not type(None)), "null"])
    names = {int: "whole number", float: "number", bool: "true \u00b7 false", str: "text"}
    return names.get(hint) or {dict: "mapping", list: "list", tuple: "list"}[typing.get_origin(hint) or hint]


def main() -> int:
    OUT.write_text(reference(), encoding="utf-8")
    print(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
