"""From records to returns and advantages: the one place where trajectories become tensors with axes (P, N, M, K).

    outcomes (P, N, M), flags, penalties  ->  returns  ->  advantages     the maths is in advantages.py and estimators.py

A trajectory that failed by the environment's fault has no outcome: it is a member of nothing and trains nothing.
Deliberately absent: the names of methods; `advantage.estimator` is looked up in a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hsg.config.options import Config, RewardConfig
from hsg.crediting.advantages import (
    count_penalty_only_groups,
    group_advantages,
    group_metrics,
    strategy_returns,
    turn_returns,
)
from hsg.crediting.estimators import (
    ESTIMATORS,
    Turns,
    dense_rewards,
    last_turn_rewards,
    mean_over_turns,
    per_token,
    whiten,
)
from hsg.types import Judgment, Strategy, Trajectory


@dataclass(frozen=True, eq=False)
class Credit:
    """Returns and advantages of one iteration, float64; NaN returns and 0.0 advantages where something is invalid.

    strategy_*  (P, N), None for a method without strategies      turn_*  (P, N, M, K), padded to the longest
    token_*     (P, N, M, L) over the sampled tokens of a trajectory, None unless `advantage.unit` is token
    """

    outcomes: Tensor  # (P, N, M)
    valid: Tensor  # (P, N, M) bool
    turn_mask: Tensor  # (P, N, M, K) bool: the turn exists and its trajectory is valid
    turn_rewards: Tensor  # sum to the scaled outcome, and to what penalties and bonuses add to it
    turn_returns: Tensor  # what the advantages come from: less penalties, or a return-to-go, as the estimator has it
    turn_advantages: Tensor
    turn_format_penalties: Tensor
    turn_length_penalties: Tensor
    turn_invalid_action_penalties: Tensor
    turn_bonuses: Tensor | None = None  # RND's, weighted; 0 where the trajectory got something
    turn_values: Tensor | None = None  # the critic's, before a turn's first token
    strategy_returns: Tensor | None = None
    strategy_advantages: Tensor | None = None
    strategy_format_penalties: Tensor | None = None
    strategy_length_penalties: Tensor | None = None
    token_returns: Tensor | None = None
    token_advantages: Tensor | None = None
    token_values: Tensor | None = None  # the critic's before each token, whatever the unit
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Signals:
    """What other models say of the trajectories, row-major (P*N*M); None where there is no such model."""

    values: Sequence[Tensor] | None = None  # (sampled tokens,) each: the critic's, before that token
    bonuses: Sequence[Tensor] | None = None  # (K,) each: how new a turn is


def length_penalty(num_tokens: int, token_limit: int, config: RewardConfig) -> float:
    """0 up to `length_penalty_start` of the token limit, then linear to -1 at the limit (its form is ours).

    token_limit  the response's own, not the room it had: a short answer near the end of its row is not a long one
    """
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
    signals: Signals | None = None,
    gather: Callable[[list], list] = list,
) -> Credit:
    """Both levels' returns and advantages, in float64.

    strategies (P, N) or None (a flat method); trajectories and judgments (P, N, M).

    `gather` joins lists of all ranks for what is whitened over the batch; every rank calls, with nothing to add too.
    """
    signals = signals or Signals()
    num_tasks = len(trajectories)
    shape = (num_tasks, len(trajectories[0]), len(trajectories[0][0])) if num_tasks else (0, *config.group_shape)
    num_turns = max((len(t.turns) for task in trajectories for group in task for t in group), default=0)
    outcomes = torch.full(shape, math.nan, dtype=torch.float64)
    turn_mask = torch.zeros(*shape, num_turns, dtype=torch.bool)
    flagged, states = torch.zeros_like(turn_mask), torch.zeros(*shape, num_turns, dtype=torch.long)
    formats, lengths, invalids, gains = (torch.zeros(*shape, num_turns, dtype=torch.float64) for _ in range(4))
    names: dict[str, int] = {}  # observation -> its number
    for p, n, m in ((p, n, m) for p in range(shape[0]) for n in range(shape[1]) for m in range(shape[2])):
        trajectory = trajectories[p][n][m]
        if trajectory.valid:
            assert trajectory.outcome is not None
            outcomes[p, n, m] = trajectory.outcome * config.reward.scale
            turn_mask[p, n, m, : len(trajectory.turns)] = True
        for t in judgments[p][n][m].flagged:
            flagged[p, n, m, t] = True
        seen = ""
        for k, turn in enumerate(trajectory.turns):
            gains[p, n, m, k] = turn.reward
            # After a response without an action the policy read our words, and the world was where it had been.
            seen = turn.observation if k == 0 or trajectory.turns[k - 1].action is not None else seen
            states[p, n, m, k] = names.setdefault(seen, len(names))
            formats[p, n, m, k] = format_penalty(turn.parsed, config.reward)
            lengths[p, n, m, k] = length_penalty(turn.num_sampled, turn.token_limit, config.reward)
            if turn.parsed and not turn.valid:  # an unparseable response has its own penalty
                invalids[p, n, m, k] = 0.0 - config.reward.invalid_action_penalty  # never -0.0
    valid = ~outcomes.isnan()

    penalties = formats + lengths + invalids
    returns = turn_returns(outcomes, flagged, config.kappa, turn_mask=turn_mask, penalties=penalties)
    dense = config.reward.turns == "dense"
    rewards = dense_rewards(gains, outcomes, turn_mask) if dense else last_turn_rewards(outcomes, turn_mask)
    rewards = torch.where(turn_mask, rewards + penalties - config.kappa * flagged.double(), 0.0)
    turns = Turns(returns, rewards, turn_mask, states, outcomes, valid)
    bonuses = None
    if signals.bonuses is not None:
        turns, bonuses = _with_bonuses(turns, signals.bonuses, config.rnd.weight)

    credit = Credit(outcomes, valid, turn_mask, turns.rewards, returns, returns, formats, lengths, invalids, bonuses)
    credit = _with_advantages(credit, config, turns, trajectories, signals, gather)
    metrics = {f"advantage/{k}": v for k, v in group_metrics(credit.turn_advantages, group_axes=2).items()}
    penalty_only = count_penalty_only_groups(turns.returns, turns.outcomes, turn_mask=turn_mask)
    metrics["advantage/penalty_only_groups"] = float(penalty_only)
    credit = replace(credit, metrics=metrics)
    return credit if strategies is None else _with_strategies(credit, config, strategies, trajectories)


def _with_bonuses(turns: Turns, bonuses: Sequence[Tensor], weight: float) -> tuple[Turns, Tensor]:
    """RND: bonuses are added to the turns of trajectories that got nothing, and nowhere else. Also what was added.

    Their mean goes into the outcome that a baseline sees, or a group of failures would be dead all the same (ours).
    """
    added = torch.zeros_like(turns.rewards)
    for row, bonus in zip(added.flatten(0, -2), bonuses, strict=True):  # a view: `added` is contiguous
        row[: len(bonus)] = weight * bonus
    added = torch.where(turns.turn_mask & (turns.outcomes == 0).unsqueeze(-1), added, 0.0)
    mean = added.sum(-1) / turns.turn_mask.sum(-1).clamp(min=1)  # (P, N, M)
    fields = {"returns": turns.returns + added, "rewards": turns.rewards + added, "outcomes": turns.outcomes + mean}
    return replace(turns, **fields), added


def _with_advantages(
    credit: Credit,
    config: Config,
    turns: Turns,
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
    signals: Signals,
    gather: Callable[[list], list],
) -> Credit:
    """What the configured estimator makes of the turns, or of their tokens."""
    by_token = config.advantage.unit == "token"
    values, turn_of = None, torch.empty(0)
    if by_token or signals.values is not None:
        turn_of = _turn_of_tokens(trajectories, turns.outcomes.shape)  # (P, N, M, L)
    if signals.values is not None:
        values = torch.zeros(turn_of.shape, dtype=torch.float64)
        for row, value in zip(values.flatten(0, -2), signals.values, strict=True):  # a view: `values` is contiguous
            row[: len(value)] = value
        of_turns = _first_of_each_turn(values, turn_of, turns.turn_mask.shape[-1])
        credit = replace(credit, token_values=values, turn_values=of_turns)
    units = per_token(turns, turn_of, values) if by_token else replace(turns, values=credit.turn_values)
    estimate = ESTIMATORS[config.advantage.estimator](units, config)
    if config.advantage.whiten:
        estimate = whiten(estimate, units.turn_mask, config.advantage.eps, gather)
    returns = torch.where(units.turn_mask, estimate.returns, math.nan)
    if not by_token:
        return replace(credit, turn_returns=returns, turn_advantages=estimate.advantages)
    num_turns = turns.turn_mask.shape[-1]
    in_turns = [mean_over_turns(x, turn_of, num_turns) for x in (estimate.returns, estimate.advantages)]
    return replace(
        credit,
        token_returns=returns,
        token_advantages=estimate.advantages,
        turn_returns=torch.where(turns.turn_mask, in_turns[0], math.nan),
        turn_advantages=torch.where(turns.turn_mask, in_turns[1], 0.0),
    )


def _turn_of_tokens(trajectories: Sequence[Sequence[Sequence[Trajectory]]], shape: tuple[int, ...]) -> Tensor:
    """(P, N, M, L) int64: the turn of every sampled token in order, -1 behind the last one."""
    flat = [t for task in trajectories for group in task for t in group]
    width = max((sum(turn.num_tokens for turn in t.turns) for t in flat), default=0)
    turn_of = torch.full((len(flat), width), -1)
    for row, t in zip(turn_of, flat, strict=True):
        held = [k for k, turn in enumerate(t.turns) for _ in range(turn.num_tokens)]
        row[: len(held)] = torch.tensor(held, dtype=torch.long)
    return turn_of.reshape(*shape, width)


def _first_of_each_turn(values: Tensor, turn_of: Tensor, num_turns: int) -> Tensor:
    """The value before each turn's first token: (..., L) -> (..., K), 0 where there is no such turn."""
    before = torch.cat([torch.full_like(turn_of[..., :1], -1), turn_of[..., :-1]], -1)
    begins = (turn_of != before) & (turn_of >= 0)
    zeros = values.new_zeros(*values.shape[:-1], max(num_turns, 1))
    return zeros.scatter_add(-1, turn_of.clamp(min=0), torch.where(begins, values, 0.0))[..., :num_turns]


