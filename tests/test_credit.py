"""From records to returns and advantages of both levels, against goldens worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import make_strategy, make_trajectory

from hsg.config.loading import make_config
from hsg.config.options import Config, RewardConfig
from hsg.credit import Credit, Signals, assign_credit, format_penalty, length_penalty
from hsg.protocol import StopReason
from hsg.types import Judgment, Strategy, Trajectory

NOT_ASKED = Judgment(None)


def configure(**given: Any) -> Config:
    return make_config({"num_strategies": 2, "num_rollouts": 3, **given})


def credit(
    config: Config,
    trajectories: list[list[Trajectory]],
    flagged: dict[tuple[int, int], tuple[int, ...]] | None = None,
    strategies: list[Strategy] | None = None,
    flat: bool = False,
) -> Credit:
    """One task: trajectories [N][M]; flagged turns by (n, m)."""
    judgments = [
        [Judgment("x", (flagged or {}).get((n, m), ())) for m in range(len(group))]
        for n, group in enumerate(trajectories)
    ]
    made = None if flat else [strategies or [make_strategy() for _ in trajectories]]
    return assign_credit(config, made, [trajectories], [judgments])


def normal(values: list[float], eps: float = 1e-6) -> list[float]:
    mean = sum(values) / len(values)
    return [(v - mean) / (math.sqrt(sum((w - mean) ** 2 for w in values) / len(values)) + eps) for v in values]


def test_length_penalty_by_hand() -> None:
    """0 up to half the limit of 10, then a straight line to -1: 6 tokens -0.2, 9 tokens -0.8."""
    config = RewardConfig(length_penalty=True)
    assert [length_penalty(n, 10, config) for n in (0, 3, 5, 6, 9, 10)] == pytest.approx([0, 0, 0, -0.2, -0.8, -1])
    late = RewardConfig(length_penalty=True, length_penalty_start=0.8)
    assert [length_penalty(n, 10, late) for n in (8, 9, 10)] == pytest.approx([0, -0.5, -1])
    assert length_penalty(10, 10, RewardConfig()) == 0.0


def test_format_penalty_is_a_size() -> None:
    config = RewardConfig(format_penalty=0.5)
    assert (format_penalty(True, config), format_penalty(False, config)) == (0.0, -0.5)
    assert math.copysign(1, format_penalty(False, RewardConfig())) == 1  # "-0.0" would stand in the files


def test_returns_and_advantages_of_both_levels() -> None:
    """N = 2, M = 3, delta 0.5, kappa 0.1, one turn each; turn 0 of (0, 1) is flagged.

    strategy 0: outcomes 1, 0.5, 0   k = floor(0.5 * 3) = 1   return 1
    strategy 1: outcomes 0, 0.25, 0                           return 0.25
    strategies: mean 0.625, std 0.375                         advantages +1, -1
    turns of strategy 0: returns 1, 0.5 - 0.1, 0, pooled
    """
    outcomes = [[1.0, 0.5, 0.0], [0.0, 0.25, 0.0]]
    got = credit(configure(), [[make_trajectory(o, (3,)) for o in row] for row in outcomes], {(0, 1): (0,)})
    assert got.strategy_returns is not None
    assert got.strategy_advantages is not None
    assert got.strategy_returns.tolist() == [[1.0, 0.25]]
    assert got.strategy_advantages.tolist()[0] == pytest.approx([1, -1], abs=1e-5)
    assert got.turn_returns[0, 0, :, 0].tolist() == pytest.approx([1.0, 0.4, 0.0])
    assert got.turn_advantages[0, 0, :, 0].tolist() == pytest.approx(normal([1.0, 0.4, 0.0]), abs=1e-7)
    assert got.turn_advantages[0, 1, :, 0].tolist() == pytest.approx(normal([0.0, 0.25, 0.0]), abs=1e-7)
    assert got.turn_advantages.dtype == torch.float64
    assert got.metrics["advantage/dead_groups"] == 0.0
    assert got.metrics["advantage/strategy_frac_mixed"] == 1.0


@pytest.mark.parametrize(("delta", "expected"), [(0.1, 1.0), (0.5, 1.0), (0.67, 0.75), (1.0, 0.5)])
def test_delta(delta: float, expected: float) -> None:
    got = credit(configure(delta=delta), [[make_trajectory(o, (2,)) for o in (0.5, 0.0, 1.0)]] * 2)
    assert got.strategy_returns is not None
    assert got.strategy_returns[0, 0].item() == pytest.approx(expected)


def test_kappa_is_a_penalty_of_turns_only() -> None:
    got = credit(configure(kappa=0.3), [[make_trajectory(1.0), make_trajectory(0.0)]] * 2, {(0, 0): (0, 2)})
    assert got.turn_returns[0, 0, 0].tolist() == pytest.approx([0.7, 1.0, 0.7])
    assert got.strategy_returns is not None
    assert got.strategy_returns.tolist() == [[1.0, 1.0]]


def test_every_penalty_of_a_turn_is_added_and_recorded() -> None:
    """Turn 0 unparsed (-0.5), turn 1 invalid and flagged (-0.2 - 0.1), turn 2 with 9 of 10 tokens (-0.8)."""
    reward = {"format_penalty": 0.5, "invalid_action_penalty": 0.2, "length_penalty": True}
    one = make_trajectory(1.0, (2, 5, 9), unparsed=(0,), invalid=(1,))
    got = credit(configure(reward=reward), [[one, make_trajectory(0.0, (2,))]] * 2, {(0, 0): (1,)})
    assert got.turn_returns[0, 0, 0].tolist() == pytest.approx([0.5, 0.7, 0.2])
    assert got.turn_format_penalties[0, 0, 0].tolist() == [-0.5, 0.0, 0.0]
    assert got.turn_length_penalties[0, 0, 0].tolist() == pytest.approx([0.0, 0.0, -0.8])
    assert got.strategy_returns is not None
    assert got.strategy_returns[0, 0].item() == 1.0  # outcomes without the turns' penalties


def test_tokens_that_are_not_trained_are_long_all_the_same() -> None:
    """9 of 10 tokens were sampled, of which 5 stood behind the first action."""
    one = make_trajectory(1.0, (4,))
    one = replace(one, turns=(replace(one.turns[0], num_cut=5),))
    got = credit(configure(reward={"length_penalty": True}), [[one, make_trajectory(0.0, (2,))]] * 2)
    assert got.turn_length_penalties[0, 0, 0].tolist() == pytest.approx([-0.8])


def test_penalties_of_a_strategy_come_after_the_mean() -> None:
    strategies = [make_strategy(num_tokens=9), make_strategy(parsed=False)]
    config = configure(reward={"format_penalty": 0.5, "length_penalty": True})
    got = credit(config, [[make_trajectory(1.0, (2,)), make_trajectory(0.0, (2,))]] * 2, strategies=strategies)
    assert got.strategy_returns is not None
    assert got.strategy_returns.tolist()[0] == pytest.approx([1 - 0.8, 1 - 0.5])


def test_failed_trajectory_is_a_member_of_nothing() -> None:
    """Valid outcomes 1 and 0: without the failed one the turns' advantages are +1 and -1, k = floor(0.5 * 2) = 1."""
    group = [make_trajectory(1.0, (2,)), make_trajectory(None, (2, 2)), make_trajectory(0.0, (2,))]
    got = credit(configure(), [group, [make_trajectory(None)] * 3], {(0, 1): (1,)})
    assert got.valid.tolist() == [[[True, False, True], [False] * 3]]
    assert got.turn_advantages[0, 0, :, 0].tolist() == pytest.approx([1, 0, -1], abs=1e-5)
    assert got.turn_returns[0, 0, 1].isnan().all()
    assert not got.turn_mask[0, 0, 1].any()
    assert got.strategy_returns is not None
    assert got.strategy_advantages is not None
    assert got.strategy_returns[0, 0].item() == 1.0
    assert got.strategy_returns[0, 1].isnan()
    assert got.strategy_advantages.tolist() == [[0.0, 0.0]]  # one valid member


