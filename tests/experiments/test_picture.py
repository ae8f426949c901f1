"""The picture in README: which episode is shown, and what is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_view import change, needs_chromium, write_run

from hsg.experiments.viewer.picture import HEIGHT, WIDTH, main, worth_showing


def index_of(*groups: tuple[int, list[float], list[str], list[list[float]], set[tuple[int, int]]]) -> dict[str, Any]:
    """An index from (iteration, returns, texts, outcomes (N, M), the flagged (n, m)) of each task."""
    index: dict[str, Any] = {
        "groups": [],
        "texts": [],
        "trajectories": {k: [] for k in ("n", "m", "outcome", "flagged")},
    }
    columns = index["trajectories"]
    for iteration, returns, texts, outcomes, flagged in groups:
        start = len(columns["n"])
        for n, row in enumerate(outcomes):
            for m, outcome in enumerate(row):
                for name, value in {"n": n, "m": m, "outcome": outcome, "flagged": int((n, m) in flagged)}.items():
                    columns[name].append(value)
        first = len(index["texts"])
        index["texts"] += texts
        strategies = [{"n": n, "text": first + n, "return": value} for n, value in enumerate(returns)]
        count = len(columns["n"]) - start
        index["groups"].append({"i": iteration, "start": start, "count": count, "strategies": strategies})
    return index


GOOD = ["look in the attic at first", "look in the cellar at first"]
PLAY = [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]


def test_the_most_different_strategies_and_the_best_episode_are_shown() -> None:
    early = (0, [1.0, 0.0], GOOD, PLAY, set())
    alike = (10, [0.6, 0.4], GOOD, PLAY, {(0, 1)})
    words = (10, [1.0, 0.0], ["look", "go"], PLAY, set())
    twice = (10, [1.0, 0.0], GOOD[:1] * 2, PLAY, set())
    wanted = (9, [0.2, 0.9], GOOD, PLAY[::-1], set())
    assert worth_showing(index_of(early, wanted, alike, words, twice)) == (1, 1, 1)


def test_a_flagged_turn_that_came_to_something_is_shown() -> None:
    plain, flagged = (10, [1.0, 0.0], GOOD, PLAY, {(0, 0), (1, 0)}), (10, [1.0, 0.0], GOOD, PLAY, {(0, 2)})
    assert worth_showing(index_of(flagged, plain)) == (0, 0, 2)
    assert worth_showing(index_of(plain)) == (0, 0, 1)
    assert worth_showing(index_of(plain, plain)) == (1, 0, 1)  # the later one
    equal = (10, [1.0, 0.0], GOOD, [[1.0, 1.0], [0.0, 0.0]], {(0, 1)})
    assert worth_showing(index_of(plain, equal)) == (0, 0, 1)  # turns of the other have no advantage


@pytest.mark.parametrize("groups", [[], [(0, [], [], [[0.5, 1.0]], set())], [(0, [0.5], GOOD[:1], PLAY[:1], set())]])
def test_without_two_strategies_nothing_is_shown(groups: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"RUN must have two strategies .*; train with num_strategies > 1"):
        worth_showing(index_of(*groups))


def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nope")]) == 2
    assert capsys.readouterr().err == f"error: RUN must be a run folder, got '{tmp_path}/nope'; runs/ holds them\n"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main([str(write_run(tmp_path / "r"))]) == 2
    assert (
        capsys.readouterr().err == "error: Chromium must be installed, got None; on Debian: apt-get install chromium\n"
    )


@pytest.mark.slow
@needs_chromium
def test_the_picture_is_taken(tmp_path: Path) -> None:
    from PIL import Image

    run = write_run(tmp_path / "run")
    change(run, lambda records: [r.update({"return": 0.0}) for r in records if r.get("strategy_index") == 1], 1)
    out = tmp_path / "picture.png"
    assert main([str(run), "--out", str(out)]) == 0
    with Image.open(out) as image:
        assert image.size == (WIDTH, HEIGHT)
        assert len(image.convert("RGB").getcolors(1 << 16) or []) > 20  # a page, no blank
