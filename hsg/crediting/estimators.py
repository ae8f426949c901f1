"""Every way to credit actions, one function and one name each: `advantage.estimator`.  Torch only, float64, no gradient.

    group         (R - mean) / (std + eps) of the rollout group            GRPO (2402.03300), Dr.GRPO (2503.20783), StraTA
    rloo          R - mean of the others                                   RLOO (2402.14740)
    reinforce++   G_k, or G_k - mean outcome of the group                  REINFORCE++ (2501.03262)
    gigpo         A_E + omega * A_S, A_S among turns with one observation  GiGPO (2505.10978)
    gae           sum_l (gamma lam)^l delta_k+l                            PPO (1707.06347), GAE (1506.02438)

    R    a turn's return: the outcome less the turn's own penalties        G_k = r_k + gamma G_k+1, from the turns' rewards
    delta_k = r_k + gamma V_k+1 - V_k                                      V = 0 after the last turn, however it ended (ours)

A new estimator is one function below `@estimator("name")`.  Units are turns; `per_token` makes tokens of them, and nothing
here knows the difference.  Deliberately absent: what a strategy is worth (advantages.py), per-token entropy (losses see it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hsg.crediting.advantages import group_advantages, turn_advantages
from hsg.crediting.names import ESTIMATOR_NAMES


@dataclass(frozen=True, eq=False)
class Turns:
    """All that an estimator may look at; the last two axes are the M rollouts of a group and their K turns.

    returns    (..., M, K)  the outcome less the turn's penalties
    rewards    (..., M, K)  what sums up to the outcome over the turns, plus each turn's own penalties
    turn_mask  (..., M, K)  bool: the turn exists and its trajectory is valid; elsewhere nothing is read
    states     (..., M, K)  int64 >= 0: equal numbers in a group are equal observations
    outcomes   (..., M)     R(tau)
    valid      (..., M)     bool: the trajectory has a say
    values     (..., M, K)  the critic's value before the turn, or None
    """

    returns: Tensor
    rewards: Tensor
    turn_mask: Tensor
    states: Tensor
    outcomes: Tensor
    valid: Tensor
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Estimate:
    """Advantages, the returns they come from, and where whitening may move them; all (..., M, K).

    `live` is False where an advantage is exactly 0 by law: no turn there, or a group that has nothing to compare.
    """

    advantages: Tensor
    returns: Tensor
    live: Tensor


Estimator = Callable[[Turns, Any], Estimate]
ESTIMATORS: dict[str, Estimator] = {}
"""Name -> function of the turns and the whole configuration."""


def estimator(name: str, *, needs_values: bool = False) -> Callable[[Estimator], Estimator]:
    """Give a function (Turns, Config) -> Estimate its name: a value of `advantage.estimator`.

    needs_values  it reads `Turns.values`: a run with it trains a critic
    """

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name], ESTIMATOR_NAMES[name] = function, needs_values
        return function

    return register


# ----------------------------------------------------------------------------------------------------- the estimators


@estimator("group")
def _group(turns: Turns, config: Any) -> Estimate:
    """GRPO's and StraTA's; `advantage.std: none` is Dr.GRPO."""
    options = config.advantage
    return compared(turns, _normalised(turns, options.turn_baseline, options.std, options.eps), turns.returns)


@estimator("rloo")
def _rloo(turns: Turns, config: Any) -> Estimate:
    """RLOO: the baseline of a rollout is the mean outcome of the others."""
    others = leave_one_out_mean(turns.outcomes, turns.valid).unsqueeze(-1)  # (..., M, 1)
    return compared(turns, where_mixed(turns, turns.returns - others), turns.returns)


@estimator("reinforce++")
def _reinforce(turns: Turns, config: Any) -> Estimate:
    """REINFORCE++: the return-to-go itself; with `reinforce.baseline: group` less the group's mean outcome.

    Both want `advantage.whiten`. A group of equal outcomes stays exactly 0 under the baseline, whitening or not (ours).
    """
    togo = returns_to_go(turns.rewards, turns.turn_mask, config.advantage.gamma)
    if config.reinforce.baseline == "none":
        return Estimate(togo, togo, turns.turn_mask)
    outcomes = torch.where(turns.valid, turns.outcomes, 0.0)
    mean = outcomes.sum(-1, keepdim=True) / turns.valid.sum(-1, keepdim=True).clamp(min=1)  # (..., 1)
    return compared(turns, where_mixed(turns, togo - mean.unsqueeze(-1)), togo)


@estimator("gigpo")
def _gigpo(turns: Turns, config: Any) -> Estimate:
    """GiGPO: the episode's advantage and, from the discounted return-to-go, that of the turn among its likes."""
    options = config.advantage
    baseline = {"trajectory": "trajectory", "turn": "pooled"}[config.gigpo.episode_baseline]
    episode = _normalised(turns, baseline, options.std, options.eps)
    togo = returns_to_go(turns.rewards, turns.turn_mask, options.gamma)
    step = state_advantages(togo, turns.states, turns.turn_mask, std=options.std, eps=options.eps)
    return compared(turns, episode + config.gigpo.omega * step, togo)


