"""pass@k by hand and against every subset; the curve; distinct outcomes."""

from __future__ import annotations

from itertools import combinations

import pytest

from hsg.measure.evaluation import distinct_outcomes, pass_at_k, pass_at_k_curve


def by_enumeration(num_samples: int, num_correct: int, k: int) -> float:
    """The share of all k-subsets of the samples with a correct one among them."""
    samples = [index < num_correct for index in range(num_samples)]
    subsets = list(combinations(samples, k))
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 2, 2, 5 / 6),  # of the six pairs of {right, right, wrong, wrong} one is wrong twice
        (5, 2, 2, 7 / 10),  # 1 - C(3, 2) / C(5, 2)
        (8, 1, 8, 1.0),  # k = n: one correct sample is enough ...
        (8, 0, 8, 0.0),  # ... and none is not
        (5, 3, 3, 1.0),  # only two are wrong, so three cannot all be
    ],
)
def test_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_against_enumeration() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at_k(n, c, k) == pytest.approx(by_enumeration(n, c, k), abs=1e-15), (n, c, k)


def test_exact_at_the_paper_scale() -> None:
    """2,048 samples: pass@1 is the plain mean, pass@n is 0 or 1 exactly, and nothing overflows on the way."""
    assert pass_at_k(2048, 3, 1) == 3 / 2048
    assert pass_at_k(2048, 1, 2048) == 1.0
    assert pass_at_k(2048, 1, 1024) == 0.5  # the one correct sample is in half of the halves
    assert pass_at_k(2048, 0, 2048) == 0.0


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (4, 2, 5, r"k must be in 1\.\.4 \(num_samples\), got 5; draw more samples"),
        (4, 2, 0, r"k must be in 1\.\.4 \(num_samples\), got 0"),
        (4, 5, 1, r"num_correct must be in 0\.\.4, got 5"),
        (4, -1, 1, r"num_correct must be in 0\.\.4, got -1"),
        (0, 0, 1, "num_samples must be at least 1, got 0"),
    ],
)
def test_refused(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_curve_is_the_mean_per_task() -> None:
    """(4, 2) gives 1/2, 5/6, 1; (3, 0) gives 0, 0, 0: the curve ends where the shorter task does."""
    assert pass_at_k_curve([(4, 2), (3, 0)]) == pytest.approx([1 / 4, 5 / 12, 1 / 2], abs=1e-15)
    rising = pass_at_k_curve([(16, 1), (16, 5)])
    assert len(rising) == 16
    assert rising == sorted(rising)
    with pytest.raises(ValueError, match="results must hold at least one task, got 0"):
        pass_at_k_curve([])
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        pass_at_k_curve([(0, 0), (4, 1)])


def test_distinct_outcomes() -> None:
    assert distinct_outcomes([["1-3", "1-3", "2"], ["", "", ""]]) == 1.5  # (2 + 1) / 2
    assert distinct_outcomes([["a", "b", "c"]]) == 3.0
    with pytest.raises(ValueError, match="outcomes must hold at least one task, got 0"):
        distinct_outcomes([])
