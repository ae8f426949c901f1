"""What each value of `algorithm` sets: a bundle of options, as dotted keys. The file and --set come after and win.

A method is nothing but its bundle: no code anywhere asks for an algorithm's name.  Deliberately absent: bundles that
know paper-scale numbers (those are config files).
"""

from __future__ import annotations

from typing import Any

FLAT = {
    "strategy.per": "none",
    "judge.enabled": False,
    "loss.level_reduction": "joint",
    "advantage.turn_baseline": "trajectory",
}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "strata": {},
    "grpo": FLAT,
}
