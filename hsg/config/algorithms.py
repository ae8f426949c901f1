"""What each value of `algorithm` sets: a bundle of options, as dotted keys. The file and --set come after and win.

A method is nothing but its bundle: no code anywhere asks for an algorithm's name.  docs/provenance.md says where each value
comes from.  Deliberately absent: bundles that know paper-scale numbers (those are config files).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FLAT = {
    "strategy.per": "none",
    "judge.enabled": False,
    "loss.level_reduction": "joint",
    "advantage.turn_baseline": "trajectory",
}

_REACT = "Answer with a line that begins with 'Thought:' and reasons about what to do next, then with {what}."
_ACT = "Answer with {what} and nothing else."
_SEEN = (
    "You are carrying out a task in a text environment. Turn 1. The task and what you see:\n\n{observation}{admissible}"
)
_WINDOW = (
    "You are carrying out a task in a text environment. The task and what you saw at first:\n\n"
    "{first_observation}{strategy_part}{history}\n\nTurn {turn}. You see now:\n{observation}{admissible}"
)


def _untrained(ask: str) -> dict[str, Any]:
    """A method that only asks: the flat prompts with another last sentence, and no training."""
    first = ask.replace("{what}", "exactly one action between <action> and </action>")
    again = ask.replace("{what}", "the next action between <action> and </action>")
    templates = {
        "action_first_plain": f"{_SEEN}\n\n{first}",
        "action_next": f"Turn {{turn}}.\n{{observation}}{{admissible}}\n\n{again}",
        "window": f"{_WINDOW}\n\n{again}",
    }
    return {**FLAT, "prompts.templates": templates, "train.enabled": False, "evaluation.final": True}


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
    "dr_grpo": {**FLAT, "advantage.std": "none", "loss.aggregation": "seq-mean-token-sum-norm"},
    "dapo": {
        **FLAT,
        "loss.clip_high": 0.28,
        "rollout.max_refills": 3,
        "reward.length_penalty": True,
        "reward.length_penalty_start": 0.8,
    },
    "rloo": {**FLAT, "advantage.estimator": "rloo"},
    "reinforce++": {**FLAT, "advantage.estimator": "reinforce++", "advantage.whiten": True},
    "ppo": {**FLAT, "advantage.estimator": "gae", "advantage.whiten": True},
    "gigpo": {
        **FLAT,
        "advantage.estimator": "gigpo",
        "advantage.gamma": 0.95,
        "reward.scale": 10.0,
        "reward.invalid_action_penalty": 0.1,
        "rollout.context": "window",
    },
    "scaling_inter": {**FLAT, "rollout.turns_per_stage": 10},
    "entropy_adv": {**FLAT, "advantage.entropy_bonus": 0.4},
    "rnd": {**FLAT, "rnd.weight": 0.1},
    "rlad": {
        "sigma": 1.0,
        "delta": 1.0,
        "judge.enabled": False,
        "advantage.turn_baseline": "trajectory",
        "loss.kl_coef": 0.001,
        "strategy.dropout": 0.25,
    },
    "prompting": _untrained(_ACT),
    "react": _untrained(_REACT),
}


def _has_strategies(c: Any) -> bool:
    return c.strategy.per != "none"


def _per_episode(c: Any) -> bool:
    return c.strategy.per == "episode"


def _reflects(c: Any) -> bool:
    return c.reflection.p_bad + c.reflection.p_good > 0


def _estimates(*names: str) -> Callable[[Any], bool]:
    return lambda c: c.advantage.estimator in names


def _divides(c: Any) -> bool:
    """Whether some group is divided by its std: that of actions, or of the strategies."""
    return c.advantage.estimator in ("group", "gigpo") or _per_episode(c)


USED_WHEN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("sigma", "delta", "selector", "strategy.max_tokens", "strategy.dropout", "model.encoder",
         "evaluation.without_strategy"),
        _per_episode,
    ),
    "temperature.strategy": _has_strategies,
    **dict.fromkeys(("reflection.capacity", "reflection.scope"), _reflects),
    "kappa": lambda c: c.judge.enabled,
    **dict.fromkeys(("judge.model", "judge.temperature", "judge.max_tokens"), lambda c: c.judge.enabled),
    "advantage.turn_baseline": _estimates("group"),
    "advantage.std": _divides,
    "advantage.eps": lambda c: c.advantage.whiten or (c.advantage.std != "none" and _divides(c)),
    "advantage.gamma": _estimates("reinforce++", "gigpo", "gae"),
    "advantage.entropy_cap": lambda c: c.advantage.entropy_bonus > 0,
    "reward.turns": _estimates("reinforce++", "gigpo", "gae"),
    "reward.length_penalty_start": lambda c: c.reward.length_penalty,
    "reinforce": _estimates("reinforce++"),
    "gigpo": _estimates("gigpo"),
    "critic": _estimates("gae"),
    **dict.fromkeys(("rnd.hidden_size", "rnd.output_size", "rnd.lr", "rnd.epochs"), lambda c: c.rnd.weight > 0),
    "loss.strategy_weight": lambda c: c.loss.level_reduction == "separate" and _per_episode(c),
    "loss.action_weight": lambda c: c.loss.level_reduction == "separate",
    **dict.fromkeys(("model.lora.alpha", "model.lora.targets"), lambda c: c.model.lora.rank > 0),
    "loss.kl_estimator": lambda c: c.loss.kl_coef > 0,
    "loss.token_limit": lambda c: c.loss.aggregation == "seq-mean-token-sum-norm",
    "rollout.window_turns": lambda c: c.rollout.context == "window",
    "rollout.iterations_per_stage": lambda c: c.rollout.turns_per_stage is not None,
}  # fmt: skip
"""Options and sections -> when a resolved configuration reads them; what is not here always is."""
