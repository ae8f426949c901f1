"""Imports go one way; every rule is a function of sources, so that each is also seen to catch its own violation.

A *place* is a room (a folder of hsg/ or of experiments/) or a file that stands beside the rooms.  The floors of both houses
are the drawing in docs/architecture.md itself: a place may import those that stand on lower floors.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSES = ("hsg.experiments", "hsg.environments", "hsg")  # the longer name first
TORCH_ONLY = ("hsg.crediting.advantages", "hsg.crediting.estimators", "hsg.losses")
FACE = "hsg"  # its __init__ names what stands on every floor, and imports it when it is asked for

Sources = Mapping[str, str]  # dotted module name -> its source; a package is named like its folder
Floors = Mapping[str, Mapping[str, int]]  # house -> place -> floor, 0 at the bottom


def read_sources() -> dict[str, str]:
    sources = {}
    for folder, house in (("hsg", "hsg"), ("environments", "hsg.environments"), ("experiments", "hsg.experiments")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "hsg" and inside.parts[0] in ("environments", "experiments"):
                continue  # links to the folders beside it
            parts = inside.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join((house, *(parts[:-1] if is_package else parts)))
            # A relative import starts from the package, which for an __init__ is the module itself.
            sources[name] = path.read_text(encoding="utf-8") + ("\n# package" if is_package else "")
    return sources


def read_floors() -> dict[str, dict[str, int]]:
    """The drawings of docs/architecture.md: one line a floor, the highest first, places between | and their duty behind #."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    floors = {}
    for house in ("hsg", "hsg.experiments"):
        drawing = re.search(rf"```floors {re.escape(house)}\n(.*?)```", page, re.DOTALL)
        assert drawing is not None, f"docs/architecture.md must draw the floors of {house}"
        lines = [re.sub(r"#.*", "", line) for line in drawing[1].splitlines() if line.strip()]
        floors[house] = {
            place.strip(): height for height, line in enumerate(reversed(lines)) for place in line.split("|")
        }
    return floors


def house_of(module: str) -> str:
    return next((house for house in HOUSES if f"{module}.".startswith(f"{house}.")), "")


def place_of(module: str, sources: Sources) -> str:
    """`engine/` for a module in a room, `trainer` for one that stands beside the rooms, "" for the house itself."""
    house = house_of(module)
    parts = module[len(house) + 1 :].split(".")
    is_room = len(parts) > 1 or "# package" in sources.get(module, "")
    return f"{parts[0]}/" if parts[0] and is_room else parts[0]


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
                found.add(inner if inner in sources or base in HOUSES else base)
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


# ------------------------------------------------------------------------------------------------- rules of imports


def upward_imports(sources: Sources, floors: Floors) -> list[str]:
    """Places that import another one which stands on their own floor or higher, or that stand on no floor."""
    found = set()
    for name in sorted(set(sources) - {FACE}):
        house, place = house_of(name), place_of(name, sources)
        if house not in floors or not place:
            continue
        if place not in floors[house]:
            found.add(f"{place} of {house} must stand in the drawing of docs/architecture.md")
            continue
        for module in imported(name, sources):
            other = place_of(module, sources)
            if house_of(module) != house or other in ("", place):
                continue
            if floors[house].get(other, 0) >= floors[house][place]:
                found.add(f"{place} must not import {other} ({name} -> {module}): it stands no lower")
    return sorted(found)


