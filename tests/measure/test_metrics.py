"""Token counts of a rollout by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from fakes import make_trajectory
from test_credit import NOT_ASKED, configure, credit

from hsg.measure.metrics import rollout_metrics, unique_tokens


def renumber(trajectory, first_ids):
    """The same trajectory with other ids at its beginning."""
    row = trajectory.rows[0]
    ids = torch.cat([torch.tensor(first_ids), row.input_ids[len(first_ids) :]])
    return replace(trajectory, rows=(replace(row, input_ids=ids), *trajectory.rows[1:]))


def test_prompts_count_once_and_later_tokens_always():
    # Prompt 4, then 2 sampled + 4 seen + 5 sampled + 4 seen + 3 sampled = 18 later tokens.
    one = make_trajectory(1.0)
    assert unique_tokens([[one]]) == 4 + 18
    assert unique_tokens([[one, one, make_trajectory(1.0, (2,))]]) == 4 + 18 + 18 + 2
    # Another strategy: its prompt differs from the third id on.
    other = renumber(one, [10, 11, 90, 91])
    assert unique_tokens([[one, one], [other]]) == 4 + 2 * 18 + (2 + 18)


def test_windows_and_what_was_never_played():
    assert unique_tokens([[make_trajectory(1.0, (2, 5), window=True)]]) == 4 + 2 + (4 + 5)
    assert unique_tokens([[make_trajectory(None, ())]]) == 0


def test_turns_with_several_actions_are_counted():
    one, other = make_trajectory(1.0), make_trajectory(0.0, (2,))
    several = tuple(replace(turn, several_actions=k != 1, num_cut=k) for k, turn in enumerate(one.turns))
    trajectories = [[[replace(one, turns=several), other]]]
    sums = rollout_metrics(None, trajectories, [[[NOT_ASKED] * 2]], credit(configure(), trajectories[0]))
    assert sums["rollout/several_actions_rate"] == (2, 4)
    assert sums["rollout/response_tokens"] == (2 + 5 + 1 + 3 + 2 + 2, 4)  # sampled, trained or not
