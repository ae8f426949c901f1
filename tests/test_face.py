"""The public face: every name is there, light until it is asked for, and all that notebooks and documents import."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hsg
from hsg.experiments.upkeep import api

ROOT = Path(__file__).resolve().parents[1]
FACE = ROOT / "hsg" / "__init__.py"
LIGHT = [
    *("__version__", "Config", "Prompts", "parse_judgment", "pass_at_k", "train", "read_architecture"),
    *(name for listed in hsg._GROUPS["Write an environment"].values() for name in listed.split()),
]
"""Names that compute nothing with tensors when they are imported."""


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------- the names


def test_every_name_is_what_its_module_defines():
    assert sorted(hsg.__all__) == hsg.__all__ == sorted(set(hsg.__all__))
    for name, home in hsg._HOMES.items():
        module = importlib.import_module(f"hsg.{name}" if home == "hsg" else home)
        assert getattr(hsg, name) is (module if home == "hsg" else getattr(module, name)), name
    assert set(hsg.__all__) <= set(dir(hsg))
    assert "__version__" in dir(hsg)


def for_editors(source: str) -> dict[str, str]:
    """Name -> module, as the block for editors and mypy imports them, each under its own name."""
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} must be `as {alias.name}`, so that it is exported"
            found[alias.name] = node.module or ""
    return found


def test_editors_and_mypy_know_the_same_names():
    source = FACE.read_text(encoding="utf-8")
    assert for_editors(source) == hsg._HOMES
    assert for_editors(source.replace("    from hsg.batch import Row as Row\n", "", 1)) != hsg._HOMES


def test_no_name_is_that_of_a_module_beside_it():
    """Importing hsg.rollout sets the attribute `rollout`: a function of that name would give way to it."""
    beside = {path.stem for path in (ROOT / "hsg").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {"rollout", "losses", "measure", "environments"} <= beside
    assert set(hsg.__all__) & beside == {"environments"}  # the one module on the face


ORDERS = [
    ("import hsg.measure.pass_at_k, hsg.measure.evaluation, hsg.crediting.estimators", ""),
    ("import hsg.experiments.evaluate, hsg.rollout, hsg.strategy.propose", "import hsg.trainer"),
    ("from hsg import pass_at_k, evaluate, estimator, propose", "import hsg.measure.pass_at_k, hsg.strategy.propose"),
    ("from hsg.experiments import run, evaluate, warmstart", "import hsg.run.build"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), ORDERS)
def test_functions_stay_functions_whatever_is_imported_first(before: str, after: str):
    names = "pass_at_k evaluate estimator propose select train score warm_start"
    code = (
        f"{before}\nimport hsg\n{after}\n"
        f"print([name for name in {names.split()} if not type(getattr(hsg, name)).__name__ == 'function'])\n"
        "print(type(hsg.environments).__name__, hsg.Rollout.__module__)"
    )
    assert fresh(code).splitlines() == ["[]", "module hsg.rollout"]


def test_only_what_computes_loads_torch():
    code = "import sys, hsg\nfor name in {names}:\n    getattr(hsg, name)\nprint({heavy} & set(sys.modules))"
    heavy = {"torch", "transformers", "numpy", "faiss", "yaml"}
    assert fresh(code.format(names=["__version__"], heavy=heavy | {"hsg.protocol", "difflib"})) == "set()"
    assert fresh(code.format(names=LIGHT, heavy=heavy)) == "set()"
    assert fresh("from hsg import environments, Task; import sys; print('torch' in sys.modules)") == "False"
    assert "torch" in fresh(code.format(names=["policy_loss"], heavy=heavy))  # what the others would look like


UNKNOWN = [
    ("evalute", "module 'hsg' has no attribute 'evalute'; did you mean evaluate?"),
    ("group_advantage", "module 'hsg' has no attribute 'group_advantage'; did you mean group_advantages?"),
    ("zzz", "module 'hsg' has no attribute 'zzz'; docs/api.md tells every name"),
    ("__wrapped__", "module 'hsg' has no attribute '__wrapped__'"),
]


@pytest.mark.parametrize(("name", "message"), UNKNOWN)
def test_an_unknown_name_is_answered_with_near_ones(name: str, message: str):
    with pytest.raises(AttributeError) as caught:
        getattr(hsg, name)
    assert str(caught.value) == message


def test_mypy_knows_the_names_and_no_other(tmp_path: Path):
    """A module with a __getattr__ in mypy's sight has every name."""
    from mypy import api as mypy

    mine = tmp_path / "mine.py"
    mine.write_text("from hsg import Task\nfrom hsg import Tsak\n", encoding="utf-8")
    alone = ["--follow-imports", "skip", "--cache-dir", str(tmp_path)]  # torch's types take half a minute to read
    told, _, status = mypy.run([str(mine), str(FACE), "--config-file", str(ROOT / "pyproject.toml"), *alone])
    assert status == 1
    assert re.findall(r'mine\.py:(\d+): error: Module "hsg" has no attribute "(\w+)"', told) == [("2", "Tsak")]


# ------------------------------------------------------------------------------------- notebooks and documents


def code_of_documents() -> Iterator[tuple[str, str]]:
    """(name, code) of every code cell of the notebooks and every python block of the documents."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            code = "".join(cell["source"])
            written = re.match(r"%%writefile (\S+)\n", code)
            if cell["cell_type"] == "code" and not (written and not written[1].endswith(".py")):
                yield f"{path.name}[{number}]", re.sub(r"(?m)^[%!].*$", "", code)
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            yield f"{path.name}[{number}]", code


def not_from_the_face(code: str) -> list[str]:
    """Imports of hsg that are neither a name of the face nor the words of one environment."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("hsg.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hsg":
            if node.module == "hsg":
                found += [f"hsg.{alias.name}" for alias in node.names if alias.name not in hsg.__all__]
            elif not str(node.module).startswith("hsg.environments."):
                found.append(str(node.module))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hsg":
            found += [f"hsg.{node.attr}"] if node.attr not in (*hsg.__all__, "__version__") else []
    return found


