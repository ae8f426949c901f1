"""pass@k and distinct outcomes from one set of samples per task (plain Python, exact).

    n samples of a task, c of them correct:  pass@k = 1 - C(n - c, k) / C(n, k)         mean over tasks afterwards

The share of the k-subsets of the samples that hold at least one correct one: the unbiased estimate of solving the task
within k tries.  Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
Deliberately absent: 1 - (1 - c/n)^k, which is biased; confidence intervals; any k above n, of which n samples say nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of one task, in [0, 1].

    num_samples n >= 1, num_correct c in 0..n, k in 1..n, else ValueError.  Source: arXiv 2107.03374, equation 1.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}; sample the task first")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be in 0..{num_samples}, got {num_correct}; count the correct samples")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be in 1..{num_samples} (num_samples), got {k}; draw more samples or lower k")
    # Exact until the one division: near 1 a float would lose the small share of subsets without a correct sample.
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def pass_at_k_curve(results: Sequence[tuple[int, int]]) -> list[float]:
    """Mean pass@k over tasks for k = 1, 2, ..., n (index k - 1); n is the smallest number of samples of a task.

    results  (num_samples, num_correct) of every task; ValueError for none.
    """
    if not results:
        raise ValueError(f"results must hold at least one task, got {len(results)}; sample some tasks first")
    longest = min(num_samples for num_samples, _ in results)
    pass_at_k(longest, 0, 1)  # a task without samples has no curve
    return [sum(pass_at_k(n, c, k) for n, c in results) / len(results) for k in range(1, longest + 1)]


def distinct_outcomes(outcomes: Sequence[Sequence[Hashable]]) -> float:
    """Mean number of different outcomes per task; outcomes[task][sample], e.g. the text that names the failing tests.

    It grows with the number of samples, so compare only equal numbers of them.  ValueError for no task.
    Source: SGE (arXiv 2603.02045), distinct sets of failing tests.
    """
    if not outcomes:
        raise ValueError(f"outcomes must hold at least one task, got {len(outcomes)}; sample some tasks first")
    return sum(len(set(samples)) for samples in outcomes) / len(outcomes)
