"""Lines at the terminal: what they hold, how they align, how long the rest takes."""

from __future__ import annotations

import pytest

from hsg.config.loading import make_config
from hsg.measure.progress import Lines
from hsg.run.console import Console, columns, evaluated, heading, plain

VALUES = {
    "reward/outcome": 0.372, "reward/success": 0.177, "advantage/dead_groups": 0.125, "update/approx_kl": 0.00021,
    "update/entropy": 0.3208, "time/iteration_seconds": 10.0, "time/rollout_seconds": 4.1, "time/update_seconds": 2.1,
    "time/selection_seconds": 0.4,
}  # fmt: skip


def console(**given: object) -> Console:
    interactive = given.pop("interactive", False)
    assert isinstance(interactive, bool)
    return Console(make_config(given), interactive=interactive)


def test_plain_line_by_hand() -> None:
    assert plain(3, 100, VALUES, 970.0) == (
        "iteration 3/100  outcome 0.372  success 0.177  dead 0.125  kl 0.000  entropy 0.321  "
        "10.0s (rollout 4.1, update 2.1)  eta 16:10"
    )


def test_columns_stand_under_their_names() -> None:
    names, numbers = heading(VALUES), columns(3, 100, VALUES, 970.0)
    for name, number in (
        ("iteration", "3/100"),
        ("success", "0.177"),
        ("kl", "2e-04"),
        ("seconds", "10.0"),
        ("left", "16:10"),
    ):
        assert names.index(name) + len(name) == numbers.index(number) + len(number)
    assert "flagged" not in names  # this run has no judge
    assert "turns" not in names
    assert numbers.endswith("rollout 4.1, update 2.1")


def test_rest_goes_at_the_pace_of_the_last_ten(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console(train={"iterations": 30})
    for i in range(20):
        shown.line(i + 1, VALUES | {"time/iteration_seconds": 100.0 if i < 10 else 6.0}, spent=0.0, played=0)
    assert shown.remaining(20) == pytest.approx(60.0)
    assert capsys.readouterr().out.splitlines()[-1].endswith("eta 1:00")


def test_a_time_limit_may_end_it_before() -> None:
    shown = console(train={"iterations": 1000, "max_seconds": 25.0})
    shown.line(1, VALUES, spent=10.0, played=0)
    assert shown.remaining(1) == pytest.approx(15.0)
    shown.line(2, VALUES, spent=20.0, played=0)
    shown.line(3, VALUES, spent=30.0, played=0)
    assert shown.remaining(3) == 0.0


def test_a_limit_of_turns_may_end_it_before() -> None:
    """40 turns an iteration, 100 at most: after 40 two more iterations reach them, after 80 one, after 120 none."""
    shown = console(train={"iterations": 1000, "max_environment_turns": 100})
    for iteration, left in ((1, 20.0), (2, 10.0), (3, 0.0)):
        shown.line(iteration, VALUES | {"cost/environment_turns": 40.0}, spent=0.0, played=40 * iteration)
        assert shown.remaining(iteration) == pytest.approx(left)
    shown = console(train={"iterations": 3, "max_environment_turns": 10**6})
    shown.line(1, VALUES | {"cost/environment_turns": 40.0}, spent=0.0, played=40)
    assert shown.remaining(1) == pytest.approx(20.0)  # the iterations end it first


def test_heading_comes_back_at_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    for interactive, quiet, headings in ((True, False, 3), (False, False, 0), (True, True, 0)):
        shown = console(log={"quiet": quiet}, interactive=interactive)
        for i in range(41):
            shown.line(i + 1, VALUES, spent=10.0 * i, played=0)
        lines = capsys.readouterr().out.splitlines()
        assert sum("where the time went" in line for line in lines) == headings
        assert len(lines) == 41 + headings
        assert (lines[-1].startswith("iteration 41/")) == (headings == 0)


def test_quiet_hides_the_bar() -> None:
    assert isinstance(console(log={"quiet": True}).bar("x", 3), Lines)


def test_an_evaluation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """9 of 20 tasks: Wilson's interval by hand is (0.45 + 1.96^2/40 +- 1.96 sqrt(0.45 0.55/20 + 1.96^2/1600)) / (1 + 1.96^2/20)."""
    record = {"iteration": 5, "label": "training", "split": "dev", "num_tasks": 21, "num_failed": 1}
    console().evaluation({**record, "success": 0.45, "score": 0.512, "turns": 6.24})
    assert capsys.readouterr().out == (
        "evaluation at iteration 5 (training): dev, 20 tasks, success 0.450 [0.26, 0.66], score 0.512, 6.2 turns\n"
    )
    assert evaluated({**record, "num_failed": 21}).endswith("dev, 0 tasks, every episode failed")
