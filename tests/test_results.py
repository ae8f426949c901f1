"""docs/results.md answers every claim, its blocks are of studies that exist, and tables come into it word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.results import BLOCK, PAGE, fill, main
from experiments.study_file import CONFIGS, make_cells, read_study

TEXT = PAGE.read_text(encoding="utf-8")
STUDIES = CONFIGS.parent / "studies"
SCALED = re.compile(r"(ablate-\w+)-(toy|cpu|paper)")
TABLE = "|  | success |\n|---|---|\n| a | 0.5 ± 0.1 |"


def test_every_claim_is_answered_one_by_one() -> None:
    sections = re.findall(r"^### ([SG]\d): .+\n\n((?:(?!^#).*\n)+)", TEXT, re.MULTILINE)
    assert [name for name, _ in sections] == [f"S{i}" for i in range(1, 8)] + [f"G{i}" for i in range(1, 10)]


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
    (studies / "a" / "table.md").write_text("old\n")
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
