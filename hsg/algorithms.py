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

SGE = {
    "strategy.per": "turn",
    "judge.enabled": False,
    "loss.level_reduction": "joint",
    "advantage.turn_baseline": "trajectory",
    "temperature.strategy": 1.2,
    "temperature.action": 0.7,
    "reflection.p_bad": 0.25,
    "reflection.p_good": 0.1,
}

IMPLIED: dict[str, dict[str, Any]] = {
    "turn": {"loss.level_reduction": "joint"},
}
"""What a value of strategy.per that is asked for brings along: strategies of turns are no level of their own."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "strata": {},
    "sge": SGE,
    "grpo": FLAT,
}