def test_trajectory_without_a_turn_counts() -> None:
    """Its first prompt filled the context: outcome 0 like any other, by no fault of the environment."""
    empty = make_trajectory(0.0, (), reason=StopReason.CONTEXT_FULL)
    got = credit(configure(delta=1.0), [[make_trajectory(1.0, (2,)), empty]] * 2)
    assert got.strategy_returns is not None
    assert got.strategy_returns.tolist() == [[0.5, 0.5]]
    trajectory = configure(advantage={"turn_baseline": "trajectory"})
    got = credit(trajectory, [[make_trajectory(1.0, (2,)), empty]] * 2)
    assert got.turn_advantages[0, 0, 0, 0].item() == pytest.approx(1.0, abs=1e-5)
    nobody = credit(configure(), [[empty, empty]] * 2)
    assert nobody.turn_advantages.shape == (1, 2, 2, 0)


def test_dead_groups_are_exactly_zero() -> None:
    """B11: 0.7 everywhere, in both levels."""
    got = credit(configure(), [[make_trajectory(0.7, (2, 3)) for _ in range(3)]] * 2)
    assert got.strategy_advantages is not None
    assert not got.turn_advantages.any()
    assert not got.strategy_advantages.any()
    assert got.metrics["advantage/dead_groups"] == 1.0
    assert got.metrics["advantage/strategy_dead_groups"] == 1.0


