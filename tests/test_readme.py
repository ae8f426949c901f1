"""README keeps its word: its example environment works, its tree is complete, its options exist."""

import re
from pathlib import Path

import pytest

from hsg.configfile import _all_keys

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.split("## Files")[1].split("```")[1]


def test_example_environment_passes_the_check(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize("folder", ["hsg", "experiments"])
def test_tree_names_every_module(folder):
    modules = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert sorted(m for m in modules if not re.search(rf"^  {re.escape(m)} ", TREE, re.MULTILINE)) == []


def test_duties_are_short():
    duties = [line.split(maxsplit=1)[1] for line in TREE.splitlines() if re.match(r"  \S+\.py ", line)]
    assert len(duties) > 25
    assert [duty for duty in duties if len(duty.split()) > 9] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "Makefile"])
def test_options_that_are_named_exist(name):
    sections = {key.split(".")[0] for key in _all_keys() if "." in key}
    text = (ROOT / name).read_text(encoding="utf-8")
    named = {
        match
        for match in re.findall(r"(?<![\w./])([a-z]+\.[a-z_]+(?:\.[a-z_]+)?)\b(?!/|\()", text)
        if match.split(".")[0] in sections and not match.endswith((".py", ".yaml"))
    }
    assert named
    assert sorted(named - set(_all_keys())) == []
