"""From records to returns and advantages: the one place where trajectories become tensors with axes (P, N, M, K).

    outcomes (P, N, M), flags, penalties  ->  returns  ->  advantages        the maths itself is in advantages.py

A trajectory that failed by the environment's fault has no outcome: it is a member of nothing and trains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hsg.advantages import (
    count_penalty_only_groups,
    group_advantages,
    group_metrics,
    strategy_returns,
    turn_advantages,
    turn_returns,
)
from hsg.config import Config, RewardConfig
from hsg.types import Judgment, Strategy, Trajectory


@dataclass(frozen=True, eq=False)
class Credit:
    """Returns and advantages of one iteration, float64; NaN returns and 0.0 advantages where something is invalid.

    strategy_*  (P, N), None for a method without strategies      turn_*  (P, N, M, K), padded to the longest
    """

    outcomes: Tensor  # (P, N, M)
    valid: Tensor  # (P, N, M) bool
    turn_mask: Tensor  # (P, N, M, K) bool: the turn exists and its trajectory is valid
    turn_returns: Tensor
    turn_advantages: Tensor
    turn_format_penalties: Tensor
    turn_length_penalties: Tensor
    strategy_returns: Tensor | None = None
    strategy_advantages: Tensor | None = None
    strategy_format_penalties: Tensor | None = None
    strategy_length_penalties: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def length_penalty(num_tokens: int, token_limit: int, config: RewardConfig) -> float:
    """0 up to `length_penalty_start` of the token limit, then linear to -1 at the limit (spec 1.2, form ours)."""
    if not config.length_penalty:
        return 0.0
    start = config.length_penalty_start
    return min(0.0, -(num_tokens / token_limit - start) / (1 - start))


def format_penalty(parsed: bool, config: RewardConfig) -> float:
    """A number <= 0 for a response whose tags do not parse."""
    return 0.0 if parsed else 0.0 - config.format_penalty  # never -0.0


def assign_credit(
    config: Config,
    strategies: Sequence[Sequence[Strategy]] | None,
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
    judgments: Sequence[Sequence[Sequence[Judgment]]],
) -> Credit:
    """Both levels' returns and advantages. strategies (P, N) or None; trajectories and judgments (P, N, M)."""
    shape = (len(trajectories), len(trajectories[0]), len(trajectories[0][0]))
    num_turns = max((len(t.turns) for task in trajectories for group in task for t in group), default=0)
    outcomes = torch.full(shape, math.nan, dtype=torch.float64)
    turn_mask = torch.zeros(*shape, num_turns, dtype=torch.bool)
    flagged = torch.zeros_like(turn_mask)
    formats, lengths, others = (torch.zeros(*shape, num_turns, dtype=torch.float64) for _ in range(3))
    for p, n, m in ((p, n, m) for p in range(shape[0]) for n in range(shape[1]) for m in range(shape[2])):
        trajectory = trajectories[p][n][m]
        if trajectory.valid:
            assert trajectory.outcome is not None
            outcomes[p, n, m] = trajectory.outcome * config.reward.scale
            turn_mask[p, n, m, : len(trajectory.turns)] = True
        for t in judgments[p][n][m].flagged:
            flagged[p, n, m, t] = True
        for k, turn in enumerate(trajectory.turns):
            formats[p, n, m, k] = format_penalty(turn.parsed, config.reward)
            lengths[p, n, m, k] = length_penalty(turn.num_tokens, turn.token_limit, config.reward)
            if turn.parsed and not turn.valid:  # an unparseable response has its own penalty
                others[p, n, m, k] = -config.reward.invalid_action_penalty
    valid = ~outcomes.isnan()

    penalties = formats + lengths + others
    returns = turn_returns(outcomes, flagged, config.kappa, turn_mask=turn_mask, penalties=penalties)
    options = config.advantage
    advantages = turn_advantages(
        returns,
        outcomes,
        turn_mask=turn_mask,
        valid=valid,
        baseline=options.turn_baseline,
        std=options.std,
        eps=options.eps,
    )  # (P, N, M, K)
    metrics = {f"advantage/{k}": v for k, v in group_metrics(advantages, group_axes=2).items()}
    metrics["advantage/penalty_only_groups"] = float(count_penalty_only_groups(returns, outcomes, turn_mask=turn_mask))
    credit = Credit(outcomes, valid, turn_mask, returns, advantages, formats, lengths, metrics=metrics)
    if strategies is None:
        return credit

    s_formats = torch.tensor(
        [[format_penalty(s.parsed, config.reward) for s in row] for row in strategies], dtype=torch.float64
    )
    s_lengths = torch.tensor(
        [[length_penalty(s.num_tokens, s.token_limit, config.reward) for s in row] for row in strategies],
        dtype=torch.float64,
    )
    s_returns, s_valid = strategy_returns(
        outcomes, config.delta, valid=valid, penalties=s_formats + s_lengths
    )  # (P, N)
    s_advantages = group_advantages(s_returns, std=options.std, eps=options.eps, valid=s_valid)  # (P, N)
    metrics |= {f"advantage/strategy_{k}": v for k, v in group_metrics(s_advantages).items()}
    return replace(
        credit,
        strategy_returns=s_returns,
        strategy_advantages=s_advantages,
        strategy_format_penalties=s_formats,
        strategy_length_penalties=s_lengths,
    )