def test_penalty_only_groups_are_counted() -> None:
    group = [make_trajectory(1.0), make_trajectory(1.0)]
    got = credit(configure(), [group, group], {(0, 1): (2,)})
    assert got.metrics["advantage/penalty_only_groups"] == 1.0
    assert got.turn_advantages[0, 0].any()
    held = credit(configure(advantage={"turn_baseline": "trajectory"}), [group, group], {(0, 1): (2,)})
    assert not held.turn_advantages.any()


def test_scale_multiplies_outcomes_and_leaves_the_record_alone() -> None:
    group = [make_trajectory(1.0, (2,)), make_trajectory(0.0, (2,))]
    got = credit(configure(reward={"scale": 10.0}), [group, group], {(0, 0): (0,)})
    assert got.turn_returns[0, 0, :, 0].tolist() == pytest.approx([9.9, 0.0])
    assert group[0].outcome == 1.0


def test_flat_method_has_one_group_and_no_strategies() -> None:
    config = make_config({"algorithm": "grpo", "num_strategies": 2, "num_rollouts": 2})
    got = credit(config, [[make_trajectory(o, (2, 2)) for o in (1.0, 0.0, 0.0, 0.0)]], flat=True)
    assert got.strategy_returns is None
    expected = normal([1.0, 0.0, 0.0, 0.0])
    assert got.turn_advantages[0, 0, :, 0].tolist() == pytest.approx(expected, abs=1e-7)
    assert got.turn_advantages[0, 0, :, 1].tolist() == pytest.approx(expected, abs=1e-7)


def test_tasks_do_not_mix() -> None:
    config = configure()
    tasks = [[[make_trajectory(o, (2,)) for o in row] for row in task] for task in
             ([[1.0, 0.0], [0.5, 0.5]], [[0.2, 0.2], [0.9, 0.1]])]  # fmt: skip
    judgments = [[[NOT_ASKED] * 2] * 2] * 2
    strategies = [[make_strategy(), make_strategy()] for _ in tasks]
    both = assign_credit(config, strategies, tasks, judgments)
    for p in range(2):
        alone = assign_credit(config, strategies[p : p + 1], tasks[p : p + 1], judgments[p : p + 1])
        assert torch.equal(both.turn_advantages[p], alone.turn_advantages[0])
        assert both.strategy_advantages is not None
        assert alone.strategy_advantages is not None
        assert torch.equal(both.strategy_advantages[p], alone.strategy_advantages[0])


