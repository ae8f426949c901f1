"""README and the tree of docs/architecture.md keep their word: complete, links lead somewhere, options exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hsg import check_environment
from hsg.config.loading import _all_keys
from hsg.experiments.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: small letters, no signs, - for a blank, a number if repeated."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{n}" if n else anchor for anchor, times in found.items() for n in range(times + 1)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"(?<=\]\()(?!https?://)([^)#\s]*)(?:#([^)\s]+))?(?=\))", re.sub(r"`[^`\n]*`", "`", text))
    assert targets or path.name not in ("README.md", "commands.md")
    for target, anchor in targets:
        page = path.parent / target if target else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_anchors_are_made_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# The `run` folder: a, b\n## Same\n```\n# no heading\n```\n## Same\n## [A link](x.md) -- 3.5 %\n")
    assert anchors(page) == {"the-run-folder-a-b", "same", "same-1", "a-link----35-"}


def test_readme_is_one_screen_and_one_page():
    assert len(README.split()) <= 1200
    assert [line for line in README.splitlines() if len(line) > 120] == []
    picture = ROOT / "docs" / "viewer.png"
    assert "](docs/viewer.png)" in README[:3000], "the picture stands on the first screen or just below"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 250_000


@pytest.mark.parametrize("path", [path for path in PAGES if path.name in ("README.md", "commands.md")], ids=str)
def test_commands_that_are_named_exist(path):
    text = path.read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z][a-z0-9 -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    studies = {study.stem for study in (ROOT / "experiments" / "studies").glob("ablate-*.yaml")}
    named = set(re.findall(r"(?:`|^\$ |^)make ([a-z-]+)", text, re.MULTILINE))
    assert len(named) > 4
    assert sorted(named - {name for rule in rules for name in rule.split()} - studies) == []
    words = set(re.findall(r"(?:`|^\$ |^)hsg ([a-z-]+)", text, re.MULTILINE))
    assert len(words) > 2
    assert sorted(words - set(COMMANDS)) == []


def test_figures_of_readme_stand_in_the_results():
    """Nothing is said in README alone: every figure of its table is one of docs/results.md."""
    table = README.split("## Results")[1].split("## ")[0]
    figures = set(re.findall(r"\b\d\.\d{2,}\b", table))
    assert len(figures) > 8
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert sorted(figure for figure in figures if figure not in results) == []


def test_twelve_lines_train_on_an_environment(tmp_path, monkeypatch, guesser_folder):
    """As they stand, but two iterations of a model that plays in seconds: it guesses at random, so there is something to learn."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 13, "an import and twelve lines"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guess"}
    replaced = {"model.path=smollm2": f"model.path={guesser_folder} prompts.style=terse train.iterations=2"}
    for given, small in replaced.items():
        assert code.count(given) == 1
        code = code.replace(given, small)
    exec(code, names)
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "guess" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == names["config"].train.iterations
    assert any(line["update/grad_norm"] > 0 for line in metrics)
    said = check_environment(names["Numbers"]())  # README shows what it says
    assert len(said) == 1
    assert said[0].startswith("splits: an unknown split must raise a ValueError")


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
        for known in (estimators.ESTIMATORS, estimators.ESTIMATOR_NAMES):
            known.pop("centred", None)
