"""The pages of docs/ keep their word: the reference is what the dataclasses say, options and metrics that are named exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from experiments.reference import OUT, _meanings, reference
from hsg.configfile import _all_keys

ROOT = Path(__file__).resolve().parents[1]


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


def test_troubleshooting_names_options_and_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", text)
    options = {name for name in quoted if not name.endswith((".jsonl", ".yaml"))}
    assert len(options) > 25
    assert sorted(options - set(_all_keys())) == []
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hsg").glob("*.py"))
    metrics = set(re.findall(r"`((?:advantage|update|rollout|judge|strategy|reward)/[a-z_]+)`", text))
    assert len(metrics) > 8
    # Names are put together where they are made: the last part, without the level before it, stands in the code.
    ends = {name: name.split("/")[1].removeprefix("strategy_") for name in metrics}
    assert sorted(name for name, end in ends.items() if f'{end}"' not in sources) == []


def test_citation_is_complete_yaml() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [reference["identifiers"][0]["value"] for reference in citation["references"]] == [
        "arXiv:2605.06642",
        "arXiv:2603.02045",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for cited in citation["references"]:
        assert cited["title"] in " ".join(readme.split())


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


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