@estimator("gae", needs_values=True)
def _gae(turns: Turns, config: Any) -> Estimate:
    """PPO's; the returns are what the critic is trained towards, A + V."""
    if turns.values is None:
        raise ValueError("values must be given for the estimator gae, got None; it needs a critic")
    values = torch.where(turns.turn_mask, turns.values.double(), 0.0)
    advantages = gae(turns.rewards, values, turns.turn_mask, config.advantage.gamma, config.critic.lam)
    return Estimate(advantages, advantages + values, turns.turn_mask)


def _normalised(turns: Turns, baseline: str, std: str, eps: float) -> Tensor:
    return turn_advantages(
        turns.returns,
        turns.outcomes,
        turn_mask=turns.turn_mask,
        valid=turns.valid,
        baseline=baseline,
        std=std,
        eps=eps,
    )


def compared(turns: Turns, advantages: Tensor, returns: Tensor) -> Estimate:
    """The estimate of a method that compares within groups: a group of zeros has nothing to say.

    advantages, returns (..., M, K): of the turns; whitening leaves alone what is 0 by law
    """
    mixed = (advantages != 0).any(-1, keepdim=True).any(-2, keepdim=True)  # (..., 1, 1)
    return Estimate(advantages, returns, turns.turn_mask & mixed)


def where_mixed(turns: Turns, advantages: Tensor) -> Tensor:
    """The advantages, but 0 outside the turns and in groups whose outcomes are all equal (max - min, as in advantages.py).

    advantages (..., M, K) -> (..., M, K)
    """
    mixed = group_advantages(turns.outcomes, std="none", valid=turns.valid) != 0  # (..., M)
    return torch.where(turns.turn_mask & mixed.any(-1)[..., None, None], advantages, 0.0)


# ------------------------------------------------------------------------------------------------------- their parts


def returns_to_go(rewards: Tensor, turn_mask: Tensor, gamma: float) -> Tensor:
    """G_k = r_k + gamma G_k+1 along the last axis; (..., K) float64, 0 where turn_mask is False."""
    return gae(rewards, torch.zeros_like(rewards, dtype=torch.float64), turn_mask, gamma, 1.0)


