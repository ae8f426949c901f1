"""Every estimator against numbers worked out by hand, slow twins in plain loops, and what equals what."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from reference import M, N, P

from hsg.config.loading import make_config
from hsg.crediting.advantages import group_advantages, turn_returns
from hsg.crediting.estimators import (
    ESTIMATORS,
    Estimate,
    Turns,
    dense_rewards,
    gae,
    last_turn_rewards,
    mean_over_turns,
    merge_moments,
    moments,
    per_token,
    returns_to_go,
    state_advantages,
    whiten,
)
from hsg.crediting.names import ESTIMATOR_NAMES

K = 7
NAN = math.nan
COMPARED = ("group", "rloo", "reinforce++ baseline", "gigpo")
EVERY = (*COMPARED, "reinforce++", "gae")


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected: Any, tolerance: float = 1e-7) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, equal_nan=True)


def make_turns(outcomes: Any, num_turns: Any, states: Any = None, values: Any = None) -> Turns:
    """One group: outcomes [M], turns each [M]; NaN = failed. States default to all different."""
    outcomes = tensor(outcomes)
    valid = ~outcomes.isnan()
    mask = (torch.arange(max(num_turns)) < torch.tensor(num_turns)[:, None]) & valid[:, None]
    returns = turn_returns(outcomes, torch.zeros_like(mask), 0.0, turn_mask=mask)
    seen = torch.arange(mask.numel()).reshape(mask.shape) if states is None else torch.tensor(states)
    values = None if values is None else tensor(values)
    return Turns(returns, last_turn_rewards(outcomes, mask), mask, seen, outcomes, valid, values)


def estimate(name: str, turns: Turns, **given: Any) -> Estimate:
    name, _, variant = name.partition(" ")
    given = {"advantage": {"turn_baseline": "trajectory", "eps": 1e-12, **given.pop("advantage", {})}, **given}
    if variant:
        given["reinforce"] = {"baseline": "group"}
    if ESTIMATOR_NAMES[name] and turns.values is None:
        turns = replace(turns, values=torch.zeros_like(turns.rewards))
    return ESTIMATORS[name](turns, make_config(given))


@pytest.fixture
def batch() -> Turns:
    """Odd sizes; (0, 0, 1) failed, group (1, 1) has equal outcomes, (2, 1) one valid trajectory; few different states."""
    g = torch.Generator().manual_seed(0)
    outcomes = torch.rand(P, N, M, generator=g, dtype=torch.float64)
    mask = torch.arange(K) < torch.randint(1, K + 1, (P, N, M), generator=g).unsqueeze(-1)
    outcomes[0, 0, 1] = NAN
    outcomes[1, 1] = 0.3
    outcomes[2, 1, 1:] = NAN
    valid = ~outcomes.isnan()
    mask &= valid.unsqueeze(-1)
    penalties = -torch.rand(P, N, M, K, generator=g, dtype=torch.float64)
    returns = turn_returns(outcomes, torch.zeros_like(mask), 0.0, turn_mask=mask, penalties=penalties)
    rewards = torch.where(mask, torch.rand(P, N, M, K, generator=g, dtype=torch.float64), NAN)
    states = torch.randint(0, 9, (P, N, M, K), generator=g)
    return Turns(returns, rewards, mask, states, outcomes, valid, torch.rand(P, N, M, K, generator=g).double())


def groups() -> list[tuple[int, int]]:
    return [(p, n) for p in range(P) for n in range(N)]


# ------------------------------------------------------------------------------------------------------------ by hand


def test_group_is_grpo() -> None:
    """Outcomes 1 0 0 0: mean 1/4, var 3/16, so (3/4) / (sqrt(3)/4) = sqrt(3), and -1/sqrt(3)."""
    got = estimate("group", make_turns([1.0, 0.0, 0.0, 0.0], [2, 1, 2, 1])).advantages
    root = 3**0.5
    close(got, [[root, root], [-1 / root, 0], [-1 / root, -1 / root], [-1 / root, 0]])


def test_rloo_by_hand() -> None:
    """Outcomes 1 0 0.5: others' means 0.25, 0.75, 0.5."""
    got = estimate("rloo", make_turns([1.0, 0.0, 0.5], [1, 2, 1]))
    close(got.advantages, [[0.75, 0], [-0.75, -0.75], [0, 0]])
    close(estimate("rloo", make_turns([1.0, NAN, 0.5], [1, 2, 1])).advantages, [[0.5, 0], [0, 0], [-0.5, 0]])


def test_rloo_subtracts_a_turns_penalty_in_reward_units() -> None:
    turns = make_turns([1.0, 0.0], [2, 1])
    turns.returns[0, 1] -= 0.1
    close(estimate("rloo", turns).advantages, [[1.0, 0.9], [-1.0, 0.0]])


