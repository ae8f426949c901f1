"""docs/results.md answers every claim, its blocks are of studies that exist, and tables come into it word for word."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hsg.experiments.studies.file import CONFIGS, make_cells, read_study
from hsg.experiments.studies.results import BLOCK, PAGE, fill, main

TEXT = PAGE.read_text(encoding="utf-8")
STUDIES = CONFIGS.parent / "studies"
SCALED = re.compile(r"(ablate-\w+)-(toy|cpu|paper)")
MEASURED = "Measured at commit 1234567, torch 2.9.0."
TABLE = f"|  | success |\n|---|---|\n| a | 0.5 ± 0.1 |\n\n{MEASURED}"


def test_every_claim_is_answered_one_by_one() -> None:
    sections = re.findall(r"^### ([SG]\d): .+\n\n((?:(?!^#).*\n)+)", TEXT, re.MULTILINE)
    assert [name for name, _ in sections] == [f"S{i}" for i in range(1, 8)] + [f"G{i}" for i in range(1, 10)]
    texts = re.split(r"^###? .+$", TEXT, flags=re.MULTILINE)
    heads = re.findall(r"^###? (.+)$", TEXT, re.MULTILINE)
    answers = r"\*\*(?:came out|did not come out|not shown|not testable here)\*\*"
    for head, text in zip(heads, texts[1:], strict=True):
        if re.match(r"[SG]\d: ", head):
            assert re.search(answers, text, re.IGNORECASE), head


def test_blocks_are_of_studies_that_exist() -> None:
    names = [match["name"] for match in BLOCK.finditer(TEXT)]
    for match in BLOCK.finditer(TEXT):
        scaled = SCALED.fullmatch(match["name"])
        stem, scale = scaled.groups() if scaled else (match["name"], None)
        study = read_study(STUDIES / f"{stem}.yaml", scale)
        assert study.name == match["name"]
        assert make_cells(study, [0])
        target = f"make {stem}" if scaled else f"make {stem.replace('_', '-')}"
        assert match["command"] == target + (f" SCALE={scale}" if scale not in (None, "toy") else "")
    toy = {f"{path.stem}-toy" for path in STUDIES.glob("ablate-*.yaml")}
    assert toy <= set(names)
    assert "ablate-components-cpu" in names
    assert len(names) == len(set(names))


def test_a_table_comes_in_word_for_word_and_again(tmp_path: Path) -> None:
    """A second filling replaces the first; what has no table stays as it was."""
    page, studies = tmp_path / "docs" / "results.md", tmp_path / "studies"
    page.parent.mkdir()
    waiting = "<!-- study b: make b -->\nnot measured yet: `make b`\n<!-- end -->"
    page.write_text(
        f"before\n\n<!-- study a: make a -->\nnot measured yet: `make a`\n<!-- end -->\n\n{waiting}\nafter\n"
    )
    (studies / "a").mkdir(parents=True)
    (studies / "a" / "table.md").write_text(TABLE.replace("0.5", "0.4") + "\n")
    assert fill(page, studies) == (["a"], ["b"])
    (studies / "a" / "table.md").write_text(TABLE + "\n")
    (studies / "a" / "plot.png").write_bytes(b"drawn")
    (studies / "a" / "curves.csv").write_text("every seed")
    (page.parent / "results" / "a.csv").write_text("of an older table")
    assert fill(page, studies) == (["a"], ["b"])
    image = "![learning curves and pass@k](results/a.png)"
    filled = f"<!-- study a: make a -->\n`make a`\n\n{TABLE}\n\n{image}\n<!-- end -->"
    assert page.read_text() == f"before\n\n{filled}\n\n{waiting}\nafter\n"
    assert (page.parent / "results" / "a.png").read_bytes() == b"drawn"
    assert sorted(path.name for path in (page.parent / "results").iterdir()) == ["a-curves.csv", "a.png"]


def test_a_page_without_blocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("nothing")
    assert main(["--page", str(tmp_path / "page.md")]) == 2
    assert "the page must be with at least one block" in capsys.readouterr().err
    assert main(["--page", str(tmp_path / "none.md")]) == 2


def test_a_block_that_is_not_closed_takes_no_other_one_with_it(tmp_path, capsys):
    page = tmp_path / "page.md"
    text = "<!-- study a: make a -->\nx\n<!-- study b: make b -->\ny\n<!-- end -->\n"
    page.write_text(text)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "table.md").write_text("| measured |\n")
    assert main(["--page", str(page), "--studies", str(tmp_path)]) == 2
    assert "blocks of the page must be closed by <!-- end -->" in capsys.readouterr().err
    assert page.read_text() == text


def test_bytes_that_are_no_text_are_named(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff<!-- study a: make a -->\nx\n<!-- end -->\n")
    assert main(["--page", str(page)]) == 2
    assert f"got {str(page)!r}: not UTF-8 text" in capsys.readouterr().err


def waiting_page(folder: Path, *names: str) -> Path:
    page = folder / "results.md"
    blocks = [f"<!-- study {name}: make {name} -->\nnot measured yet: `make {name}`\n<!-- end -->\n" for name in names]
    page.write_text("before\n" + "between\n".join(blocks) + "after\n" * 200)
    for name in names:
        (folder / "studies" / name).mkdir(parents=True)
        (folder / "studies" / name / "table.md").write_text(TABLE + "\n")
    return page


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full", ["page", "plot"])
def test_a_full_disk_loses_nothing(full, tmp_path, capsys):
    page = waiting_page(tmp_path, "a")
    (tmp_path / "studies" / "a" / "plot.png").write_bytes(b"new" * 1000 if full == "plot" else b"new")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.png").write_bytes(b"old" * 1000)
    (tmp_path / "results" / "a.csv").write_text("of an older table")
    before = page.read_text()
    with files_of_at_most(1000):
        status = main(["--page", str(page), "--studies", str(tmp_path / "studies")])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: the page, its plots and its CSVs must be files that can be read and written, got ")
    assert error.count("\n") == 1
    assert page.read_text() == before
    assert (tmp_path / "results" / "a.png").read_bytes() == (b"old" * 1000 if full == "plot" else b"new")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["a.csv", "a.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "results.md", "studies"]


@pytest.mark.parametrize(
    "table",
    [
        "",
        "no table\n",
        "| measured |\n",
        TABLE + "\nmore",
        TABLE.replace("\n|---|---|", "") + "\n",
        TABLE[:30] + "\n",
        TABLE[: TABLE.index("\n\n") + 1],
        TABLE[: TABLE.index("torch 2.") + 8],
        TABLE.replace("| a |", "| a | 0.9 |") + "\n",
        TABLE.replace("a |", "a <!-- study b: make b --> |") + "\n",
        TABLE.replace("a |", "a <!-- end --> |") + "\n",
    ],
)
def test_a_table_that_is_not_whole_is_refused_by_name(table, tmp_path, capsys):
    """Empty, half or with marks of its own: then no other table is written either."""
    page = waiting_page(tmp_path, "b", "a")
    (tmp_path / "studies" / "b" / "plot.png").write_bytes(b"drawn")
    (tmp_path / "studies" / "a" / "table.md").write_text(table)
    before = page.read_text()
    assert main(["--page", str(page), "--studies", str(tmp_path / "studies")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the table of a must be whole: ")
    assert error.endswith("table.md'; run `make a` again\n")
    assert error.count("\n") == 1
    assert page.read_text() == before
    assert not (tmp_path / "results").exists()
