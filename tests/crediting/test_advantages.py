"""hsg.crediting.advantages against numbers worked out by hand, slow twins in plain loops, and properties."""

import math

import pytest
import reference
import torch
from reference import M, N, P

from hsg.crediting.advantages import (
    count_penalty_only_groups,
    group_advantages,
    group_metrics,
    strategy_returns,
    top_fraction_mean,
    turn_advantages,
    turn_returns,
)

K = 7
NAN = math.nan


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected, tolerance=1e-7):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, equal_nan=True)


@pytest.fixture
def rollouts():
    """Outcomes (P, N, M) with trajectory (0, 0, 1) invalid, turns of unequal number, flags, penalties."""
    g = torch.Generator().manual_seed(0)
    outcomes = torch.rand(P, N, M, generator=g, dtype=torch.float64)
    num_turns = torch.randint(1, K + 1, (P, N, M), generator=g)
    turn_mask = torch.arange(K) < num_turns.unsqueeze(-1)
    turn_mask[0, 0, 1] = False
    turn_mask[2, 1, 1:] = False  # one valid trajectory, of at least two turns
    turn_mask[2, 1, 0, :2] = True
    outcomes[0, 0, 1] = NAN
    outcomes[1, 1] = 0.3  # equal outcomes
    flagged = torch.rand(P, N, M, K, generator=g) < 0.3
    penalties = -torch.rand(P, N, M, K, generator=g, dtype=torch.float64)
    penalties[~turn_mask] = NAN
    return outcomes, turn_mask, flagged, penalties


# ------------------------------------------------------------------------------------------------------ top fraction


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.5, 0.7),  # floor(0.5 * 5) = 2 largest: (0.9 + 0.5) / 2
        (0.1, 0.9),  # floor(0.5) = 0, at least 1
        (0.6, 0.6),  # 0.6 * 5 = 3 exactly: (0.9 + 0.5 + 0.4) / 3
        (1, 0.4),  # all: 2.0 / 5
    ],
)
def test_top_fraction_mean_by_hand(fraction, expected):
    close(top_fraction_mean(tensor([0.1, 0.9, 0.5, 0.1, 0.4]), fraction), expected)


def test_top_fraction_survives_floating_point_in_k():
    # 0.29 * 100 is 28.999999999999996, and 29 members are meant: 71..99.
    close(top_fraction_mean(torch.arange(100), 0.29), 85.0)
    # 10^-8 short of 3 is short of 3: k = 2, which float32 cannot tell.
    close(top_fraction_mean(torch.arange(10), 0.3 - 1e-9), 8.5)


def test_top_fraction_counts_valid_members_only():
    returns = tensor([[0.2, NAN, 0.8, 0.6], [NAN, NAN, 0.3, NAN], [NAN, NAN, NAN, NAN]])
    # Row 0: floor(0.5 * 3) = 1 -> 0.8 (with 4 members it would be 2).
    close(top_fraction_mean(returns, 0.5, valid=~returns.isnan()), [0.8, 0.3, NAN])


def test_top_fraction_of_equal_members_is_that_value_to_the_last_bit():
    valid = torch.arange(30) < torch.arange(1, 31).unsqueeze(1)  # 1..30 valid members
    means = top_fraction_mean(torch.full((30, 30), 0.7, dtype=torch.float64), 0.5, valid=valid)
    assert means.unique().tolist() == [0.7]
    assert (group_advantages(means) == 0).all()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, NAN])
def test_top_fraction_refuses(fraction):
    with pytest.raises(ValueError, match="fraction must be in"):
        top_fraction_mean(tensor([1.0, 2.0]), fraction)


def test_top_fraction_equals_loops(rollouts):
    outcomes, turn_mask, _, _ = rollouts
    valid = turn_mask.any(-1)
    for fraction in (0.1, 0.5, 1.0):
        actual = top_fraction_mean(outcomes, fraction, valid=valid)
        for p in range(P):
            for n in range(N):
                expected = reference.top_fraction_mean(outcomes[p, n].tolist(), fraction, valid[p, n].tolist())
                close(actual[p, n], expected)


