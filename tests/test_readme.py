"""README and the tree of docs/architecture.md keep their word: complete, links lead somewhere, options exist."""

import re
from pathlib import Path

import pytest

from hsg.config.loading import _all_keys

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Files")[1].split("```")[1]


def test_tree_names_every_module_in_its_room():
    """A line of the tree is a file or, with a / behind it, the folder of the deeper lines below it."""
    told, folders = set(), []
    for line in TREE.splitlines():
        if match := re.match(r"( *)([\w.]+/?)", line):
            depth = len(match[1]) // 2
            folders = [*folders[:depth], match[2]]
            told.add("".join(folders))
    there = {
        str(path.relative_to(ROOT))
        for folder in ("hsg", "experiments")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and not path.is_relative_to(ROOT / "experiments" / "benchmarks")
    }
    there = {name for name in there if not name.startswith(("hsg/environments/", "hsg/experiments/"))}
    assert sorted(there - told) == []
    assert sorted(name for name in told if name.endswith(".py") and not (ROOT / name).exists()) == []


def test_duties_are_short():
    duties = [line.split(maxsplit=1)[1] for line in TREE.splitlines() if re.match(r" +\S+\.py ", line)]
    assert len(duties) > 25
    assert [duty for duty in duties if len(duty.split()) > 9] == []


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert len(targets) > 5
    assert [target for target in targets if not (ROOT / target).exists()] == []


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


def test_contributing_tells_a_place_and_a_test_for_each_kind():
    """A row for each kind of part; every path is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where does it go?")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    assert [row[0] for row in rows] == ["estimator", "environment", "selector", "judge", "model family", "study"]
    for kind, place, tests in rows:
        assert re.search(r"`(hsg|environments|experiments)/", place), kind
        assert re.search(r"`tests/", tests), kind
    paths = re.findall(r"`((?:hsg|environments|experiments|tests|docs)/[\w./]*)`", text)
    assert len(paths) > 25
    assert sorted({path for path in paths if not (ROOT / path).exists()}) == []
    words = re.findall(r"`(_[A-Z]+|[A-Z]{4,}|[a-z]+_[a-z_]+)`", table)
    sources = "".join((ROOT / path).read_text(encoding="utf-8") for path in paths if path.endswith(".py"))
    assert [word for word in words if not re.search(rf"^\s*(?:def )?{word}\b", sources, re.MULTILINE)] == []


def test_provenance_names_what_exists():
    """Every test and every dotted option on the page is there, so that a renamed one is noticed."""
    text = (ROOT / "docs" / "provenance.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\b(test_[a-z0-9_]+)\b(?!\.py|/)", text))
    assert len(named) > 30
    assert sorted(name for name in named if name not in tests) == []
    options = set(re.findall(r"`((?:advantage|reward|rollout|loss|gigpo|critic|rnd|reinforce)\.[a-z_]+)[`:]", text))
    assert len(options) > 10
    assert sorted(options - set(_all_keys()) - {"loss.*", "rnd.*"}) == []


def test_new_estimator_of_contributing_works(monkeypatch):
    """The example is one function and one line, and comes to what it says."""
    import torch

    from hsg.config import algorithms
    from hsg.config.loading import make_config
    from hsg.crediting import estimators

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(@estimator.*?)```", text, re.DOTALL)
    try:
        exec(code, vars(estimators) | {"Any": object})
        monkeypatch.setitem(algorithms.ALGORITHMS, "mine", {**algorithms.FLAT, "advantage.estimator": "centred"})
        config = make_config({"algorithm": "mine"})
        outcomes = torch.tensor([[1.0, 0.25, 0.0]], dtype=torch.float64)
        mask = torch.ones(1, 3, 2, dtype=torch.bool)
        returns = outcomes.unsqueeze(-1).expand(mask.shape)
        turns = estimators.Turns(returns, returns, mask, mask.long(), outcomes, mask.any(-1))
        got = estimators.ESTIMATORS[config.advantage.estimator](turns, config).advantages
        plain = estimators.ESTIMATORS["group"](turns, make_config({"algorithm": "dr_grpo"})).advantages
        torch.testing.assert_close(got, plain)
    finally:
        estimators.ESTIMATORS.pop("centred", None)
