"""Imports go one way; every rule is a function of sources, so that each is also seen to catch its own violation.

    protocol < types, config < advantages, losses, ... < generation, batch < ... < evaluation < trainer < experiments

A module may import its own level (never in a circle) and those below. A helper that has no place in `LEVELS` (a part
split off a listed module) is looked through: what it imports counts as imported by whoever imports it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = (
    ("protocol",),
    ("types", "config"),
    ("markers",),
    ("advantages", "estimators", "losses", "selector", "prompts", "models", "distributed", "tracking"),
    ("generation", "batch"),
    ("strategies", "reflection", "judge", "rollout", "checkpoint"),
    ("evaluation",),
    ("trainer",),
)
LEVEL = {f"hsg.{name}": level for level, names in enumerate(LEVELS) for name in names}
TORCH_ONLY = ("hsg.advantages", "hsg.estimators", "hsg.losses")

Sources = Mapping[str, str]  # dotted module name -> its source; a package is named like its folder


def read_sources() -> dict[str, str]:
    sources = {}
    for folder in ("hsg", "environments", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text(encoding="utf-8")
            # A relative import starts from the package, which for an __init__ is the module itself.
            if parts[-1] == "__init__":
                sources[name] += "\n# package"
    return sources


def imported(name: str, sources: Sources, *, at_import_time: bool = False) -> set[str]:
    """Dotted names of all modules that a module imports, in functions too unless `at_import_time`."""
    tree = ast.parse(sources[name])
    found = set()
    for node in _nodes(tree, at_import_time):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, sources[name].endswith("# package"), node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                # `from hsg import types` imports a module, `from hsg.types import Turn` a name in one.
                is_module = inner in sources or base in ("hsg", "environments", "experiments")
                found.add(inner if is_module else base)
    return found


def _nodes(tree: ast.AST, at_import_time: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        yield from _nodes(node, at_import_time)


def _base(name: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if is_package else name.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def top(module: str) -> str:
    return module.split(".")[0]


def upward_imports(sources: Sources) -> list[str]:
    """Listed modules that import a higher level, directly or through modules without a place."""
    found = []
    for name in sorted(set(sources) & set(LEVEL)):
        seen, stack = set(), [name]
        while stack:
            for module in imported(stack.pop(), sources) - seen:
                seen.add(module)
                if LEVEL.get(module, 0) > LEVEL[name]:
                    found.append(f"{name} must not import {module}: it stands higher")
                elif module in sources and module not in LEVEL and module != "hsg":
                    stack.append(module)
    return found


def circles(sources: Sources) -> list[str]:
    graph = {name: imported(name, sources) & set(sources) - {name, top(name)} for name in sources}
    done: set[str] = set()
    found = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append("circle: " + " -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return found


def library_reaches_out(sources: Sources) -> list[str]:
    return [
        f"{name} must not import {module}"
        for name in sources
        if top(name) == "hsg"
        for module in imported(name, sources)
        if top(module) in ("environments", "experiments", "tests", "notebooks")
    ]


def environments_reach_in(sources: Sources) -> list[str]:
    return [
        f"{name} must import nothing of hsg but hsg.protocol, got {module}"
        for name in sources
        if top(name) == "environments"
        for module in imported(name, sources)
        if top(module) in ("hsg", "experiments") and module != "hsg.protocol"
    ]


def faiss_elsewhere(sources: Sources) -> list[str]:
    users = [name for name in sources if any(top(module) == "faiss" for module in imported(name, sources))]
    return [f"faiss must be imported in hsg.selector only, got {name}" for name in users if name != "hsg.selector"]


def wandb_at_import_time(sources: Sources) -> list[str]:
    return [
        f"{name} must import wandb inside a function"
        for name in sources
        if any(top(module) == "wandb" for module in imported(name, sources, at_import_time=True))
    ]


def impure_maths(sources: Sources) -> list[str]:
    allowed = {
        "hsg.protocol": sys.stdlib_module_names,
        **dict.fromkeys(TORCH_ONLY, sys.stdlib_module_names | {"torch"}),
    }
    return [
        f"{name} must import the standard library{' and torch' if name in TORCH_ONLY else ''} only, got {module}"
        for name in sorted(set(allowed) & set(sources))
        for module in imported(name, sources)
        if top(module) not in allowed[name] and (name not in TORCH_ONLY or module not in TORCH_ONLY)
    ]


RULES = (
    upward_imports,
    circles,
    library_reaches_out,
    environments_reach_in,
    faiss_elsewhere,
    wandb_at_import_time,
    impure_maths,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule):
    sources = read_sources()
    assert {"hsg.protocol", "environments.toy"} <= set(sources)
    assert rule(sources) == []


VIOLATIONS = [
    (upward_imports, {"hsg.types": "from hsg.batch import pack", "hsg.batch": ""}),
    (upward_imports, {"hsg.types": "from hsg import trainer"}),
    (upward_imports, {"hsg.config": "def f():\n    import hsg.rollout"}),
    (upward_imports, {"hsg.losses": "from .batch import pack", "hsg.batch": ""}),
    (upward_imports, {"hsg.models": "import hsg.helper", "hsg.helper": "from hsg.rollout import Policy"}),
    (circles, {"hsg.judge": "from hsg.rollout import a", "hsg.rollout": "from hsg.judge import b"}),
    (circles, {"hsg.a": "import hsg.b", "hsg.b": "import hsg.c", "hsg.c": "def f():\n    import hsg.a"}),
    (library_reaches_out, {"hsg.trainer": "import environments"}),
    (library_reaches_out, {"hsg.trainer": "from experiments.run import main"}),
    (environments_reach_in, {"environments.toy": "from hsg.types import Turn"}),
    (environments_reach_in, {"environments.toy": "from hsg import types", "hsg": ""}),
    (environments_reach_in, {"environments.toy": "import experiments.run"}),
    (environments_reach_in, {"environments.a.b": "import hsg"}),
    (faiss_elsewhere, {"hsg.strategies": "def f():\n    import faiss"}),
    (wandb_at_import_time, {"hsg.tracking": "try:\n    import wandb\nexcept ImportError:\n    wandb = None"}),
    (wandb_at_import_time, {"hsg.tracking": "class A:\n    from wandb.sdk import run"}),
    (impure_maths, {"hsg.advantages": "import numpy as np"}),
    (impure_maths, {"hsg.losses": "from hsg.types import Batch"}),
    (impure_maths, {"hsg.protocol": "import torch"}),
]


@pytest.mark.parametrize(("rule", "sources"), VIOLATIONS)
def test_each_rule_catches_its_violation(rule, sources):
    assert len(rule(sources)) == 1


def test_what_is_allowed_is_let_through():
    sources = {
        "hsg": "",
        "hsg.protocol": "import math\nfrom dataclasses import dataclass",
        "hsg.types": "import torch\nfrom hsg.protocol import Task",
        "hsg.advantages": "import math\nimport torch\nfrom torch import Tensor",
        "hsg.selector": "import faiss",
        "hsg.tracking": "def start():\n    import wandb",
        "hsg.judge": "from hsg import types\nfrom hsg.helper import x",
        "hsg.helper": "from .types import Turn",
        "hsg.rollout": "from hsg.judge import Judge",
        "environments": "from hsg.protocol import TaskSet",
        "environments.world": "from hsg import protocol\nfrom environments.world import engine\n# package",
        "environments.world.engine": "from . import rooms\nfrom ..shared import texts",
        "environments.world.rooms": "",
        "experiments.run": "import environments\nimport wandbx\nfrom hsg.trainer import Trainer",
    }
    assert [finding for rule in RULES for finding in rule(sources)] == []
