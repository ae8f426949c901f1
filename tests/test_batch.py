"""Rows, mini-batches, micro-batches and the one place that pads and shifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import make_strategy, make_tokens, make_trajectory, tiny_model

from hsg.batch import Row, build_rows, collate, microbatches, minibatches, turn_token_advantages
from hsg.config.loading import make_config
from hsg.credit import Credit, assign_credit
from hsg.losses import policy_loss
from hsg.model.models import score
from hsg.types import ACTION, STRATEGY, Judgment


def small_credit(trajectories: Any, strategies: Any) -> Credit:
    config = make_config({"num_strategies": 2, "num_rollouts": 2})
    return assign_credit(config, strategies, trajectories, [[[Judgment(None)] * 2] * 2 for _ in trajectories])


def iteration(window: bool = False) -> list[Row]:
    """P = 3 tasks, N = 2 strategies, M = 2 rollouts of one to three turns."""
    outcomes = [[[1.0, 0.0], [0.5, 0.25]], [[0.0, 1.0], [1.0, 0.0]], [[0.75, 0.5], [0.0, 1.0]]]
    turns = ((2, 5, 3), (4,), (1, 6))
    trajectories = [
        [[make_trajectory(o, turns[(p + n + m) % 3], window=window) for m, o in enumerate(row)] for n, row in enumerate(task)]
        for p, task in enumerate(outcomes)
    ]  # fmt: skip
    strategies = [[make_strategy(num_tokens=3 + n) for n in range(2)] for _ in outcomes]
    return build_rows(strategies, trajectories, small_credit(trajectories, strategies))


def test_advantage_is_on_every_sampled_token_of_its_turn() -> None:
    """B14: replies of 2, 5 and 3 tokens, advantages 1.5, -2 and 0.25; prompt and observations are 4 ids each.

    input_ids[1:]   p p p a a o o o o b b b b b o o o o c c c
    response_mask   . . . 1 1 . . . . 1 1 1 1 1 . . . . 1 1 1
    """
    trajectory = make_trajectory(1.0, (2, 5, 3))
    (spread,) = turn_token_advantages(trajectory, torch.tensor([1.5, -2.0, 0.25, 9.0]))
    expected = [0.0] * 3 + [1.5] * 2 + [0.0] * 4 + [-2.0] * 5 + [0.0] * 4 + [0.25] * 3
    assert spread.tolist() == expected
    assert [a != 0 for a in expected] == trajectory.rows[0].response_mask.tolist()
    in_window = turn_token_advantages(make_trajectory(1.0, (2, 5, 3), window=True), torch.tensor([1.5, -2.0, 0.25]))
    assert [s.tolist() for s in in_window] == [[0.0] * 3 + [1.5] * 2, [0.0] * 3 + [-2.0] * 5, [0.0] * 3 + [0.25] * 3]


def test_rows_are_flattened_row_major_with_the_strategy_before_its_first_rollout() -> None:
    rows = iteration()
    assert [row.level for row in rows] == [STRATEGY, ACTION, ACTION] * 6
    assert [row.trajectory for row in rows] == [i for n in range(6) for i in (2 * n, 2 * n, 2 * n + 1)]
    for row in rows:
        assert row.advantages.dtype == torch.float32
        assert not row.advantages[~row.tokens.response_mask].any()


def test_invalid_trajectories_and_strategies_have_no_row() -> None:
    dead = [make_trajectory(None), make_trajectory(None, ())]
    trajectories = [[[make_trajectory(1.0), make_trajectory(None)], dead]]
    strategies = [[make_strategy(), make_strategy()]]
    rows = build_rows(strategies, trajectories, small_credit(trajectories, strategies))
    assert [(row.level, row.trajectory) for row in rows] == [(STRATEGY, 0), (ACTION, 0)]


def test_window_rows_are_one_per_turn() -> None:
    rows = iteration(window=True)
    assert [row.level for row in rows[:5]] == [STRATEGY, ACTION, ACTION, ACTION, ACTION]
    assert [row.trajectory for row in rows[:5]] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("num_parts", [1, 2, 5, 12, 20])
def test_minibatches_keep_trajectories_whole_and_strategies_with_their_first_rollout(num_parts: int) -> None:
    for rows in (iteration(), iteration(window=True)):
        parts = minibatches(rows, num_parts, torch.Generator().manual_seed(3))
        assert len(parts) == num_parts
        assert sorted(id(r) for part in parts for r in part) == sorted(id(r) for r in rows)
        held = [{row.trajectory for row in part} for part in parts]
        assert sum(map(len, held)) == len(set().union(*held)) == 12
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_minibatches_by_row_glue_a_strategy_to_its_first_turn() -> None:
    rows = iteration(window=True)
    num_turns = sum(row.level == ACTION for row in rows)
    parts = minibatches(rows, num_turns, torch.Generator().manual_seed(0), by_row=True)
    assert all(sum(row.level == ACTION for row in part) == 1 for part in parts)
    for part in parts:
        if part[0].level == STRATEGY:
            at = next(i for i, row in enumerate(rows) if row is part[0])
            assert part[1] is rows[at + 1]
    assert sum(part[0].level == STRATEGY for part in parts) == 6


def test_minibatches_are_shuffled_by_the_generator() -> None:
    rows = iteration()

    def split(seed: int) -> list[list[int]]:
        return [[r.trajectory for r in part] for part in minibatches(rows, 4, torch.Generator().manual_seed(seed))]

    assert split(0) == split(0) != split(1)


def test_microbatches_hold_every_row_once_within_the_limit() -> None:
    rows = iteration()
    parts = list(microbatches(rows, 30))
    assert sorted(id(r) for part in parts for r in part) == sorted(id(r) for r in rows)
    assert all(len(part) * max(map(len, part)) <= 30 or len(part) == 1 for part in parts)
    assert len(parts) > 2
    assert [len(p) for p in microbatches(rows, 1)] == [1] * len(rows)
    assert [len(p) for p in microbatches(rows, 10_000)] == [len(rows)]
    assert list(microbatches([], 30)) == []


def test_collate_draws_the_target_row_over_the_mask_row() -> None:
    """
    row 0   input_ids       10 11 12 13 14 15        row 1   input_ids       10 11 12  .  .  .
            target          11 12 13 14 15                   target          11 12  .  .  .
            response_mask    .  1  1  .  1                   response_mask    .  1  .  .  .
            old_logprobs     0 -2 -3  0 -5  (hundredths)     old_logprobs     0 -2  0  0  0
            temperatures     1  2  2  1  2                   temperatures     1  3  1  1  1
    """
    one = make_tokens((2, False), (2, True), (1, False), (1, True), temperature=2.0)
    other = make_tokens((2, False), (1, True), temperature=3.0)
    rows = [
        Row(one, torch.tensor([0.0, 5.0, 5.0, 0.0, 6.0]), ACTION, 0),
        Row(other, torch.tensor([0.0, 7.0]), STRATEGY, 0),
    ]
    batch = collate(rows, pad_id=12)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 15], [10, 11, 12, 12, 12, 12]]
    assert batch.attention_mask.tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.old_logprobs.mul(100).round().tolist() == [[0, -2, -3, 0, -5], [0, -2, 0, 0, 0]]
    assert batch.temperatures.tolist() == [[1, 2, 2, 1, 2], [1, 3, 1, 1, 1]]
    assert batch.advantages.tolist() == [[0, 5, 5, 0, 6], [0, 7, 0, 0, 0]]
    assert batch.levels.tolist() == [[ACTION] * 5, [STRATEGY] * 5]
    assert batch.ref_logprobs is None


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_what_stands_at_padding_changes_nothing(kind: str) -> None:
    """The pad id inside a reply is a token like any other; the pad id behind a row is nothing at all."""
    model, rows = tiny_model(kind), iteration()
    values = []
    for pad_id in (0, 10, 96):
        batch = collate(rows, pad_id=pad_id)
        model.zero_grad()
        logprobs, _ = score(model, batch)
        loss, _ = policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.response_mask, levels=batch.levels)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        values.append((loss.detach(), logprobs.detach(), gradient))
    for other in values[1:]:
        for a, b in zip(values[0], other, strict=True):
            assert torch.equal(a, b)