# ------------------------------------------------------------------------------- rewards of turns, bonuses, tokens, ranks


def with_rewards(trajectory: Trajectory, rewards: list[float], seen: list[str] | None = None) -> Trajectory:
    turns = [
        replace(turn, reward=reward, observation=turn.observation if seen is None else seen[k])
        for k, (turn, reward) in enumerate(zip(trajectory.turns, rewards, strict=True))
    ]
    return replace(trajectory, turns=tuple(turns))


def flat(algorithm: str = "grpo", **given: Any) -> Config:
    return make_config({"algorithm": algorithm, "num_strategies": 1, "num_rollouts": 2, **given})


@pytest.mark.parametrize(("turns", "expected"), [("outcome", [0.0, 0.0, 0.75]), ("dense", [0.25, 0.5, 0.0])])
def test_rewards_of_turns_sum_to_the_outcome(turns: str, expected: list[float]) -> None:
    """Gains 1 2 0 and an outcome of 0.75; a failed one has none; the record's own rewards stay."""
    one = with_rewards(make_trajectory(0.75), [1.0, 2.0, 0.0])
    got = credit(flat(reward={"turns": turns}), [[one, make_trajectory(None)]], flat=True)
    assert got.turn_rewards[0, 0].tolist() == [pytest.approx(expected), [0.0] * 3]
    assert [turn.reward for turn in one.turns] == [1.0, 2.0, 0.0]


def test_penalties_stand_in_the_rewards_of_their_turns() -> None:
    """Scale 10, invalid action -0.1, kappa 0.2; the return-to-go counts what is still to come."""
    config = flat("reinforce++", reward={"scale": 10, "invalid_action_penalty": 0.1}, kappa=0.2)
    one = make_trajectory(1.0, invalid=(1,))
    got = credit(config, [[one, make_trajectory(0.0, (2,))]], {(0, 0): (0,)}, flat=True)
    assert got.turn_rewards[0, 0, 0].tolist() == pytest.approx([-0.2, -0.1, 10.0])
    assert got.turn_returns[0, 0, 0].tolist() == pytest.approx([9.7, 9.9, 10.0])
    assert got.turn_returns[0, 0, 1].tolist() == pytest.approx([0.0, math.nan, math.nan], nan_ok=True)


def test_gigpo_finds_equal_observations() -> None:
    """Both begin at "hall"; "attic" is seen once, "cellar" twice in one trajectory. gamma 0.5, scale 1, no deviation.

    returns to go 0.5 1 | 0 0 0        A_E +-0.5        hall: 0.5 and 0 -> +-0.25        cellar: both 0
    """
    config = flat("gigpo", reward={"scale": 1}, advantage={"gamma": 0.5, "std": "none"})
    a = with_rewards(make_trajectory(1.0, (2, 2)), [0, 1], ["hall", "attic"])
    b = with_rewards(make_trajectory(0.0, (2, 2, 2)), [0, 0, 0], ["hall", "cellar", "cellar"])
    got = credit(config, [[a, b]], flat=True).turn_advantages[0, 0]
    assert got.tolist() == [pytest.approx([0.75, 0.5, 0.0]), pytest.approx([-0.75, -0.5, -0.5])]


def test_gigpo_after_a_response_without_an_action_the_world_is_where_it_was() -> None:
    """Our "no action" is no state of the world: b's second turn is "hall" once more, not what a read in the attic.

    returns to go 0.5 1 | 0 0        A_E +-0.5        hall: 0.5, 0 and 0 -> 1/3, -1/6, -1/6        a's second turn: alone, 0
    """
    config = flat("gigpo", reward={"scale": 1}, advantage={"gamma": 0.5, "std": "none"})
    a = with_rewards(make_trajectory(1.0, (2, 2)), [0, 1], ["hall", "no action"])
    b = with_rewards(make_trajectory(0.0, (2, 2), unparsed=(0,)), [0, 0], ["hall", "no action"])
    got = credit(config, [[a, b]], flat=True).turn_advantages[0, 0]
    assert got.tolist() == [pytest.approx([0.5 + 1 / 3, 0.5]), pytest.approx([-0.5 - 1 / 6] * 2)]


