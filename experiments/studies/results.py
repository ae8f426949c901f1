"""Put measured tables into docs/results.md, word for word as the studies wrote them; nothing is typed by hand.

    <!-- study ablate-delta-toy: make ablate-delta -->      runs/studies/ablate-delta-toy/table.md, and its plot.png; in
                                                            docs/results also its table.csv and curves.csv: every seed
    not measured yet: `make ablate-delta`                   what stands there until the study has been run
    <!-- end -->

Deliberately absent: any sentence about what a table means; that is written around it, by somebody who has read it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require
from hsg.run.files import write_whole

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"
BLOCK = re.compile(r"<!-- study (?P<name>\S+): (?P<command>.+?) -->\n(?:(?!<!-- study ).)*?<!-- end -->", re.DOTALL)
TABLE = re.compile(r"(?P<rows>\|.*\|\n\|(?:---\|)+\n(?:\|.*\|\n)+)\nMeasured at .+\.\n")
"""A whole table.md: half a file ends before the sentence of its commits does."""


def fill(page: Path, studies: Path) -> tuple[list[str], list[str]]:
    """Write what was measured into the page and its plots beside it. Returns the studies that were found, and the others.

    ValueError where the page or a table is not whole: then nothing was written.
    """
    text = _read(page)
    unclosed = text.count("<!-- study ") - len(BLOCK.findall(text))
    require(not unclosed, "blocks of the page", "closed by <!-- end -->", f"{unclosed} in {str(page)!r} that are not")
    require(bool(BLOCK.search(text)), "the page", "with at least one block <!-- study NAME: COMMAND -->", str(page))
    found: list[str] = []
    missing: list[str] = []
    copies: list[tuple[Path, Path]] = []

    def block(match: re.Match[str]) -> str:
        name, command = match["name"], match["command"]
        table = studies / name / "table.md"
        if not table.exists():
            missing.append(name)
            return match[0]
        found.append(name)
        lines = [f"<!-- study {name}: {command} -->", f"`{command}`", "", _read_table(table, name, command)]
        for kept, ending in (("table.csv", ".csv"), ("curves.csv", "-curves.csv"), ("plot.png", ".png")):
            copies.append((studies / name / kept, page.parent / "results" / f"{name}{ending}"))
        if (studies / name / "plot.png").is_file():
            lines += ["", f"![learning curves and pass@k](results/{name}.png)"]
        return "\n".join([*lines, "<!-- end -->"])

    filled = BLOCK.sub(block, text)
    for source, copy in copies:
        copy.parent.mkdir(exist_ok=True)
        if source.is_file():
            write_whole(copy, source.read_bytes())
    write_whole(page, filled)
    for source, copy in copies:  # last: until here the page may show it
        if not source.is_file():
            copy.unlink(missing_ok=True)  # of an older table
    return found, missing


def _read_table(path: Path, name: str, command: str) -> str:
    """The text of a table.md. ValueError where it is not as a study writes it, or would end or open a block of the page."""
    text = _read(path)
    whole = TABLE.fullmatch(text)
    # A row with a bar too many or too few has its figures in the columns of others.
    bars = {len(re.findall(r"(?<!\\)\|", row)) for row in whole["rows"].splitlines()} if whole else set()
    rule = "whole: a Markdown table and the commits that it was measured at, without <!-- marks -->"
    require(
        len(bars) == 1 and "<!--" not in text and "-->" not in text,
        f"the table of {name}", rule, str(path), f"run `{command}` again",
    )  # fmt: skip
    return text.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"a page or a table must be a readable file, got {str(path)!r}: {reason}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=Path, default=Path("runs/studies"), help="folder of results (runs/studies)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (docs/results.md)")
    try:
        options = parser.parse_args(arguments)
        found, missing = fill(options.page, options.studies)
    except ValueError as error:
        return refuse(error)
    except OSError as error:  # a full disk, say: every file is as it was, or new and whole
        where = error.filename2 or error.filename or str(options.page)
        rule = "the page, its plots and its CSVs must be files that can be read and written"
        return refuse(ValueError(f"{rule}, got {where!r}: {error.strerror}"))
    print(
        f"{options.page}: {len(found)} tables written; no study here, left as they are: {', '.join(missing) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
