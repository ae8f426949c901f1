"""Lines in the place of a bar: one a minute, with how much is done and how long the rest takes."""

from __future__ import annotations

import pytest

from hsg.measure import progress as module
from hsg.measure.progress import Lines, duration, progress


class Watch:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_a_line_a_minute_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter is done after 2 minutes: the rest takes three times as long; within a minute nothing more is said."""
    watch = Watch(monkeypatch)
    with progress(200, "warm start", quiet=True) as lines:
        lines.update(0)
        assert capsys.readouterr().err == ""
        watch.now += 60
        lines.update(0)  # nothing is done yet, and that is said too
        assert capsys.readouterr().err == "warm start: 0 of 200, 1:00 so far\n"
        watch.now += 60
        assert capsys.readouterr().err == ""
        lines.set_postfix(loss="1.2", validation="1.3")
        lines.update(50)
        said = "warm start: 50 of 200, 2:00 so far, about 6:00 left, loss=1.2, validation=1.3\n"
        assert capsys.readouterr().err == said
        watch.now += 59
        lines.update(10)
        assert capsys.readouterr().err == ""
        watch.now += 1
        lines.update(40)
    assert capsys.readouterr().err.startswith("warm start: 100 of 200, 3:00 so far, about 3:00 left")


def test_only_the_first_process_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    lines = progress(10, "evaluation")
    watch.now += 1000
    lines.update(5)
    assert isinstance(lines, Lines)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    with progress(10, "x") as bar:
        bar.update(3)
        assert not isinstance(bar, Lines)
        assert bar.n == 3
    with progress(10, "x", quiet=True) as bar:
        assert isinstance(bar, Lines)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (3723, "1:02:03"), (2 * 86400 + 3 * 3600, "2d 03:00")])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
