"""What many samples of the same tasks say of a policy (SGE, arXiv 2603.02045): what it can reach, and how it explores.

    samples (tasks, n)  ->  pass@k for k = 1..n, distinct outcomes, entropy of strategy and action tokens apart,
                            distance between the strategies of one task, tokens that strategies cost

Entropy is estimated by what it is the mean of: -log p of the tokens that were sampled, at the temperature each was sampled
at, in nats per token.  An outcome is what the environment says of the end: its feedback (the set of failing tests, the
state that was reached), or success and score where it says nothing.
Deliberately absent: samples whose environment broke (they are counted apart), greedy play (it has no entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from hsg.measure.pass_at_k import distinct_outcomes, pass_at_k_curve
from hsg.strategy.reflection import attempt_of
from hsg.strategy.selector import mean_pairwise_distance
from hsg.types import Trajectory


def sample_measures(
    samples: Sequence[Sequence[Trajectory]], embed: Callable[[Sequence[str]], Tensor] | None = None
) -> dict[str, Any]:
    """pass@k, distinct outcomes, entropies and more of samples[task][sample].

    Tasks without a whole sample are left out, and so is what is undefined.

    embed  texts -> (n, D), for the distance between strategies; None: no distance
    """
    whole = [[t for t in row if t.valid] for row in samples]
    counted = [row for row in whole if row]
    measures: dict[str, Any] = {
        "num_tasks": len(counted),
        "num_samples": min(map(len, counted), default=0),
        "num_failed": sum(len(row) - len(kept) for row, kept in zip(samples, whole, strict=True)),
    }
    if not counted:
        return measures
    measures["pass_at_k"] = pass_at_k_curve([(len(row), sum(t.success for t in row)) for row in counted])
    measures["score"] = _mean([sum(t.score for t in row) / len(row) for row in counted])
    measures["distinct_outcomes"] = distinct_outcomes([[outcome_of(t) for t in row] for row in counted])
    measures["solved_share"] = _mean([any(t.success for t in row) for row in counted])
    turns = [turn for row in counted for t in row for turn in t.turns]
    measures["tokens_per_turn"] = _mean([turn.num_sampled for turn in turns])
    measures["strategy_tokens_per_turn"] = _mean([turn.num_strategy_tokens for turn in turns])
    parts = [surprise(t) for row in counted for t in row]
    for place, name in enumerate(("strategy_entropy", "action_entropy")):
        measures[name] = _mean([value for part in parts for value in part[place]])
    distances = [] if embed is None else [d for row in counted if (d := _distance(row, embed)) is not None]
    if distances:
        measures["strategy_distance"] = _mean(distances)
    return {name: value for name, value in measures.items() if value is not None}


def outcome_of(trajectory: Trajectory) -> Hashable:
    """What the environment says of the end; equal values are one outcome."""
    if trajectory.feedback is not None:
        return trajectory.feedback
    return trajectory.success, trajectory.score


def surprise(trajectory: Trajectory) -> tuple[list[float], list[float]]:
    """-log p (nats) of every sampled token: of strategies that stand in turns, and of all others."""
    strategy: list[float] = []
    action: list[float] = []
    for turn in trajectory.turns:
        values = (-trajectory.rows[turn.row].logprobs[turn.start : turn.stop]).tolist()
        strategy += values[: turn.num_strategy_tokens]
        action += values[turn.num_strategy_tokens :]
    return strategy, action


def _distance(row: Sequence[Trajectory], embed: Callable[[Sequence[str]], Tensor]) -> float | None:
    """Mean pairwise cosine distance between what the samples of one task were guided by; None: fewer than two."""
    texts = [" ".join(attempt.strategies) for t in row if (attempt := attempt_of(t)) is not None]
    return float(mean_pairwise_distance(embed(texts))) if len(texts) > 1 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(map(float, values)) / len(values) if values else None
