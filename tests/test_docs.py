"""The pages of docs/ keep their word: the reference is what the dataclasses say, options and metrics that are named exist."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsg import environments
from hsg.config.algorithms import ALGORITHMS, FLAT
from hsg.config.loading import _all_keys
from hsg.experiments.upkeep.reference import OUT, _meanings, reference

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = [path for path in sorted((ROOT / "hsg").rglob("*.py"))
           if not path.is_relative_to(ROOT / "hsg" / "environments")
           and not path.is_relative_to(ROOT / "hsg" / "experiments")]  # fmt: skip


def test_configuration_reference_is_up_to_date() -> None:
    assert OUT.read_text(encoding="utf-8") == reference(), "run `make docs` and commit docs/configuration.md"


def test_every_option_has_its_line_with_default_and_meaning() -> None:
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| `(.*?)` \| (.+?) \| (.*) \|$", reference(), re.MULTILINE)
    keys = {key for key in _all_keys() if not any(other.startswith(f"{key}.") for other in _all_keys())}
    assert {row[0] for row in rows} == keys
    told = {row[0]: row[1:] for row in rows}
    assert told["loss.aggregation"][1].startswith("`token-mean` · `seq-mean-token-mean`")  # a default over two lines
    assert told["kappa"] == ("0.1", "number", "penalty of a flagged turn")
    assert told["train.max_seconds"][:2] == ("null", "number or null")


def documented_metrics() -> list[str]:
    """In the first column of the tables of docs/metrics.md."""
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    firsts = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [name for first in firsts for name in re.findall(r"`([a-z]+/[a-z_0-9]+)`", first)]


def test_every_metric_has_its_line() -> None:
    """Names that stand in the code are explained, and what is explained is of a kind that the code has."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in LIBRARY)
    told = documented_metrics()
    assert len(told) == len(set(told))
    kinds = {name.split("/")[0] for name in told}
    literals = {name for name in re.findall(r'"([a-z]+/[a-z_0-9]+)"', code) if name.split("/")[0] in kinds}
    unfinished = {"time/trained", "time/sampled", "time/processor", "advantage/strategy_"}  # beginnings of names
    assert literals - unfinished <= set(told)
    parts = {*re.findall(r'"([a-z_0-9]+)"', code), *re.findall(r"\b([a-z_]+):? (?:int|float) = ", code)}
    for name in set(told) - literals:  # put together from a kind and a word that stands in the code
        word = name.split("/")[1]
        word = re.sub(r"^strategy_(?=dead|frac)|_(?:positions|seconds|strategy|action)$", "", word)
        assert word in parts or word in code, name


def test_troubleshooting_names_options_and_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", text)
    options = {name for name in quoted if not name.endswith((".jsonl", ".yaml"))}
    assert len(options) > 25
    assert sorted(options - set(_all_keys())) == []
    sources = "".join(path.read_text(encoding="utf-8") for path in LIBRARY)
    metrics = set(re.findall(r"`((?:advantage|update|rollout|judge|strategy|reward)/[a-z_]+)`", text))
    assert len(metrics) > 8
    # Names are put together where they are made: the last part, without the level before it, stands in the code.
    ends = {name: name.split("/")[1].removeprefix("strategy_") for name in metrics}
    assert sorted(name for name, end in ends.items() if f'{end}"' not in sources) == []


def sections(name: str) -> dict[str, str]:
    """What stands under each heading that is one name in backticks."""
    parts = re.split(r"^##+ (.+)$", (ROOT / "docs" / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {h.strip("`"): text for h, text in zip(parts[1::2], parts[2::2], strict=True) if re.fullmatch("`.+`", h)}


def test_every_algorithm_has_its_section_with_its_bundle() -> None:
    told = sections("algorithms.md")
    assert set(told) == set(ALGORITHMS)
    for name, bundle in ALGORITHMS.items():
        (line,) = re.findall(r"Bundle: (.*?)\.\s", told[name], re.DOTALL)
        said: dict[str, Any] = dict(FLAT) if line.startswith("flat") else {}
        for key, value in re.findall(r"`([a-z_.]+)(?:: ([^`]+))?`", line):
            said[key] = yaml.safe_load(value) if value else bundle[key]  # templates are too long to be repeated
        assert said == bundle, name
        assert told[name].count("**Use it**") == 1, name


@pytest.mark.parametrize("page", ["algorithms.md", "concepts.md", "environments.md"])
def test_pages_name_options_functions_and_files_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    keys = set(_all_keys())
    names = {key.split(".")[0] for key in keys if "." in key}
    modules = {path.stem: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LIBRARY}
    found = 0
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        head, dot, rest = (dotted := re.split(r"[:= ]", quoted)[0]).partition(".")
        if "/" in dotted:
            if dotted.startswith(("hsg/", "environments/", "experiments/", "tests/")):
                assert (ROOT / dotted).exists(), dotted
                found += 1
        elif (
            dot
            and rest.replace("_", "").replace(".", "").isalnum()
            and rest not in ("py", "md", "jsonl", "json", "yaml")
        ):
            if head in names and dotted in keys:
                found += 1
            elif head in modules:
                owner: Any = importlib.import_module(modules[head])
                for part in rest.split("."):
                    owner = getattr(owner, part)
                found += 1
            else:
                assert head not in names, f"no such option: {dotted}"
    assert found > 4


@pytest.mark.parametrize("name", environments.available())
def test_every_option_of_an_environment_is_told_with_its_default(name: str) -> None:
    make = importlib.import_module(f"hsg.environments.{name}").make_task_set
    rows = re.findall(r"^\| `([a-z_]+)` \| `(.+?)` \|", sections("environments.md")[name], re.MULTILINE)
    assert {key: yaml.safe_load(value.replace("None", "null")) for key, value in rows} == {
        key: parameter.default for key, parameter in inspect.signature(make).parameters.items()
    }


def test_example_environment_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "[]\n"


def test_citation_is_complete_yaml() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [reference["identifiers"][0]["value"] for reference in citation["references"]] == [
        "arXiv:2605.06642",
        "arXiv:2603.02045",
    ]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").translate({ord(c): None for c in "{}"}).split())
    for cited in citation["references"]:  # its BibTeX, in whose braces capital letters are kept
        assert cited["title"] in readme
        assert cited["identifiers"][0]["value"] in readme
        assert [f"{a['family-names']}, {a['given-names']}" in readme for a in cited["authors"]].count(False) == 0


@dataclasses.dataclass
class Sample:
    """Fields in every layout that a comment may have."""

    plain: int = 0
    # above
    both: int = 0  # behind
    several: tuple[str, ...] = (  # first
        "a",  # inside
    )
    last: str = "# no comment"  # meaning

    def method(self) -> None:
        inner: int = 0  # not a field
        del inner


def test_meanings_are_the_comments_above_and_behind() -> None:
    assert _meanings(Sample) == {"plain": "", "both": "above behind", "several": "first inside", "last": "meaning"}
