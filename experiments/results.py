"""Put measured tables into docs/results.md, word for word as the studies wrote them; nothing is typed by hand.

    <!-- study ablate-delta-toy: make ablate-delta -->      runs/studies/ablate-delta-toy/table.md, and its plot.png; in
                                                            docs/results also its table.csv and curves.csv: every seed
    not measured yet: `make ablate-delta`                   what stands there until the study has been run
    <!-- end -->

Deliberately absent: any sentence about what a table means; that is written around it, by somebody who has read it.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hsg.arguments import Parser, refuse
from hsg.checks import require

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
BLOCK = re.compile(r"<!-- study (?P<name>\S+): (?P<command>.+?) -->\n(?:(?!<!-- study ).)*?<!-- end -->", re.DOTALL)


def fill(page: Path, studies: Path) -> tuple[list[str], list[str]]:
    """Write what was measured into the page and its plots beside it. Returns the studies that were found, and the others."""
    text = _read(page)
    unclosed = text.count("<!-- study ") - len(BLOCK.findall(text))
    require(not unclosed, "blocks of the page", "closed by <!-- end -->", f"{unclosed} in {str(page)!r} that are not")
    require(bool(BLOCK.search(text)), "the page", "with at least one block <!-- study NAME: COMMAND -->", str(page))
    found: list[str] = []
    missing: list[str] = []

    def block(match: re.Match[str]) -> str:
        name, command = match["name"], match["command"]
        table = studies / name / "table.md"
        if not table.is_file():
            missing.append(name)
            return match[0]
        found.append(name)
        lines = [f"<!-- study {name}: {command} -->", f"`{command}`", "", _read(table).strip()]
        (page.parent / "results").mkdir(exist_ok=True)
        for kept, ending in (("table.csv", ".csv"), ("curves.csv", "-curves.csv"), ("plot.png", ".png")):
            copy = page.parent / "results" / f"{name}{ending}"
            copy.unlink(missing_ok=True)  # of an older table
            if (studies / name / kept).is_file():
                shutil.copy(studies / name / kept, copy)
        if (studies / name / "plot.png").is_file():
            lines += ["", f"![learning curves and pass@k](results/{name}.png)"]
        return "\n".join([*lines, "<!-- end -->"])

    page.write_text(BLOCK.sub(block, text), encoding="utf-8")
    return found, missing


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
    except (ValueError, OSError) as error:
        return refuse(error)
    print(f"{options.page}: {len(found)} tables written; not measured yet: {', '.join(missing) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
