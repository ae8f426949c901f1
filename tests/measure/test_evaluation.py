"""Evaluation and checkpoints: the same episodes every time, strategies taken away or exchanged, folders whole or absent."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import GuessTaskSet
from test_trainer import configure

from hsg.measure.evaluation import evaluate, evaluation_tasks, given_strategies, play_once
from hsg.model.policy import Policy
from hsg.ranks.distributed import Distributed
from hsg.types import Trajectory


def play(policy: Policy, task_set: GuessTaskSet | None = None, seed: int = 0, **given: Any) -> list[Trajectory]:
    strategies = given.pop("strategies", "own")
    config = configure(evaluation={"batch_size": 3, "temperature": 1.0, **given.pop("evaluation", {})}, **given)
    task_set = task_set or GuessTaskSet()
    tasks = evaluation_tasks(config, task_set)
    texts = given_strategies(config, policy, task_set, tasks, Distributed(), strategies, seed=seed)
    return play_once(config, policy, task_set, tasks, seed=seed, strategies=texts)


def essence(played: list[Trajectory]) -> list[Any]:
    return [(t.task.id, t.seed, t.strategy, [turn.response for turn in t.turns], t.outcome) for t in played]


def test_tasks_are_fixed_and_disjoint_from_training() -> None:
    """B20: neither the seed nor the process matters, and a larger set begins with the smaller one."""
    task_set = GuessTaskSet(num_tasks=40)
    few = evaluation_tasks(configure(evaluation={"num_tasks": 10}), task_set)
    assert few == evaluation_tasks(configure(seed=5, evaluation={"num_tasks": 10}), task_set)
    assert few == evaluation_tasks(configure(evaluation={"num_tasks": 20}), task_set)[:10]
    assert len(evaluation_tasks(configure(evaluation={"num_tasks": None}), task_set)) == 40
    assert not {t.id for t in few} & {t.id for t in task_set.tasks("train")}
    assert [t.id for t in few] != [t.id for t in task_set.tasks("dev")[:10]]


def test_two_evaluations_meet_the_same_episodes(guesser: Policy) -> None:
    one = play(guesser)
    assert essence(one) == essence(play(guesser)) == essence(play(guesser, evaluation={"batch_size": 50}))
    assert [t.task.id for t in one] == [t.id for t in evaluation_tasks(configure(), GuessTaskSet())]
    assert essence(one) != essence(play(guesser, seed=1))
    assert essence(play(guesser, evaluation={"num_tasks": 3})) == essence(one)[:3]
    assert len({t.seed for t in one}) == 8  # each task is a world of its own


def test_weights_are_copied_once_in_bfloat16(guesser: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hsg evaluate` plays without `Distributed.forwards`; each turn of each portion would make a copy of its own."""
    model = copy.deepcopy(guesser.model).float()
    model.compute_dtype = torch.bfloat16
    masters = {p.data_ptr() for p in model.parameters()}
    copied, cast = [], torch.Tensor.to

    def counting(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        copied.extend([1] * (given[:1] == (torch.bfloat16,) and tensor.data_ptr() in masters))
        return cast(tensor, *given, **more)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    assert len(play(replace(guesser, model=model))) == 8
    assert len(copied) == len(masters)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_greedy_evaluation_does_not_depend_on_the_seed(guesser: Policy) -> None:
    one, other = (play(guesser, seed=seed, evaluation={"temperature": 0.0}) for seed in (0, 1))
    assert [t.turns[0].response for t in one] == [t.turns[0].response for t in other]
    assert [t.strategy for t in one] == [t.strategy for t in other]


def test_strategies_taken_away_and_exchanged(guesser: Policy) -> None:
    own = [t.strategy for t in play(guesser)]
    assert all(own)
    assert len(set(own)) > 1
    assert [t.strategy for t in play(guesser, strategies="blank")] == [""] * 8
    # Each task gets the strategy of the task half a round away.
    assert [t.strategy for t in play(guesser, strategies="shuffled")] == own[4:] + own[:4]
    with pytest.raises(ValueError, match="at least 2 to exchange"):
        play(guesser, strategies="shuffled", evaluation={"num_tasks": 1})
    flat = {"algorithm": "grpo", "judge": {"enabled": False}}
    assert [t.strategy for t in play(guesser, **flat)] == [None] * 8


def test_record_by_hand(guesser: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """Episodes that broke are counted, told and left out of the means."""
    task_set = GuessTaskSet(faults=lambda n: ("start", "raise") if n == 0 else None)
    config = configure(evaluation={"temperature": 1.0}, rollout={"env_threads": 1})
    tasks = evaluation_tasks(config, task_set)
    record = evaluate(config, guesser, task_set, tasks, Distributed(), label="x", iteration=3)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "x: 1 of 8 episodes broke (env_error 1); the others alone are counted"
    )
    played = [t for t in play(guesser) if t.task.id != tasks[0].id]
    assert (record["iteration"], record["label"], record["split"]) == (3, "x", "dev")
    assert (record["num_tasks"], record["num_failed"]) == (8, 1)
    assert record["outcome"] == pytest.approx(sum(t.outcome or 0.0 for t in played) / 7)
    assert record["success"] == pytest.approx(sum(t.success for t in played) / 7)
    assert record["turns"] == pytest.approx(sum(len(t.turns) for t in played) / 7)
    for kind in ("even", "odd"):
        mine = [t for t in played if t.task.kind == kind]
        assert record["by_kind"][kind]["num_tasks"] == len(mine)
        assert record["by_kind"][kind]["score"] == pytest.approx(sum(t.score for t in mine) / len(mine))
    json.dumps(record, allow_nan=False)


def test_all_broken_is_a_record_without_means(guesser: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    task_set = GuessTaskSet(faults=lambda n: ("start", "raise"))
    config = configure()
    tasks = evaluation_tasks(config, task_set)
    record = evaluate(config, guesser, task_set, tasks, Distributed(), label="x")
    assert (record["num_tasks"], record["num_failed"]) == (8, 8)
    assert "score" not in record
    assert "8 of 8 episodes broke (env_error 8); nothing is left to count" in capsys.readouterr().err
