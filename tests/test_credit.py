"""From records to returns and advantages of both levels, against goldens worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fakes import make_strategy, make_trajectory

from hsg.config import Config, RewardConfig
from hsg.configfile import make_config
from hsg.credit import Credit, assign_credit, format_penalty, length_penalty
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