def test_observations_of_other_tasks_do_not_count() -> None:
    config = flat("gigpo", reward={"scale": 1}, advantage={"gamma": 0.5, "std": "none"})
    one = [[make_trajectory(1.0, (2, 2)), make_trajectory(0.0, (2, 2))]]
    two = [[make_trajectory(0.0, (2, 2)), make_trajectory(0.0, (2,))]]
    both = assign_credit(config, None, [one, two], [[[NOT_ASKED] * 2]] * 2)
    assert torch.equal(
        both.turn_advantages[0], assign_credit(config, None, [one], [[[NOT_ASKED] * 2]]).turn_advantages[0]
    )
    assert not both.turn_advantages[1].any()


def test_bonus_is_for_trajectories_that_got_nothing() -> None:
    """weight 0.5, bonuses 2 and 0 on the failure, 8 on the success, which does not get it. No deviation.

    outcomes that the baseline sees: 1, and 0 + mean(1, 0) = 0.5; mean 0.75
    """
    config = flat("rnd", rnd={"weight": 0.5}, advantage={"std": "none"})
    group = [make_trajectory(1.0, (2,)), make_trajectory(0.0, (2, 2))]
    signals = Signals(bonuses=[torch.tensor([8.0]), torch.tensor([2.0, 0.0])])
    got = assign_credit(config, None, [[group]], [[[NOT_ASKED] * 2]], signals)
    assert got.turn_returns[0, 0].tolist() == [pytest.approx([1.0, math.nan], nan_ok=True), pytest.approx([1.0, 0.0])]
    assert got.turn_advantages[0, 0].tolist() == [pytest.approx([0.25, 0.0]), pytest.approx([0.25, -0.75])]
    assert got.outcomes[0, 0].tolist() == [1.0, 0.0]
    dead = [make_trajectory(0.0, (2,)), make_trajectory(0.0, (2,))]
    bonuses = Signals(bonuses=[torch.tensor([2.0]), torch.tensor([0.0])])
    assert assign_credit(config, None, [[dead]], [[[NOT_ASKED] * 2]], bonuses).turn_advantages.any()


def test_rnd_of_weight_zero_is_grpo() -> None:
    group = [make_trajectory(1.0, (2,)), make_trajectory(0.0, (2, 2))]
    signals = Signals(bonuses=[torch.tensor([8.0]), torch.tensor([2.0, 0.0])])
    plain = assign_credit(flat(), None, [[group]], [[[NOT_ASKED] * 2]])
    got = assign_credit(flat("rnd", rnd={"weight": 0.0}), None, [[group]], [[[NOT_ASKED] * 2]], signals)
    assert torch.equal(got.turn_advantages, plain.turn_advantages)


def test_ppo_reads_the_value_before_each_turn() -> None:
    """Turns of 2 and 3 tokens: the values of tokens 0 and 2. lambda = gamma = 1, outcome 1: A = 1 - V, returns 1."""
    config = flat("ppo", advantage={"whiten": False})
    group = [make_trajectory(1.0, (2, 3)), make_trajectory(None, (2,))]
    signals = Signals(values=[torch.tensor([0.25, 9, 0.5, 9, 9]).double(), torch.zeros(0)])
    got = assign_credit(config, None, [[group]], [[[NOT_ASKED] * 2]], signals)
    assert got.turn_advantages[0, 0].tolist() == [pytest.approx([0.75, 0.5]), [0.0, 0.0]]
    assert got.turn_returns[0, 0, 0].tolist() == pytest.approx([1.0, 1.0])
    assert got.token_advantages is None


