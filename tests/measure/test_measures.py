"""Measures of many samples, by hand: pass@k, outcomes, entropy of the two segments, diversity, the hard set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import fake_embed, make_trajectory

from hsg.measure.measures import outcome_of, sample_measures
from hsg.strategy.selector import mean_pairwise_distance
from hsg.types import Trajectory


def sample(outcome: float | None, *, task: str = "t", feedback: str | None = None, cut: int = 0) -> Trajectory:
    """Turns of 2, 5 and 3 tokens, the first `cut` of each a strategy's; token n of the row has log-prob -n / 100."""
    made = make_trajectory(outcome, task=task)
    turns = tuple(replace(t, num_strategy_tokens=cut, strategy=f"s{cut}" if cut else None) for t in made.turns)
    return replace(made, turns=turns, feedback=feedback, strategy=None if cut else made.strategy)


def test_pass_at_k_and_outcomes_by_hand() -> None:
    samples = [
        [sample(1.0, feedback="all"), sample(0.0, feedback="1, 2"), sample(0.0, feedback="1, 2"), sample(0.0)],
        [sample(0.0, task="u", feedback="3"), sample(None, task="u"), *[sample(0.0, task="u", feedback="4")] * 2],
    ]
    found = sample_measures(samples)
    assert (found["num_tasks"], found["num_samples"], found["num_failed"]) == (2, 3, 1)
    # The first task: 1 of 4, so pass@k = k/4; the second: never.
    assert found["pass_at_k"] == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    # Of the first: all; 1, 2; and the one without feedback. Of the second: 3 and 4.
    assert found["distinct_outcomes"] == (3 + 2) / 2
    assert found["solved_share"] == 0.5
    assert found["score"] == pytest.approx((1 / 4 + 0) / 2)
    assert outcome_of(sample(0.0)) == (False, 0.0)


def test_tasks_without_a_whole_sample_say_nothing() -> None:
    broken = [[sample(None), sample(None)]]
    assert sample_measures(broken) == {"num_tasks": 0, "num_samples": 0, "num_failed": 2}


def test_entropy_of_the_two_segments_is_the_mean_surprise_of_their_tokens() -> None:
    one = sample(1.0, cut=2)
    # Sampled positions: 3-4, 9-13, 18-20 of the row (prompt and observations are 4 ids each); log-prob of position n is -(n + 1) / 100.
    positions = [range(3, 5), range(9, 14), range(18, 21)]
    strategy = [(p + 1) / 100 for span in positions for p in list(span)[:2]]
    action = [(p + 1) / 100 for span in positions for p in list(span)[2:]]
    found = sample_measures([[one]])
    assert found["strategy_entropy"] == pytest.approx(sum(strategy) / len(strategy))
    assert found["action_entropy"] == pytest.approx(sum(action) / len(action))
    assert found["strategy_tokens_per_turn"] == 2
    assert found["tokens_per_turn"] == pytest.approx(10 / 3)
    assert "strategy_entropy" not in sample_measures([[sample(1.0)]])  # no strategy stands in its turns


def test_distance_is_between_the_samples_of_one_task() -> None:
    samples = [[sample(1.0, cut=1), sample(0.0, cut=2)], [sample(1.0, task="u", cut=1), sample(1.0, task="u", cut=1)]]
    apart = float(mean_pairwise_distance(fake_embed(["s1 s1 s1", "s2 s2 s2"])))
    assert apart > 0
    assert sample_measures(samples, fake_embed)["strategy_distance"] == pytest.approx(apart / 2)
    assert "strategy_distance" not in sample_measures([[sample(1.0, cut=1)]], fake_embed)


def test_samples_are_evaluations_with_seeds_in_a_row(guesser) -> None:  # type: ignore[no-untyped-def]
    from fakes import GuessTaskSet

    from hsg.config.loading import make_config
    from hsg.measure.evaluation import play_once, play_samples

    config = make_config(
        {"prompts": {"style": "terse"}, "algorithm": "grpo", "rollout": {"max_turns": 2, "max_action_tokens": 8},
         "log": {"quiet": True}}
    )  # fmt: skip
    task_set = GuessTaskSet()
    tasks = task_set.tasks("dev")[:3]
    samples = play_samples(config, guesser, task_set, tasks, 2, seed=5)
    assert [[t.task.id for t in row] for row in samples] == [[task.id] * 2 for task in tasks]
    alone = play_once(config, guesser, task_set, tasks, seed=6)
    assert all(
        torch.equal(row[1].rows[0].input_ids, t.rows[0].input_ids) for row, t in zip(samples, alone, strict=True)
    )
