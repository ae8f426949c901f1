"""The picture of the viewer in README, from a real run: the page of a run folder in a headless Chromium.

    make picture                    trains the toy world (four minutes) and writes docs/viewer.png
    python -m hsg.experiments.viewer.picture runs/NAME --out picture.png

What is shown is chosen by a rule, not by hand (`worth_showing`).  Bad input and a missing Chromium are one line, exit
status 2.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "viewer.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1440, 860
COLOURS = 128  # of the palette: text stays sharp, and the file a third of its size
FEWEST_WORDS = 5  # of a strategy that says something
LATE = 0.25  # of the iterations: strategies and actions have learned something by then


def worth_showing(index: dict[str, Any]) -> tuple[int, int, int]:
    """(group, strategy, rollout) of a run's index, of its late iterations.

    Of the tasks whose strategies are different sentences the one whose strategies were worth the most different returns; the
    best strategy; under it the best rollout, if possible one with a flagged turn. Ties go to different rollouts, then to
    such a turn, then to the later task. ValueError where no late task has two strategies.
    """
    columns, last = index["trajectories"], max((group["i"] for group in index["groups"]), default=0)
    best: tuple[tuple[bool, float, bool, bool, int], tuple[int, int, int]] | None = None
    for number, group in enumerate(index["groups"]):
        returns = {s["n"]: s["return"] for s in group["strategies"] if s["return"] is not None}
        if group["i"] < LATE * last or len(returns) < 2:
            continue
        top = max(returns, key=lambda n: (returns[n], -n))
        places = [j for j in range(group["start"], group["start"] + group["count"]) if columns["n"][j] == top]
        if not places:
            continue
        outcome = {j: columns["outcome"][j] or 0.0 for j in places}
        shown = max(places, key=lambda j: (bool(columns["flagged"][j] and outcome[j]), outcome[j]))
        texts = [index["texts"][s["text"]] for s in group["strategies"]]
        sentences = len(set(texts)) == len(texts) and all(len(text.split()) >= FEWEST_WORDS for text in texts)
        spread = round(max(returns.values()) - min(returns.values()), 1)
        learns = max(outcome.values()) > min(outcome.values())  # else its turns have no advantage
        key = (sentences, spread, learns, bool(columns["flagged"][shown]), number)
        if best is None or key > best[0]:
            best = key, (number, top, columns["m"][shown])
    if best is None:
        raise ValueError("RUN must have two strategies of one task to show, got none; train with num_strategies > 1")
    return best[1]


def take(chromium: str, page: Path, fragment: str, out: Path) -> None:
    """One picture of a page of `hsg view`. RuntimeError where Chromium makes none."""
    with tempfile.TemporaryDirectory(prefix="hsg-picture-", ignore_cleanup_errors=True) as folder:
        shot = Path(folder) / "shot.png"
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
                   f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=20000", f"--screenshot={shot}",
                   page.resolve().as_uri() + fragment]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not shot.is_file():
            raise RuntimeError(f"Chromium took no picture, exit status {done.returncode}: {done.stderr[-300:]}")
        from PIL import Image

        with Image.open(shot) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description="Write the picture of the viewer from a run folder.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder with trajectories")
    parser.add_argument("--out", type=Path, default=OUT, help="the PNG file (docs/viewer.png)")
    try:
        from hsg.experiments.viewer.folder import read_run

        options = parser.parse_args(arguments)
        require(options.run.is_dir(), "RUN", "a run folder", str(options.run), "runs/ holds them")
        chromium = next((found for name in NAMES if (found := shutil.which(name))), None)
        require(chromium is not None, "Chromium", "installed", chromium, "on Debian: apt-get install chromium")
        assert chromium is not None
        group, strategy, rollout = worth_showing(read_run(options.run, "chunk", lambda *_: None))
        with tempfile.TemporaryDirectory(prefix="hsg-picture-") as folder:
            page = Path(folder) / "view.html"
            view = [sys.executable, "-m", "hsg.experiments.view", str(options.run), "--out", str(page), "--no-open"]
            subprocess.run(view, check=True, stdout=subprocess.DEVNULL)
            take(chromium, page, f"#tab=episodes&a=0&group={group}&n={strategy}&m={rollout}", options.out)
    except ValueError as error:
        return refuse(error)
    print(f"{options.out}  ({options.out.stat().st_size / 1e3:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