def test_reinforce_by_hand() -> None:
    """Rewards 0.25 then 0.75, and 0: returns to go 1, 0.75 and 0; mean of the outcomes 1/2."""
    turns = replace(make_turns([1.0, 0.0], [2, 1]), rewards=tensor([[0.25, 0.75], [0.0, 0.0]]))
    close(estimate("reinforce++", turns).advantages, [[1.0, 0.75], [0.0, 0.0]])
    close(estimate("reinforce++ baseline", turns).advantages, [[0.5, 0.25], [-0.5, 0.0]])
    discounted = estimate("reinforce++", turns, advantage={"gamma": 0.5})
    close(discounted.advantages, [[0.625, 0.75], [0.0, 0.0]])
    close(discounted.returns, discounted.advantages)


def test_gae_by_hand() -> None:
    """Rewards 0 1, values 0.5 0.25, gamma 0.5, lambda 0.5.

    delta_1 = 1 - 0.25 = 0.75        delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375        A_0 = -0.375 + 0.25 * 0.75 = -0.1875
    """
    turns = make_turns([1.0], [2], values=[[0.5, 0.25]])
    got = estimate("gae", turns, advantage={"gamma": 0.5}, critic={"lam": 0.5})
    close(got.advantages, [[-0.1875, 0.75]])
    close(got.returns, [[0.3125, 1.0]])  # A + V, what the critic learns


def test_gigpo_by_hand() -> None:
    """Two trajectories, rewards 10 and 0 at the end, gamma 0.5; both begin in state 0.

    returns to go: 5, 10 | 0, 0        A_E: outcomes 10, 0 -> mean 5, std 5 -> +1, -1
    state 0 (5 and 0): +1, -1          state 1 is seen once: 0          state 2 twice in trajectory 1, both 0: 0
    """
    states = [[0, 1, 9], [0, 2, 2]]
    turns = make_turns([10.0, 0.0], [2, 3], states)
    options = {"advantage": {"gamma": 0.5}, "gigpo": {"omega": 0.5}}
    close(estimate("gigpo", turns, **options).advantages, [[1.5, 1.0, 0.0], [-1.5, -1.0, -1.0]])
    # Without a standard deviation: A_E +-5, A_S +-2.5.
    options["advantage"]["std"] = "none"  # type: ignore[index]
    close(estimate("gigpo", turns, **options).advantages, [[6.25, 5.0, 0.0], [-6.25, -5.0, -5.0]])


def test_gigpo_over_all_turns_weighs_long_trajectories() -> None:
    """Its code: 1 1 | 0: mean 2/3, std sqrt(2)/3, so 1/sqrt(2) and -sqrt(2)."""
    turns = make_turns([1.0, 0.0], [2, 1])
    got = estimate("gigpo", turns, gigpo={"episode_baseline": "turn"}).advantages
    close(got, [[0.5**0.5, 0.5**0.5], [-(2**0.5), 0.0]])


def test_states_across_and_within_trajectories() -> None:
    """State 3 in trajectories 0 and 1 and twice in 2: returns 4, 0, 2, 2, mean 2, std sqrt(2); state 5 once: 0."""
    returns, states = tensor([[4.0, 1.0], [0.0, 7.0], [2.0, 2.0]]), torch.tensor([[3, 5], [3, 3], [3, 3]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    close(state_advantages(returns, states, mask, eps=0.0), [[2**0.5, 0.0], [-(2**0.5), 0.0], [0.0, 0.0]])


def test_dense_rewards_by_hand() -> None:
    """Gains 1 3 scaled to an outcome of 0.8: 0.2 0.6. Gains that sum to nothing leave the outcome at the last turn."""
    gains = tensor([[1.0, 3.0, 9.0], [0.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [2.0, -1.0, 0.0], [1.0, 1.0, 1.0]])
    outcomes = tensor([0.8, 0.5, 0.5, 0.0, NAN])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    expected = [[0.2, 0.6, 0], [0, 0, 0.5], [0, 0, 0.5], [0, 0, 0], [0, 0, 0]]
    close(dense_rewards(gains, outcomes, mask), expected)
    close(last_turn_rewards(outcomes, mask), [[0, 0.8, 0], [0, 0, 0.5], [0, 0, 0.5], [0, 0, 0], [0, 0, 0]])
    close(dense_rewards(torch.rand(5, 3), outcomes, mask).sum(-1), [0.8, 0.5, 0.5, 0.0, 0.0])


def test_tokens_for_units() -> None:
    """Turns of 2 and 1 tokens: the reward comes with the last token of each, returns are those of the turn."""
    turns = replace(make_turns([1.0, NAN], [2, 1]), rewards=tensor([[0.25, 0.75], [0.0, 0.0]]))
    turn_of = torch.tensor([[0, 0, 1], [0, -1, -1]])
    units = per_token(turns, turn_of, tensor([[0.5, 0.5, 0.25], [0, 0, 0]]))
    assert units.turn_mask.tolist() == [[True, True, True], [False] * 3]
    close(units.rewards, [[0.0, 0.25, 0.75], [0.0, 0.0, 0.0]])
    close(units.returns, [[1.0, 1.0, 1.0], [NAN] * 3])
    # lambda = gamma = 1: what is still to come, less V.
    close(estimate("gae", units).advantages, [[0.5, 0.5, 0.5], [0.0] * 3])
    close(mean_over_turns(tensor([[1.0, 2.0, 5.0], [7.0, 8.0, 9.0]]), turn_of, 3), [[1.5, 5.0, 0.0], [7.0, 0.0, 0.0]])


# --------------------------------------------------------------------------------------------------------- slow twins


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_states_equal_loops(batch: Turns, std: str) -> None:
    got = state_advantages(batch.rewards, batch.states, batch.turn_mask, std=std)
    for p, n in groups():
        args = (batch.rewards[p, n].tolist(), batch.states[p, n].tolist(), batch.turn_mask[p, n].tolist())
        close(got[p, n], reference.state_advantages(*args, std))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.0, 1.0), (1.0, 0.0)])
