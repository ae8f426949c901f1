"""The critic and the novelty predictor: what they read, what they learn, on how many ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_trajectory
from test_trainer import configure

from hsg.batch import collate
from hsg.config.options import Config
from hsg.credit import Credit, Signals, assign_credit
from hsg.crediting.estimators import merge_moments, moments
from hsg.learning.companions import Companions, Critic, Novelty, forward_rows, rows_of, value_losses
from hsg.model.models import load_model, sampled_hidden
from hsg.ranks.distributed import Distributed
from hsg.run.checkpoint import _with_tensors, _without_tensors
from hsg.types import Judgment, Trajectory


def settings(algorithm: str = "ppo", **given: Any) -> Config:
    return configure(algorithm=algorithm, judge={"enabled": False}, num_tasks=1, num_strategies=1, **given)


@pytest.fixture
def played() -> list[Trajectory]:
    """Three rollouts of one task, the middle one failed; ids are those of make_tokens."""
    return [make_trajectory(1.0, (2, 3)), make_trajectory(None, (2,)), make_trajectory(0.0, (4,))]


def credit_of(config: Config, played: list[Trajectory], signals: Signals) -> Credit:
    return assign_credit(config, None, [[played]], [[[Judgment(None)] * len(played)]], signals)


def test_value_losses_by_hand() -> None:
    """R = 1. V 0.9 near the old 0.8: 0.01. V 0.9 from 0 is held at 0.5: 0.25 > 0.01. V 2 from 0.9 counts as itself."""
    values, old = torch.tensor([0.9, 0.9, 2.0]), torch.tensor([0.8, 0.0, 0.9])
    losses, clipped = value_losses(values, torch.ones(3), old, 0.5)
    assert losses.tolist() == pytest.approx([0.005, 0.125, 0.5])
    assert clipped.tolist() == [False, True, False]
    assert value_losses(values, torch.ones(3), old, None)[0].tolist() == pytest.approx([0.005, 0.005, 0.5])


@pytest.mark.parametrize("packing", ["prefix", "plain", "off"])
def test_hidden_states_are_those_of_whole_rows(guesser_folder: Path, played: list[Trajectory], packing: str) -> None:
    """Whatever the packing and the micro-batches: the state before each sampled token, row after row."""
    config = settings(update={"packing": packing, "microbatch_tokens": 20})
    model, _ = load_model(config.model, guesser_folder)
    rows = rows_of(played)
    assert [row.trajectory for row in rows] == [0, 2]
    found = {}
    with torch.no_grad():
        for part, hidden, _ in forward_rows(model, rows, config, torch.device("cpu")):
            for row, states in zip(part, hidden.split([r.tokens.num_sampled for r in part]), strict=True):
                found[row.trajectory] = states
        for row in rows:
            expected = sampled_hidden(model, collate([row]))
            assert torch.allclose(found[row.trajectory], expected, atol=1e-9)


def test_critic_begins_at_zero_and_learns_the_returns(guesser_folder: Path, played: list[Trajectory]) -> None:
    """Zero at first, so that the advantages are the returns.

    Both begin with the same prompt, so the value there is that of a coin; after the first turn of one of them it is 1.
    """
    config = settings(critic={"lr": 3e-3, "epochs": 60, "value_clip": None}, advantage={"whiten": False})
    critic = Critic(config, guesser_folder, Distributed())
    before = critic.values(played)
    assert [len(v) for v in before] == [5, 0, 4]
    assert not torch.cat(before).any()
    credit = credit_of(config, played, Signals(values=before))
    assert credit.turn_advantages[0, 0, 0].tolist() == [1.0, 1.0]
    sums = critic.learn(played, credit, 0)
    after = critic.values(played)
    assert [after[0][0].item(), after[2][0].item(), after[0][2].item()] == pytest.approx([0.5, 0.5, 1.0], abs=0.1)
    assert sums["critic/loss"][1] == 60 * 3  # three turns in each epoch
    assert sums["memory/critic_mb"][0] > 0
    assert sums["time/critic_seconds"][0] > 0
    assert sums["cost/critic_positions"][0] > 0


def test_critic_learns_in_mini_batches_of_turns(guesser_folder: Path) -> None:
    """As the policy does: three turns, one in each step; a mini-batch of trajectories holds both turns of the first."""
    played = [make_trajectory(1.0, (2, 3), window=True), make_trajectory(0.0, (4,), window=True)]
    steps = []
    for size in ({"minibatch_turns": 1}, {"minibatch_trajectories": 1}):
        config = settings(update=size, rollout={"context": "window"}, advantage={"whiten": False})
        critic = Critic(config, guesser_folder, Distributed())
        critic.learn(played, credit_of(config, played, Signals(values=critic.values(played))), 0)
        steps.append(int(critic.optimizer.state[critic.head.bias]["step"]))
    assert steps == [3, 2]


def test_critic_leaves_the_policy_alone(guesser_folder: Path, played: list[Trajectory]) -> None:
    config = settings(critic={"lr": 1e-2, "epochs": 2})  # a head of zeros gives its body no gradient in the first
    policy, _ = load_model(config.model, guesser_folder)
    weights = copy.deepcopy(policy.state_dict())
    companions = Companions(config, policy, guesser_folder, Distributed())
    signals = companions.read(played)
    companions.learn(played, credit_of(config, played, signals), 0)
    assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())
    assert companions.critic is not None
    assert not torch.equal(companions.critic.body.base_model.norm.weight, policy.base_model.norm.weight)


def test_critic_by_token_learns_at_every_token(guesser_folder: Path, played: list[Trajectory]) -> None:
    config = settings(advantage={"unit": "token", "whiten": False})
    critic = Critic(config, guesser_folder, Distributed())
    credit = credit_of(config, played, Signals(values=critic.values(played)))
    assert critic.learn(played, credit, 0)["critic/loss"] == (pytest.approx(5 / 2), 9)  # 5 tokens of (0 - 1)^2 / 2


def test_state_of_both_goes_on_exactly(guesser_folder: Path, played: list[Trajectory]) -> None:
    """Steps in one go, or one, what a checkpoint holds taken over by others, and more."""
    config = settings(critic={"lr": 1e-2}, rnd={"weight": 0.1, "lr": 1e-2})
    policy, _ = load_model(config.model, guesser_folder)

    def step(companions: Companions) -> Signals:
        signals = companions.read(played)
        companions.learn(played, credit_of(config, played, signals), 0)
        return signals

    one, two, fresh = (Companions(config, policy, guesser_folder, Distributed()) for _ in range(3))
    step(one), step(two)
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(_without_tensors(two.state_dict(), "", tensors)))
    fresh.load_state_dict(_with_tensors(plain, tensors))
    for expected, got in ((step(one), step(fresh)), (step(one), step(fresh))):
        for a, b in ((expected.values, got.values), (expected.bonuses, got.bonuses)):
            assert a is not None
            assert b is not None
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_novelty_wears_off(guesser_folder: Path, played: list[Trajectory]) -> None:
    """The error over the running std of all errors; the target stays, the predictor comes nearer to it."""
    config = settings("rnd", rnd={"weight": 0.1, "lr": 1e-2, "epochs": 50})
    policy, _ = load_model(config.model, guesser_folder)
    novelty = Novelty(config, policy, Distributed())
    frozen = copy.deepcopy(novelty.target.state_dict())
    first = novelty.bonuses(policy, played)
    assert [len(b) for b in first] == [2, 1, 1]
    errors = (novelty.predictor(novelty._held) - novelty.target(novelty._held)).square().mean(-1).detach()
    assert torch.cat(first).tolist() == pytest.approx((errors / errors.std(correction=0)).tolist())
    error = novelty.learn()["rnd/error"]
    second = (novelty.predictor(novelty._held) - novelty.target(novelty._held)).square().mean(-1).detach()
    assert second.mean() < 0.1 * errors.mean()
    assert error[1] == 4
    assert all(torch.equal(frozen[name], value) for name, value in novelty.target.state_dict().items())
    seen = novelty.errors
    novelty.bonuses(policy, played)
    assert novelty.errors == pytest.approx(merge_moments([seen, moments(second)]))


def test_novelty_is_of_the_last_token_of_the_action(guesser_folder: Path) -> None:
    """Turns of 2 and 3 tokens: the states that predict tokens 1 and 4 of the five sampled ones."""
    config = settings("rnd")
    policy, _ = load_model(config.model, guesser_folder)
    trajectory = make_trajectory(0.0, (2, 3))
    (states,) = Novelty(config, policy, Distributed())._last_hidden(policy, [trajectory])
    with torch.no_grad():
        whole = sampled_hidden(policy, collate(rows_of([trajectory])))
    assert torch.allclose(states, whole[[1, 4]].double())


def test_nothing_was_played(guesser_folder: Path) -> None:
    """A rank without a task, or one whose every episode broke."""
    config = settings(rnd={"weight": 0.1})
    policy, _ = load_model(config.model, guesser_folder)
    companions = Companions(config, policy, guesser_folder, Distributed())
    for played in ([], [make_trajectory(None)] * 2):
        signals = companions.read(played)
        credit = credit_of(config, played, signals) if played else assign_credit(config, None, [], [], signals)
        sums = companions.learn(played, credit, 0)
        assert sums["critic/loss"][1] == 0


@pytest.mark.parametrize("which", ["critic", "rnd"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    which: str, guesser_folder: Path, played: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three steps: its weights stay as they are, and the metric says one."""
    distributed = Distributed()
    clip, calls = distributed.clip_gradients, iter(range(9))
    monkeypatch.setattr(
        distributed, "clip_gradients", lambda *given: (clip(*given), float("nan") if next(calls) == 0 else 1.0)[1]
    )
    config = settings(critic={"epochs": 3}, rnd={"weight": 0.1, "epochs": 3})
    learner: Any
    if which == "critic":
        learner = Critic(config, guesser_folder, distributed)
        values = learner.values(played)
        credit = credit_of(config, played, Signals(values=values))
        step, steps = learner.optimizer.step, []
        monkeypatch.setattr(learner.optimizer, "step", lambda: (steps.append(1), step())[1])
        sums = learner.learn(played, credit, 0)
        assert sums["critic/loss"][1] == 2 * sum(len(t.turns) for t in played if t.valid)  # of the two steps taken
    else:
        model, _ = load_model(config.model, guesser_folder)
        learner = Novelty(config, model, distributed)
        learner.bonuses(model, played)
        step, steps = learner.optimizer.step, []
        monkeypatch.setattr(learner.optimizer, "step", lambda: (steps.append(1), step())[1])
        sums = learner.learn()
    assert sums[f"{which}/skipped_nonfinite"] == (1.0, 1.0)
    assert len(steps) == 2