def circles(sources: Sources) -> list[str]:
    graph = {name: imported(name, sources) & set(sources) - {name, *HOUSES} for name in sources}
    done: set[str] = set()
    found = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append("circle: " + " -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(set(graph) - {FACE}):
        visit(name, ())
    return found


def library_reaches_out(sources: Sources) -> list[str]:
    return [
        f"{name} must not import {module}"
        for name in sources
        if house_of(name) == "hsg" and name != FACE
        for module in imported(name, sources)
        if house_of(module) in ("hsg.environments", "hsg.experiments") or top(module) in ("tests", "notebooks")
    ]


def environments_reach_in(sources: Sources) -> list[str]:
    return [
        f"{name} must import nothing of hsg but hsg.protocol, got {module}"
        for name in sources
        if house_of(name) == "hsg.environments"
        for module in imported(name, sources)
        if house_of(module) in ("hsg", "hsg.experiments")
        and module not in ("hsg.protocol", "hsg.environments")
        and f"{module}." not in "hsg.environments."
    ]


def old_names(sources: Sources) -> list[str]:
    """`environments` and `experiments` are what every student calls their own folders; ours are parts of hsg."""
    return [
        f"{name} must import hsg.{module}, got {module}"
        for name in sources
        for module in imported(name, sources)
        if top(module) in ("environments", "experiments")
    ]


def faiss_elsewhere(sources: Sources) -> list[str]:
    users = [name for name in sources if any(top(module) == "faiss" for module in imported(name, sources))]
    home = "hsg.strategy.selector"
    return [f"faiss must be imported in {home} only, got {name}" for name in users if name != home]


def wandb_at_import_time(sources: Sources) -> list[str]:
    return [
        f"{name} must import wandb inside a function"
        for name in sources
        if any(top(module) == "wandb" for module in imported(name, sources, at_import_time=True))
    ]


def impure_maths(sources: Sources) -> list[str]:
    allowed = {
        "hsg.protocol": sys.stdlib_module_names,
        "hsg.crediting.names": sys.stdlib_module_names,  # asked before torch is there
        **dict.fromkeys(TORCH_ONLY, sys.stdlib_module_names | {"torch"}),
    }
    return [
        f"{name} must import the standard library{' and torch' if name in TORCH_ONLY else ''} only, got {module}"
        for name in sorted(set(allowed) & set(sources))
        for module in imported(name, sources)
        if top(module) not in allowed[name]
        and (name not in TORCH_ONLY or module not in (*TORCH_ONLY, "hsg.crediting.names"))
    ]


# --------------------------------------------------------------------------------------------------- rules of rooms


def rooms_of(sources: Sources) -> dict[tuple[str, str], list[str]]:
    """(house, room) -> its modules, those of folders inside it too."""
    rooms: dict[tuple[str, str], list[str]] = {}
    for name in sources:
        house, place = house_of(name), place_of(name, sources)
        if house in ("hsg", "hsg.experiments") and place.endswith("/"):
            rooms.setdefault((house, place[:-1]), []).append(name)
    return rooms


def crowded_rooms(sources: Sources) -> list[str]:
    """At most 12 modules a room and beside the rooms, `__init__` included; no room of a single one."""
    found = [
        f"{house}.{room} must have 2 to 11 modules and an __init__, got {len(modules) - 1}"
        for (house, room), modules in rooms_of(sources).items()
        if not 3 <= len(modules) <= 12
    ]
    for house in ("hsg", "hsg.experiments"):
        beside = [n for n in sources if house_of(n) == house and not place_of(n, sources).endswith("/")]
        if len(beside) > 12:
            found.append(f"{house} must have at most 12 files beside its rooms, got {len(beside)}")
    return found


def rooms_named_like_a_file(sources: Sources) -> list[str]:
    beside = {n for n in sources if not place_of(n, sources).endswith("/")}
    return [f"{house}.{room} must not bear the name of a file beside it" for house, room in rooms_of(sources)
            if f"{house}.{room}" in beside]  # fmt: skip


def rooms_without_a_duty(sources: Sources) -> list[str]:
    """A room's `__init__` says its duty in at most three lines, and holds nothing else."""
    found = []
    for house, room in rooms_of(sources):
        tree = ast.parse(sources.get(f"{house}.{room}", ""))
        duty = (ast.get_docstring(tree) or "").strip()
        lines = [line for line in duty.splitlines() if line.strip()]
        if not 1 <= len(lines) <= 3 or len(tree.body) != 1:
            found.append(f"{house}.{room} must have an __init__ of its duty in three lines and nothing else")
    return found


def stale_drawing(sources: Sources, floors: Floors) -> list[str]:
    """Places in the drawing that are not there any more."""
    there = {(house_of(name), place_of(name, sources)) for name in sources}
    return [
        f"{house}: {place} must be there, or leave the drawing of docs/architecture.md"
        for house, places in floors.items()
        for place in places
        if (house, place) not in there
    ]


RULES = (
    circles,
    library_reaches_out,
    environments_reach_in,
    old_names,
    faiss_elsewhere,
    wandb_at_import_time,
    impure_maths,
    crowded_rooms,
    rooms_named_like_a_file,
    rooms_without_a_duty,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule):
    sources = read_sources()
    assert {"hsg.protocol", "hsg.environments.toy", "hsg.experiments.run", "hsg.engine.cache"} <= set(sources)
    assert rule(sources) == []


@pytest.mark.parametrize("rule", [upward_imports, stale_drawing], ids=lambda rule: rule.__name__)
def test_the_drawing_is_true(rule):
    assert rule(read_sources(), read_floors()) == []


FLOORS = {"hsg": {"types": 0, "low/": 1, "batch": 2, "high/": 3, "trainer": 4}}
ROOMS = {"hsg.low": "# package", "hsg.low.x": "", "hsg.high": "# package", "hsg.high.y": ""}
UPWARD = [
    {"hsg.types": "from hsg.batch import pack", "hsg.batch": ""},
    {"hsg.types": "from hsg import trainer", "hsg.trainer": ""},
    {**ROOMS, "hsg.low.x": "def f():\n    import hsg.high.y"},
    {**ROOMS, "hsg.low.x": "from hsg.high import y"},
    {**ROOMS, "hsg.low.x": "from ..high.y import z"},
    {**ROOMS, "hsg.low.x": "from hsg.batch import pack", "hsg.batch": ""},
    {"hsg.batch": "from hsg.high.y import z", **ROOMS},
    {"hsg.stranger": ""},
]


@pytest.mark.parametrize("sources", UPWARD)
def test_an_arrow_that_runs_back_is_found(sources):
    assert len(upward_imports(sources, FLOORS)) == 1


def test_two_places_of_one_floor_may_not_import_each_other():
    sources = {"hsg.a": "import hsg.b", "hsg.b": ""}
    assert len(upward_imports(sources, {"hsg": {"a": 0, "b": 0}})) == 1
    assert stale_drawing(sources, {"hsg": {"a": 0, "b": 1, "gone/": 2}}) != []


FULL = {f"hsg.low.m{i}": "" for i in range(12)}
DUTY = '"""A duty."""\n# package'
VIOLATIONS = [
    (circles, {"hsg.judge": "from hsg.rollout import a", "hsg.rollout": "from hsg.judge import b"}),
    (circles, {"hsg.a.x": "import hsg.b", "hsg.b": "import hsg.c", "hsg.c": "def f():\n    import hsg.a.x"}),
    (library_reaches_out, {"hsg.trainer": "from hsg import environments"}),
    (library_reaches_out, {"hsg.trainer": "from hsg.experiments.run import main"}),
    (environments_reach_in, {"hsg.environments.toy": "from hsg.types import Turn"}),
    (environments_reach_in, {"hsg.environments.toy": "from hsg import types", "hsg": ""}),
    (environments_reach_in, {"hsg.environments.toy": "import hsg.experiments.run"}),
    (environments_reach_in, {"hsg.environments.a.b": "import hsg.text.chat"}),
    (old_names, {"hsg.environments.toy": "from environments.toy import world"}),
    (old_names, {"hsg.experiments.run": "def f():\n    import environments"}),
    (faiss_elsewhere, {"hsg.strategy.propose": "def f():\n    import faiss"}),
    (wandb_at_import_time, {"hsg.run.tracking": "try:\n    import wandb\nexcept ImportError:\n    wandb = None"}),
    (wandb_at_import_time, {"hsg.run.tracking": "class A:\n    from wandb.sdk import run"}),
    (impure_maths, {"hsg.crediting.advantages": "import numpy as np"}),
    (impure_maths, {"hsg.losses": "from hsg.types import Batch"}),
    (impure_maths, {"hsg.protocol": "import torch"}),
    (crowded_rooms, {"hsg.low": "# package", **FULL}),
    (crowded_rooms, {"hsg.low": "# package", "hsg.low.x": ""}),
    (crowded_rooms, {f"hsg.m{i}": "" for i in range(13)}),
    (rooms_named_like_a_file, {"hsg.experiments.study.x": "", "hsg.experiments.study": ""}),
    (rooms_without_a_duty, {"hsg.low": "# package", "hsg.low.x": ""}),
    (rooms_without_a_duty, {"hsg.low": '"""A duty."""\nfrom hsg.low.x import y\n# package', "hsg.low.x": ""}),
    (rooms_without_a_duty, {"hsg.low": '"""One.\n\ntwo\nthree\nfour\n"""\n# package', "hsg.low.x": ""}),
]


@pytest.mark.parametrize(("rule", "sources"), VIOLATIONS)
def test_each_rule_catches_its_violation(rule, sources):
    assert len(rule(sources)) == 1


def test_what_is_allowed_is_let_through():
    sources = {
        "hsg": "def __getattr__(name):\n    import hsg.trainer\n# package",
        "hsg.protocol": "import math\nfrom dataclasses import dataclass",
        "hsg.types": "import torch\nfrom hsg.protocol import Task",
        "hsg.crediting": DUTY,
        "hsg.crediting.advantages": "import math\nimport torch\nfrom torch import Tensor",
        "hsg.crediting.estimators": "from hsg.crediting.advantages import x",
        "hsg.strategy": DUTY,
        "hsg.strategy.selector": "import faiss",
        "hsg.strategy.judge": "from hsg import types\nfrom hsg.strategy.selector import x",
        "hsg.rollout": "from hsg.strategy.judge import Judge",
        "hsg.trainer": "from hsg.rollout import Rollout",
        "hsg.environments": "from hsg.protocol import TaskSet\n# package",
        "hsg.environments.world": "from hsg import protocol\nfrom hsg.environments.world import engine\n# package",
        "hsg.environments.world.engine": "from . import rooms\nfrom ..shared import texts",
        "hsg.environments.world.rooms": "",
        "hsg.experiments": "# package",
        "hsg.experiments.run": "from hsg import environments\nimport wandbx\nfrom hsg.trainer import Trainer",
    }
    floors = {
        "hsg": {"protocol": 0, "crediting/": 0, "types": 1, "strategy/": 2, "rollout": 3, "trainer": 4},
        "hsg.experiments": {"run": 0},
    }
    assert [finding for rule in RULES for finding in rule(sources)] == []
    assert upward_imports(sources, floors) == [] == stale_drawing(sources, floors)


# ------------------------------------------------------------------------------------- what the names are worth


def test_no_folder_of_a_package_is_ignored_by_git():
    """A pattern such as `runs/` hides a room of that name at any depth: what is never added is missing in every clone."""
    folders = {f"{path.relative_to(ROOT)}/" for base in ("hsg", "environments", "experiments", "tests")
               for path in (ROOT / base).rglob("*") if path.is_dir() and "__pycache__" not in path.parts}  # fmt: skip
    wanted = {f"hsg/{name}/x.py" for name in ("build", "runs", "dist", "evaluations", "wandb")} | folders
    answer = subprocess.run(["git", "check-ignore", "--stdin"], input="\n".join(sorted(wanted)), text=True, cwd=ROOT,
                            capture_output=True)  # fmt: skip
    if "not a git repository" in answer.stderr:
        pytest.skip("the sources stand in no git repository")
    assert answer.stdout == ""


def test_mypy_sees_the_environments_and_experiments_behind_their_links():
    """`mypy -p hsg` would stop at a link or a mapped folder in silence, and check a quarter of the files."""
    from mypy import find_sources
    from mypy.options import Options

    found = {source.module for source in find_sources.create_source_list([str(ROOT / "hsg")], Options())}
    assert set(read_sources()) - {"hsg.experiments.benchmarks.trl_bench"} <= found


def test_no_module_is_loaded_under_two_names():
    """The folders are importable from the clone's root as well; whoever did so would have two registries and two classes."""
    code = (
        "import sys, os, hsg.experiments.run, hsg.experiments.cli\n"
        "from hsg import environments\n"
        "environments.make('toy')\n"
        "import hsg.trainer\n"
        "files = {}\n"
        "for name, module in list(sys.modules.items()):\n"
        "    path = getattr(module, '__file__', None)\n"
        f"    if path and os.path.realpath(path).startswith({str(ROOT)!r}) and '/.venv' not in path:\n"
        "        files.setdefault(os.path.realpath(path), []).append(name)\n"
        "print([names for names in files.values() if len(names) > 1 and '__main__' not in names], len(files))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    twice, count = done.stdout.strip().rsplit(" ", 1)
    assert (done.returncode, twice) == (0, "[]"), done.stderr
    assert int(count) > 40