def gae(rewards: Tensor, values: Tensor, turn_mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_k = delta_k + gamma lam A_k+1, delta_k = r_k + gamma V_k+1 - V_k; GAE (arXiv 1506.02438), eq. 16.

    rewards, values, turn_mask (..., K), the turns of a trajectory first -> (..., K) float64, 0 where turn_mask is False.
    """
    rewards = torch.where(turn_mask, rewards.double(), 0.0)
    values = torch.where(turn_mask, values.double(), 0.0)  # so that the value after the last turn is 0
    advantages = torch.zeros_like(rewards)
    later = rewards.new_zeros(rewards.shape[:-1])  # (...): A_k+1
    next_value = later
    for k in reversed(range(rewards.shape[-1])):
        later = rewards[..., k] + gamma * next_value - values[..., k] + gamma * lam * later
        next_value = values[..., k]
        advantages[..., k] = later
    return torch.where(turn_mask, advantages, 0.0)


def leave_one_out_mean(outcomes: Tensor, valid: Tensor) -> Tensor:
    """The mean of the other valid members: (..., M) -> (..., M) float64; 0 for a lone member."""
    outcomes = torch.where(valid, outcomes.double(), 0.0)
    others = valid.sum(-1, keepdim=True) - valid.long()  # (..., M)
    return (outcomes.sum(-1, keepdim=True) - outcomes) / others.clamp(min=1)


def state_advantages(
    returns: Tensor, states: Tensor, turn_mask: Tensor, *, std: str = "population", eps: float = 1e-6
) -> Tensor:
    """Each turn among all turns of its group that saw the same observation; GiGPO (arXiv 2505.10978).

    returns, states (int64 >= 0), turn_mask (..., M, K) -> (..., M, K) float64. Exactly 0 for a state seen once, or
    always with the same return. Two visits in one trajectory are two members, as in the authors' code.
    """
    values, seen, held = (x[None].flatten(-2).flatten(0, -2) for x in (returns, states, turn_mask))  # (groups, M*K)
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    for group in range(len(values)):
        states_here, visits = seen[group][held[group]].unique(return_counts=True)
        for state in states_here[visits > 1]:
            members = held[group] & (seen[group] == state)
            advantages[group, members] = group_advantages(values[group, members], std=std, eps=eps)
    return advantages.reshape(returns.shape)


def per_token(turns: Turns, turn_of: Tensor, values: Tensor | None = None) -> Turns:
    """The same with tokens for units: a turn's reward comes with its last token, all else is true of each.

    turn_of (..., M, L) int64: the turn of every sampled token of a trajectory in order, -1 behind the last one;
    values (..., M, L) or None.
    """
    exists = turn_of >= 0
    index = turn_of.clamp(min=0)

    def spread(per_turn: Tensor, empty: float) -> Tensor:
        return torch.where(exists, per_turn.gather(-1, index), empty)

    if turns.returns.shape[-1] == 0:  # nothing to gather from
        empty = turns.rewards.new_zeros(turn_of.shape)
        return replace(
            turns, returns=empty, rewards=empty, turn_mask=exists, states=turn_of.clamp(min=0), values=values
        )
    following = torch.cat([turn_of[..., 1:], torch.full_like(turn_of[..., :1], -1)], -1)
    return replace(
        turns,
        returns=spread(turns.returns, math.nan),
        rewards=torch.where(following != turn_of, spread(turns.rewards, 0.0), 0.0),
        turn_mask=exists & turns.turn_mask.gather(-1, index),
        states=torch.where(exists, turns.states.gather(-1, index), 0),
        values=values,
    )


def mean_over_turns(per_unit: Tensor, turn_of: Tensor, num_turns: int) -> Tensor:
    """The mean over each turn's tokens: (..., L) of tokens -> (..., K), 0 for a turn without one."""
    index, exists = turn_of.clamp(min=0), (turn_of >= 0).double()
    zeros = per_unit.new_zeros(*per_unit.shape[:-1], max(num_turns, 1))
    sums = zeros.scatter_add(-1, index, torch.where(turn_of >= 0, per_unit, 0.0))
    return (sums / zeros.scatter_add(-1, index, exists).clamp(min=1))[..., :num_turns]


def dense_rewards(gains: Tensor, outcomes: Tensor, turn_mask: Tensor) -> Tensor:
    """The environment's gains scaled so that a trajectory's turns sum to its outcome; (..., M, K) float64.

    gains, turn_mask (..., M, K), outcomes (..., M). Where gains sum to no more than 0 there is nothing to scale, and the
    outcome stands at the last turn (ours).
    """
    gains = torch.where(turn_mask, gains.double(), 0.0)
    total = gains.sum(-1, keepdim=True)  # (..., M, 1)
    scaled = gains * (outcomes.double().unsqueeze(-1) / torch.where(total > 0, total, 1.0))
    return torch.where(turn_mask, torch.where(total > 0, scaled, last_turn_rewards(outcomes, turn_mask)), 0.0)


def last_turn_rewards(outcomes: Tensor, turn_mask: Tensor) -> Tensor:
    """The outcome at the last turn, 0 before: (..., M), (..., M, K) -> (..., M, K) float64."""
    following = torch.cat([turn_mask[..., 1:], torch.zeros_like(turn_mask[..., :1])], -1)
    return torch.where(turn_mask & ~following, outcomes.double().unsqueeze(-1), 0.0)


# --------------------------------------------------------------------------------------------------------- whitening

Moments = tuple[float, float, float, float, float]
"""Count, mean, sum of squared distances to it, smallest, largest of some values."""


def moments(values: Tensor) -> Moments:
    """Of the values of one rank, (n,)."""
    if len(values) == 0:
        return 0.0, 0.0, 0.0, math.inf, -math.inf
    values = values.double()
    mean = values.mean()
    return (
        float(len(values)),
        mean.item(),
        (values - mean).square().sum().item(),
        values.min().item(),
        values.max().item(),
    )


def merge_moments(parts: list[Moments]) -> Moments:
    """Of the values of all ranks, without having them: Chan, Golub, LeVeque (1979)."""
    count = sum(part[0] for part in parts)
    mean = sum(part[0] * part[1] for part in parts) / max(count, 1.0)
    squares = sum(part[2] + part[0] * (part[1] - mean) ** 2 for part in parts)
    return count, mean, squares, min(p[3] for p in parts), max(p[4] for p in parts)


def whiten(estimate: Estimate, turn_mask: Tensor, eps: float, gather: Callable[[list], list] = list) -> Estimate:
    """(A - mean) / (std + eps) over every unit of the batch; `gather` joins the lists of all ranks.

    Each unit counts once. Advantages that are 0 by law count too, and stay 0. Equal ones come out as exactly 0.
    """
    mine = moments(estimate.advantages[turn_mask])
    count, mean, squares, low, high = merge_moments(gather([mine]))
    if not high > low:
        return replace(estimate, advantages=torch.zeros_like(estimate.advantages))
    scaled = (estimate.advantages - mean) / (math.sqrt(squares / count) + eps)
    return replace(estimate, advantages=torch.where(estimate.live, scaled, 0.0))