# -------------------------------------------------------------------------------------------------- group advantages


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        # returns 1 2 3 6: mean 3, squares 4 + 1 + 0 + 9 = 14.
        ("population", [x / (math.sqrt(14 / 4) + 1e-6) for x in (-2, -1, 0, 3)]),
        ("sample", [x / (math.sqrt(14 / 3) + 1e-6) for x in (-2, -1, 0, 3)]),
        ("none", [-2.0, -1.0, 0.0, 3.0]),
    ],
)
def test_group_advantages_by_hand(std, expected):
    close(group_advantages(torch.tensor([1, 2, 3, 6]), std=std), expected, 1e-12)


def test_eps_is_added_to_the_standard_deviation():
    close(group_advantages(tensor([0.0, 2.0]), eps=1.0), [-0.5, 0.5])  # mean 1, std 1: 1 / (1 + 1)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_returns_give_exactly_zero(std, dtype):
    # B11: in float32 these have std 6e-8, and with eps 1e-8 an advantage of 0.81.
    for size in (3, 6, 8):
        advantages = group_advantages(torch.full((size,), 0.7, dtype=dtype), std=std, eps=0.0)
        assert advantages.tolist() == [0.0] * size
        assert advantages.dtype == torch.float64


def test_missing_reward_leaves_the_others_normalised():
    # B12: 1 0 0 has mean 1/3, std sqrt(2)/3, so (2/3) / std = sqrt(2) and (-1/3) / std = -1/sqrt(2).
    returns = torch.tensor([[1, 0, NAN, 0], [1, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
    advantages = group_advantages(returns, valid=(~returns.isnan()).int(), eps=0.0)
    close(advantages, [[2**0.5, -(0.5**0.5), 0, -(0.5**0.5)], [0] * 4, [0] * 4])


def test_lone_member_and_empty_groups():
    for std in ("population", "sample", "none"):
        assert group_advantages(tensor([[3.0], [5.0]]), std=std).tolist() == [[0.0], [0.0]]
        assert group_advantages(torch.zeros(3, 0), std=std).shape == (3, 0)
        assert group_advantages(torch.zeros(0, 3), std=std).shape == (0, 3)
    assert top_fraction_mean(torch.zeros(2, 0), 0.5).isnan().tolist() == [True, True]


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_group_advantages_equal_loops_and_sum_to_zero(rollouts, std):
    outcomes, turn_mask, _, _ = rollouts
    valid = turn_mask.any(-1)
    actual = group_advantages(outcomes, std=std, valid=valid)
    close(actual.sum(-1), torch.zeros(P, N))
    for p in range(P):
        for n in range(N):
            close(actual[p, n], reference.group_advantages(outcomes[p, n].tolist(), valid[p, n].tolist(), std))


def test_what_stands_at_invalid_members_is_never_read():
    valid = torch.tensor([True, False, True, True])
    expected = group_advantages(tensor([1.0, 0.0, 2.0, 4.0]), valid=valid)
    for filler in (NAN, math.inf, -math.inf, 1e30):
        assert group_advantages(tensor([1.0, filler, 2.0, 4.0]), valid=valid).equal(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages(tensor([1.0, NAN])), "returns must be finite"),
        (lambda: group_advantages(tensor([1.0, math.inf]), valid=torch.tensor([1, 1])), "returns must be finite"),
        (lambda: group_advantages(tensor([1.0, 2.0]), valid=torch.tensor([True])), "valid must have the shape"),
        (lambda: group_advantages(tensor([1.0, 2.0]), std="mad"), "std must be one of population, sample, none"),
        (lambda: group_advantages(tensor([1.0, 2.0]), eps=-1.0), "eps must be"),
        (lambda: group_advantages(tensor(1.0)), "must have a group axis"),
        (lambda: turn_returns(tensor([1.0]), torch.zeros(1, 2), -0.1), "kappa must be"),
        (lambda: turn_returns(tensor([1.0]), torch.zeros(2, 2), 0.1), "outcomes must be"),
        (lambda: turn_returns(tensor([NAN]), torch.zeros(1, 2), 0.1), "outcomes must be finite"),
        (lambda: turn_returns(tensor([1.0]), torch.zeros(1, 2), 0.1, penalties=tensor([[0.0, 0.1]])), "must be <= 0"),
        (lambda: strategy_returns(tensor([[1.0]]), 0.5, penalties=tensor([0.1])), "penalties must be <= 0"),
        (lambda: strategy_returns(tensor([[1.0]]), 0.5, penalties=tensor([0.0, 0.0])), "penalties must have"),
        (lambda: turn_advantages(torch.zeros(1, 2), torch.zeros(1), baseline="mean"), "baseline must be one of pooled"),
        (lambda: turn_advantages(torch.zeros(1, 2), torch.zeros(2)), "outcomes must be"),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ----------------------------------------------------------------------------------------------------------- returns


def test_strategy_returns_by_hand():
    outcomes = tensor([[[1.0, 0.0, 0.5, 0.25], [NAN, 0.4, NAN, NAN], [NAN] * 4]])  # (P, N, M) = (1, 3, 4)
    returns, valid = strategy_returns(outcomes, 0.5, valid=~outcomes.isnan(), penalties=tensor([[-0.5, 0.0, NAN]]))
    close(returns, [[0.25, 0.4, NAN]])  # (1 + 0.5) / 2 - 0.5; the one valid rollout; none
    assert valid.tolist() == [[True, True, False]]


def test_turn_returns_by_hand():
    # R(tau) - kappa * flagged + penalties, for two turns of trajectory 0, one of trajectory 1, and a failed one.
    outcomes = tensor([0.8, 0.2, NAN])
    flagged = torch.tensor([[False, True], [True, True], [True, False]])
    penalties = tensor([[0.0, -1.0], [-0.25, NAN], [NAN, NAN]])
    turn_mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    actual = turn_returns(outcomes, flagged, 0.1, turn_mask=turn_mask, penalties=penalties)
    close(actual, [[0.8, -0.3], [-0.15, NAN], [NAN, NAN]])


# --------------------------------------------------------------------------------------------------- turn advantages


def test_pooled_baseline_by_hand():
    # Trajectory 0 has three turns of return 1, trajectory 1 one turn of 0: mean 3/4, var 3/16, std sqrt(3)/4.
    returns = tensor([[1.0, 1.0, 1.0], [0.0, NAN, NAN]])
    mask = ~returns.isnan()
    std = 3**0.5 / 4
    expected = tensor([[0.25 / std] * 3, [-0.75 / std, 0.0, 0.0]])
    close(turn_advantages(returns, tensor([1.0, 0.0]), turn_mask=mask, eps=0.0), expected)


def test_trajectory_baseline_by_hand():
    # The same rollouts: mean of the outcomes 1/2, std 1/2.  A flag of kappa 0.1 costs 0.1 / 0.5 = 0.2 on its turn only.
    returns = tensor([[1.0, 0.9, 1.0], [0.0, NAN, NAN]])
    mask = ~returns.isnan()
    actual = turn_advantages(returns, tensor([1.0, 0.0]), turn_mask=mask, baseline="trajectory", eps=0.0)
    close(actual, [[1.0, 0.8, 1.0], [-1.0, 0.0, 0.0]])


def test_equal_outcomes_with_a_flag():
    # pooled: with d = kappa / 4, the returns lie d, d, d and -3d from their mean, std sqrt(3) d, whatever kappa is.
    for kappa in (0.1, 0.01):
        returns = turn_returns(torch.ones(2), torch.tensor([[0, 0], [0, 1]]), kappa)
        third = 3**-0.5
        close(turn_advantages(returns, torch.ones(2), eps=0.0), [[third, third], [third, -(3**0.5)]])
        assert (turn_advantages(returns, torch.ones(2), baseline="trajectory") == 0).all()
        assert count_penalty_only_groups(returns, torch.ones(2)) == 1


def test_lone_members():
    outcomes = tensor([1.0, NAN])
    lone_turn = tensor([[0.9, NAN], [NAN, NAN]])
    lone_trajectory = tensor([[0.9, 1.0], [NAN, NAN]])
    for baseline in ("pooled", "trajectory"):
        mask = ~lone_turn.isnan()
        assert (turn_advantages(lone_turn, outcomes, turn_mask=mask, baseline=baseline) == 0).all()
    mask = ~lone_trajectory.isnan()
    assert (turn_advantages(lone_trajectory, outcomes, turn_mask=mask, baseline="trajectory") == 0).all()
    # pooled: the members are the two turns, mean 0.95 and std 0.05.
    close(turn_advantages(lone_trajectory, outcomes, turn_mask=mask, eps=0.0), [[-1.0, 1.0], [0.0, 0.0]])


def test_valid_says_which_trajectories_have_a_say():
    returns, outcomes = tensor([[1.0], [0.0], [NAN]]), tensor([1.0, 0.0, 0.5])
    options = dict(turn_mask=~returns.isnan(), baseline="trajectory", std="none")
    close(turn_advantages(returns, tensor([1.0, 0.0, 1.0]), **options), [[0.5], [-0.5], [0.0]])
    # A trajectory without turns joins the baseline: mean 2/3.
    valid = torch.tensor([True, True, True])
    close(turn_advantages(returns, tensor([1.0, 0.0, 1.0]), valid=valid, **options), [[1 / 3], [-2 / 3], [0.0]])
    # An invalid trajectory takes its turns with it.
    valid = torch.tensor([True, False, True])
    close(turn_advantages(returns, outcomes, valid=valid, **options), [[0.25], [0.0], [0.0]])


@pytest.mark.parametrize("baseline", ["pooled", "trajectory"])
@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_turn_advantages_equal_loops(rollouts, baseline, std):
    outcomes, turn_mask, flagged, penalties = rollouts
    returns = turn_returns(outcomes, flagged, 0.1, turn_mask=turn_mask, penalties=penalties)
    actual = turn_advantages(returns, outcomes, turn_mask=turn_mask, baseline=baseline, std=std)
    assert (actual[~turn_mask] == 0).all()
    for p in range(P):
        for n in range(N):
            arguments = (returns[p, n].tolist(), outcomes[p, n].tolist(), turn_mask[p, n].tolist())
            close(actual[p, n], reference.turn_advantages(*arguments, baseline, std))
    if baseline == "pooled":
        close(actual.sum((-1, -2)), torch.zeros(P, N))


def test_flat_group_is_the_same_call_with_all_rollouts_on_one_axis(rollouts):
    outcomes, turn_mask, _, _ = rollouts
    returns = outcomes.unsqueeze(-1).expand(turn_mask.shape)
    flat = (returns.reshape(P, 1, N * M, K), outcomes.reshape(P, 1, N * M))
    mask = turn_mask.reshape(P, 1, N * M, K)
    actual = turn_advantages(*flat, turn_mask=mask, baseline="trajectory")
    # Without penalties every turn of a trajectory has GRPO's advantage of that trajectory.
    expected = group_advantages(outcomes.reshape(P, N * M), valid=turn_mask.any(-1).reshape(P, N * M))
    close(actual, torch.where(mask, expected.reshape(P, 1, N * M, 1), 0.0))


# ----------------------------------------------------------------------------------------------------------- metrics


def test_group_metrics():
    advantages = group_advantages(tensor([[0.7] * 4, [1.0, 0.0, 1.0, 1.0], [0.0] * 4, [0.2] * 4]))
    assert group_metrics(advantages) == {"dead_groups": 0.75, "frac_mixed": 0.25}
    assert group_metrics(torch.zeros(3, 2, 5, 7), group_axes=2) == {"dead_groups": 1.0, "frac_mixed": 0.0}
    assert group_metrics(tensor([[[0.0, 0.0], [0.0, 1.0]]]), group_axes=2)["frac_mixed"] == 1.0
    assert group_metrics(torch.zeros(0, 4)) == {}


def test_penalty_only_groups_are_counted(rollouts):
    outcomes, turn_mask, flagged, penalties = rollouts
    returns = turn_returns(outcomes, flagged, 0.1, turn_mask=turn_mask, penalties=penalties)
    # (1, 1) has equal outcomes, (2, 1) one valid trajectory; both have penalties that differ.
    assert count_penalty_only_groups(returns, outcomes, turn_mask=turn_mask) == 2
    unpenalised = turn_returns(outcomes, torch.zeros_like(flagged), 0.1, turn_mask=turn_mask)
    assert count_penalty_only_groups(unpenalised, outcomes, turn_mask=turn_mask) == 0