def test_gae_and_returns_to_go_equal_their_definitions(batch: Turns, gamma: float, lam: float) -> None:
    assert batch.values is not None
    got = gae(batch.rewards, batch.values, batch.turn_mask, gamma, lam)
    togo = returns_to_go(batch.rewards, batch.turn_mask, gamma)
    assert not got[~batch.turn_mask].any()
    assert not togo[~batch.turn_mask].any()
    for index in torch.cartesian_prod(*map(torch.arange, (P, N, M))).tolist():
        place = tuple(index)
        length = int(batch.turn_mask[place].sum())
        rewards, values = (x[place][:length].tolist() for x in (batch.rewards, batch.values))
        close(got[place][:length], reference.gae(rewards, values, gamma, lam))
        close(togo[place][:length], reference.returns_to_go(rewards, gamma))


def test_rloo_equals_loops(batch: Turns) -> None:
    plain = replace(batch, returns=batch.outcomes.unsqueeze(-1).expand(batch.returns.shape))
    got = estimate("rloo", plain).advantages
    for p, n in groups():
        expected = reference.leave_one_out(batch.outcomes[p, n].tolist(), batch.valid[p, n].tolist())
        close(got[p, n], torch.where(batch.turn_mask[p, n], tensor(expected).unsqueeze(-1), 0.0))


def test_whitening_equals_loops_and_ignores_the_ranks(batch: Turns) -> None:
    """Over everything at once, and over three ranks that see each other's moments only."""
    values = estimate("reinforce++", batch)
    got = whiten(values, batch.turn_mask, 1e-6).advantages
    flat = values.advantages[batch.turn_mask].tolist()
    close(got[batch.turn_mask], reference.whiten(flat, 1e-6))
    assert not got[~batch.turn_mask].any()
    parts = [moments(values.advantages[p][batch.turn_mask[p]]) for p in range(P)]
    for p in range(P):
        mine = Estimate(values.advantages[p], values.returns[p], values.live[p])
        alone = whiten(mine, batch.turn_mask[p], 1e-6, lambda _: parts).advantages
        close(alone, got[p], 1e-12)


def test_moments_of_an_empty_rank_change_nothing() -> None:
    one = moments(tensor([1.0, 2.0, 6.0]))
    assert one == (3.0, 3.0, 14.0, 1.0, 6.0)
    assert merge_moments([moments(torch.zeros(0)), one]) == one
    assert merge_moments([moments(tensor([1.0])), moments(tensor([2.0, 6.0]))]) == pytest.approx(one)


# --------------------------------------------------------------------------------------------------- what equals what


def test_dr_grpo_is_grpo_times_its_divisor(batch: Turns) -> None:
    grpo = estimate("group", batch, advantage={"eps": 1e-3}).advantages
    dr_grpo = estimate("group", batch, advantage={"std": "none"}).advantages
    for p, n in groups():
        members = batch.outcomes[p, n][batch.valid[p, n]]
        close(dr_grpo[p, n], grpo[p, n] * (members.std(correction=0) + 1e-3), 1e-12)


def test_rloo_is_the_mean_centred_return_scaled(batch: Turns) -> None:
    """G / (G - 1) (R - mean), G the number of valid rollouts."""
    plain = replace(batch, returns=batch.outcomes.unsqueeze(-1).expand(batch.returns.shape))
    count = batch.valid.sum(-1)[..., None, None]
    centred = estimate("group", plain, advantage={"std": "none"}).advantages
    close(estimate("rloo", plain).advantages, centred * count / (count - 1).clamp(min=1), 1e-12)