def test_notebooks_and_documents_import_from_the_face_alone():
    codes = dict(code_of_documents())
    assert sum("from hsg import" in code for code in codes.values()) > 20
    assert {name: found for name, code in codes.items() if (found := not_from_the_face(code))} == {}


INSIDE = [
    ("from hsg.losses import policy_loss", ["hsg.losses"]),
    ("import hsg.trainer", ["hsg.trainer"]),
    ("from hsg import trainer, Trainer", ["hsg.trainer"]),
    ("import hsg\nhsg.scores(1)\nhsg.score(1)", ["hsg.scores"]),
    ("from hsg.environments.toy import AREAS\nfrom hsg import environments\nimport hsg", []),
]


@pytest.mark.parametrize(("code", "found"), INSIDE)
def test_imports_from_inside_are_found(code: str, found: list[str]):
    assert not_from_the_face(code) == found


def blocks_of(*documents: Path) -> list[Any]:
    """The python blocks of documents, each a whole script."""
    found = []
    for path in documents:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            found.append(pytest.param(code, id=f"{path.stem}-{number}"))
    return found


@pytest.mark.parametrize("code", blocks_of(*sorted((ROOT / "docs").glob("*.md"))))
def test_python_in_documents_runs_and_prints_what_it_says(code: str, tmp_path: Path):
    """`print(...)  # WORDS` prints these words. That of CONTRIBUTING.md is a fragment: tests/test_readme.py."""
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"(?m)^\s*print\(.*\)  # (.*)$", code)


def test_prose_names_the_face():
    """`hsg.NAME` in the text of documents and notebooks is a name of the face, or a module that can be run or read."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        texts += [
            "".join(c["source"]) for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] != "code"
        ]
    named = {name for text in texts for name in re.findall(r"`hsg\.([A-Za-z_.]+)\b", text)}
    assert {"sample_measures", "EnvironmentFault"} <= named
    for name in named - set(hsg.__all__):
        importlib.import_module(f"hsg.{name}")


# ------------------------------------------------------------------------------------------------- docs/api.md


def test_api_page_is_up_to_date():
    assert api.OUT.read_text(encoding="utf-8") == api.page(), "run `make docs` and commit docs/api.md"


def test_api_page_tells_every_name_with_words():
    told = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", api.page(), re.DOTALL | re.MULTILINE))
    assert sorted(told) == hsg.__all__
    for name, text in told.items():
        words = re.sub(r"```.*?```|^- .*?$|\(\[.*?\)\)", "", text, flags=re.DOTALL | re.MULTILINE).split()
        assert len(words) > 2, f"{name} must have a docstring"
        for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
            assert (ROOT / "docs" / link).exists(), link


SOURCE = '''
@dataclass(frozen=True)
class Point:
    """Two numbers.

    x  across
    y  up
    """

    x: int
    y: list[int] = field(default_factory=list)  # metres

    @property
    def far(self) -> bool:
        """Beyond 1. Always so."""

    def _own(self): ...
    def state_dict(self) -> dict: ...
    def plain(self, *others, k=1): ...


class Thing(Base):
    def __init__(self, name: str, *, wide: bool = False, **rest: int) -> None: ...


def f(a, /, b: int, c: Tensor = None, *more: str, d: int, e: str = "x") -> Tensor: ...


ONE, TWO = 1, 2
"""Numbers."""
'''
SIGNATURES = [
    ("Point", "Point(x: int, y: list[int] = list())"),
    ("Thing", "Thing(name: str, *, wide: bool = False, **rest: int)"),
    ("f", "f(a, /, b: int, c: Tensor = None, *more: str, d: int, e: str = 'x') -> Tensor"),
]


@pytest.mark.parametrize(("name", "told"), SIGNATURES)
def test_signatures_are_the_words_of_the_source(name: str, told: str):
    node, _ = api.find(ast.parse(SOURCE), name)
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    assert api.signature(node) == told
    if name == "f":
        assert api.signature(node, 20).splitlines()[:3] == ["f(", "    a,", "    /,"]


def test_fields_keep_their_meanings():
    point, _ = api.find(ast.parse(SOURCE), "Point")
    assert isinstance(point, ast.ClassDef)
    told = ["Point(", "    x: int,", "    y: list[int] = list(),  # metres", ")"]
    assert api.signature(point, source=SOURCE).splitlines() == told


def test_methods_and_constants_are_told():
    tree = ast.parse(SOURCE)
    point, words = api.find(tree, "Point")
    assert words.startswith("Two numbers.")
    assert list(api._methods(point)) == ["- `far -> bool`: Beyond 1.", "- `plain(*others, k=1)`"]
    assert api.find(tree, "TWO")[1] == "Numbers."
    with pytest.raises(ValueError, match=r"three must be defined in its module, got none; mend hsg/__init__\.py"):
        api.find(tree, "three")


SHAPES = [("(P, N, M)", True), ("(..., G)", True), ("(B, T-1) floats", True), ("(P,) each", True), ("(a, b)", False),
          ("(Dr.GRPO)", False), ("f(x, K)", False)]  # fmt: skip


@pytest.mark.parametrize(("text", "has"), SHAPES)
def test_shapes_are_seen(text: str, has: bool):
    assert bool(api.SHAPE.search(text)) == has
