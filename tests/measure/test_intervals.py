"""Intervals and paired tests against figures worked out by hand."""

from __future__ import annotations

import pytest

from hsg.measure import intervals
from hsg.measure.intervals import EXACT, paired_test, wilson_interval


def test_wilson_by_hand() -> None:
    """z = 2, n = 4, p = 1/2: (1/2 + 1/2 -+ 2 sqrt(1/16 + 1/16)) / 2 = 1/2 -+ 0.353553."""
    assert wilson_interval(0.5, 4, z=2.0) == pytest.approx((0.1464466, 0.8535534))
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)  # z^2 / (n + z^2)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)


def test_wilson_narrows_with_the_root_of_the_count() -> None:
    widths = [high - low for low, high in (wilson_interval(0.3, n) for n in (1000, 4000))]
    assert widths[0] / widths[1] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("share", "count"), [(0.5, 0), (1.1, 4), (-0.1, 4)])
def test_wilson_refuses(share: float, count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        wilson_interval(share, count)


def test_paired_test_counts_sign_patterns() -> None:
    assert paired_test([1, 1, 1, 1]) == 2 / 16  # only all + and all - are as far
    assert paired_test([1, 1, 1, -1]) == 10 / 16  # those and the 2 * 4 with one other sign
    assert paired_test([3, 1]) == 2 / 4
    assert paired_test([3, -1]) == 1.0
    assert paired_test([0, 0]) == 1.0
    assert paired_test([1, 0, 1, 0, 1, 1]) == 2 / 16  # ties say nothing
    with pytest.raises(ValueError, match="at least one task"):
        paired_test([])


def test_draws_agree_with_the_exact_test(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [1.0] * 11 + [-1.0] * 3
    exact = paired_test(differences)
    assert len(differences) == EXACT
    monkeypatch.setattr(intervals, "EXACT", 0)
    assert paired_test(differences, num_draws=20_000) == pytest.approx(exact, abs=0.01)
    assert paired_test([1.0] * 40) == pytest.approx(1 / 10_001)