def test_tokens_have_advantages_of_their_own() -> None:
    """The same with tokens for units: 1 - V each; a turn's number is the mean of its tokens'."""
    config = flat("ppo", advantage={"whiten": False, "unit": "token"})
    group = [make_trajectory(1.0, (2, 1)), make_trajectory(0.0, (1,))]
    signals = Signals(values=[torch.tensor([0.25, 0.75, 0.5]), torch.tensor([0.25])])
    got = assign_credit(config, None, [[group]], [[[NOT_ASKED] * 2]], signals)
    assert got.token_advantages is not None
    assert got.token_advantages[0, 0].tolist() == [pytest.approx([0.75, 0.25, 0.5]), pytest.approx([-0.25, 0.0, 0.0])]
    assert got.turn_advantages[0, 0].tolist() == [pytest.approx([0.5, 0.5]), pytest.approx([-0.25, 0.0])]
    assert got.turn_returns[0, 0].tolist() == [pytest.approx([1.0, 1.0]), pytest.approx([0.0, math.nan], nan_ok=True)]


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize("estimator", ["group", "rloo", "reinforce++"])  # gigpo's states are of turns: refused
def test_units_of_one_token_are_turns(estimator: str, unit: str) -> None:
    group = [make_trajectory(1.0, (1, 1, 1)), make_trajectory(0.25, (1,))]
    options = {"estimator": estimator, "whiten": True}
    turns = credit(flat(advantage=options), [group], flat=True)
    got = credit(flat(advantage={**options, "unit": unit}), [group], flat=True)
    assert torch.equal(got.turn_advantages, turns.turn_advantages)
    assert turns.turn_advantages.any()


def test_whitening_is_over_all_ranks() -> None:
    """A rank with the first task, one with the second and one with none come to what one rank with both has."""
    config = flat("reinforce++")
    tasks = [
        [[make_trajectory(1.0, (2, 2)), make_trajectory(0.0, (2,))]],
        [[make_trajectory(0.5, (2,)), make_trajectory(0.0, (2,))]],
    ]
    judged = [[[NOT_ASKED] * 2]] * 2
    both = assign_credit(config, None, tasks, judged)
    said: list[Any] = []
    for part in (tasks[:1], tasks[1:], []):
        assign_credit(config, None, part, judged[: len(part)], gather=lambda mine: said.extend(mine) or mine)
    alone = [
        assign_credit(config, None, part, judged[: len(part)], gather=lambda _: said)
        for part in (tasks[:1], tasks[1:], [])
    ]
    assert alone[0].turn_advantages[0, 0].tolist() == [pytest.approx(x) for x in both.turn_advantages[0, 0].tolist()]
    assert alone[1].turn_advantages[0, 0, :, 0].tolist() == pytest.approx(both.turn_advantages[1, 0, :, 0].tolist())
    assert alone[2].turn_advantages.shape == (0, 1, 2, 0)


def test_rollout_that_was_not_shown_its_strategy_says_nothing_of_it() -> None:
    group = [
        replace(make_trajectory(1.0, (2,)), strategy=None),
        make_trajectory(0.25, (2,)),
        make_trajectory(0.5, (2,)),
    ]
    got = credit(
        make_config({"algorithm": "rlad", "num_strategies": 2, "num_rollouts": 3}),
        [group, [make_trajectory(0.0, (2,))] * 3],
    )
    assert got.strategy_returns is not None
    assert got.strategy_returns.tolist() == [[0.375, 0.0]]
    assert got.turn_advantages[0, 0, :, 0].tolist() == pytest.approx(normal([1.0, 0.25, 0.5]), abs=1e-7)


def test_a_rank_without_a_task_has_empty_credit() -> None:
    got = assign_credit(configure(), [], [], [])
    assert got.turn_advantages.shape == (0, 2, 3, 0)
    assert got.strategy_advantages is not None
    assert got.strategy_advantages.shape == (0, 2)