def _with_strategies(
    credit: Credit,
    config: Config,
    strategies: Sequence[Sequence[Strategy]],
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
) -> Credit:
    """Returns and advantages of the strategies. A rollout that was not shown its strategy says nothing of it."""
    shape = credit.outcomes.shape[:2]
    pairs = [[format_penalty(s.parsed, config.reward), length_penalty(s.num_tokens, s.token_limit, config.reward)]
             for row in strategies for s in row]  # fmt: skip
    s_formats, s_lengths = torch.tensor(pairs, dtype=torch.float64).reshape(*shape, 2).unbind(-1)  # (P, N)
    shown = [t.strategy is not None for task in trajectories for group in task for t in group]
    s_returns, s_valid = strategy_returns(
        credit.outcomes,
        config.delta,
        valid=credit.valid & torch.tensor(shown, dtype=torch.bool).reshape(credit.valid.shape),
        penalties=s_formats + s_lengths,
    )  # (P, N)
    options = config.advantage
    s_advantages = group_advantages(s_returns, std=options.std, eps=options.eps, valid=s_valid)  # (P, N)
    shares = {f"advantage/strategy_{k}": v for k, v in group_metrics(s_advantages).items()}
    return replace(
        credit,
        strategy_returns=s_returns,
        strategy_advantages=s_advantages,
        strategy_format_penalties=s_formats,
        strategy_length_penalties=s_lengths,
        metrics=credit.metrics | shares,
    )
