"""How sure is a share, and is one policy better than another on the same tasks? (standard library only)

    wilson          (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    sign flips      under "no difference" each task's difference may as well have the other sign: the share of sign
                    patterns whose sum is at least as far from zero as what was seen

Sources: Wilson 1927, "Probable inference"; Fisher 1935, "The design of experiments" (permutation test for pairs).
Deliberately absent: normal approximations, which fail where a benchmark is small or nearly solved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import sqrt

EXACT = 14  # pairs that differ up to which all sign patterns are counted


def wilson_interval(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """(low, high) of a share in [0, 1] seen among `count` independent trials; z = 1.96 for 95 %. ValueError for no trial.

    Trials that depend on each other count as fewer: give the number of tasks, not of samples.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}; evaluate some tasks first")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}; divide by the number of trials")
    middle = share + z * z / (2 * count)
    reach = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def paired_test(differences: Sequence[float], *, num_draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of "the mean difference is zero", one difference per task; 1.0 where nothing differs.

    Exact for up to 14 differences that are not zero, else from `num_draws` random sign patterns (never below
    1 / (num_draws + 1)). ValueError for no task.
    """
    if not differences:
        raise ValueError(
            f"differences must hold at least one task, got {len(differences)}; choose tasks both have played"
        )
    sizes = [abs(d) for d in differences if d != 0]
    seen = abs(sum(differences)) - 1e-12
    if not sizes:
        return 1.0
    if len(sizes) <= EXACT:
        patterns = list(product((1, -1), repeat=len(sizes)))
        far = sum(abs(sum(sign * size for sign, size in zip(signs, sizes, strict=True))) >= seen for signs in patterns)
        return far / len(patterns)
    rng = random.Random(seed)
    far = sum(abs(sum(size if rng.random() < 0.5 else -size for size in sizes)) >= seen for _ in range(num_draws))
    return (far + 1) / (num_draws + 1)