@pytest.mark.parametrize("std", ["population", "none"])
def test_gigpo_without_omega_is_grpo(batch: Turns, std: str) -> None:
    options = {"std": std}
    grpo = estimate("group", batch, advantage=options).advantages
    assert estimate("gigpo", batch, advantage=options, gigpo={"omega": 0}).advantages.equal(grpo)
    pooled = estimate("group", batch, advantage={**options, "turn_baseline": "pooled"}).advantages
    turn = {"omega": 0, "episode_baseline": "turn"}
    assert estimate("gigpo", batch, advantage=options, gigpo=turn).advantages.equal(pooled)


def test_ppo_with_a_zero_critic_is_the_return() -> None:
    """lambda = gamma = 1, the outcome on the last turn, no whitening: every turn has R(tau)."""
    turns = make_turns([1.0, 0.25, NAN], [3, 1, 2])
    got = estimate("gae", turns, critic={"lam": 1.0}).advantages
    close(got, [[1.0] * 3, [0.25, 0.0, 0.0], [0.0] * 3])


def test_grpo_is_strata_with_one_constant_strategy(batch: Turns) -> None:
    """One strategy, trajectory baseline, no penalties: GRPO's advantage of each trajectory at all of its turns."""
    plain = replace(batch, returns=batch.outcomes.unsqueeze(-1).expand(batch.returns.shape))
    expected = group_advantages(batch.outcomes, eps=1e-12, valid=batch.valid)
    close(estimate("group", plain).advantages, torch.where(batch.turn_mask, expected.unsqueeze(-1), 0.0))


# --------------------------------------------------------------------------------------------------------- exact zeros


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("whitened", [False, True])
def test_dead_group_is_exactly_zero(name: str, whitened: bool) -> None:
    """B11: 0.7 everywhere beside a group that teaches, with turns of unequal number; whitening moves no zero either."""
    dead, live = make_turns([0.7] * 3, [2, 1, 2]), make_turns([1.0, 0.0, 0.0], [2, 1, 1])
    both = Turns(*(torch.stack([getattr(t, f) for t in (dead, live)])
                   for f in ("returns", "rewards", "turn_mask", "states", "outcomes", "valid")))  # fmt: skip
    got = estimate(name, both)
    if whitened:
        got = whiten(got, both.turn_mask, 1e-6)
    assert not got.advantages[0].any()
    assert got.advantages[1].any()
    assert got.advantages.isfinite().all()


@pytest.mark.parametrize("name", COMPARED)
def test_group_of_one_is_exactly_zero(name: str) -> None:
    assert not estimate(name, make_turns([0.7], [3])).advantages.any()
    assert not estimate(name, make_turns([0.7, NAN], [3, 2])).advantages.any()


@pytest.mark.parametrize("name", ["reinforce++", "gae"])
def test_batch_of_equal_returns_is_exactly_zero_once_whitened(name: str) -> None:
    """They compare over the batch: there a dead group is one whose every turn has the same return as all others."""
    turns = make_turns([0.7] * 3, [2, 1, 2])
    got = estimate(name, turns)
    assert got.advantages[turns.turn_mask].tolist() == [0.7] * 5
    assert not whiten(got, turns.turn_mask, 1e-6).advantages.any()


@pytest.mark.parametrize("name", EVERY)
def test_failed_member_has_no_say(name: str) -> None:
    """The same numbers with and without it, whatever stands in its place; its own are 0."""
    states, values = [[0, 1], [0, 2], [0, 1]], [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    with_it = make_turns([1.0, NAN, 0.0], [2, 2, 1], states, values)
    for field in ("returns", "rewards"):
        getattr(with_it, field)[1] = NAN
    without = make_turns([1.0, 0.0], [2, 1], states[::2], values[::2])
    got, expected = (whiten(estimate(name, t), t.turn_mask, 1e-6) for t in (with_it, without))
    assert not got.advantages[1].any()
    close(got.advantages[[0, 2]], expected.advantages, 1e-12)
    assert got.advantages.any()


@pytest.mark.parametrize("name", EVERY)
def test_no_task_no_turn(name: str) -> None:
    for shape in ((0, 1, 2, 0), (1, 1, 2, 0)):
        zeros = torch.zeros(shape, dtype=torch.float64)
        held = torch.zeros(shape[:-1], dtype=torch.float64)
        turns = Turns(zeros, zeros, zeros.bool(), zeros.long(), held, held.bool(), zeros)
        got = whiten(estimate(name, turns), turns.turn_mask, 1e-6)
        assert got.advantages.shape == shape


def test_gae_wants_values() -> None:
    with pytest.raises(ValueError, match="values must be given for the estimator gae, got None; it needs a critic"):
        ESTIMATORS["gae"](make_turns([1.0], [1]), make_config({}))
