"""Every method on the guessing game, from its name alone; what each hook does to a whole run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import GuessTaskSet
from test_trainer import Make, close_to, launch, make, rows_of, weights  # noqa: F401 - `make` is a fixture

from hsg.batch import collate
from hsg.config.algorithms import ALGORITHMS
from hsg.learner import Learner
from hsg.ranks.distributed import Distributed
from hsg.text.prompts import Prompts
from hsg.trainer import Trainer

TRAINED = [name for name in ALGORITHMS if name not in ("prompting", "react")]
QUIET = {"enabled": False, "max_tokens": 12}


def records(folder: Path, iteration: int = 0) -> list[dict[str, Any]]:
    path = folder / "trajectories" / f"iteration_{iteration:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


class MixedTaskSet(GuessTaskSet):
    """Tasks 0 to 3 cannot be solved: their groups are dead whatever the policy does."""

    def tasks(self, split: str) -> list[Any]:
        found = super().tasks(split)
        return [replace(t, data={**t.data, "answer": 77}) if i < 4 else t for i, t in enumerate(found)]


@pytest.mark.parametrize("algorithm", TRAINED)
def test_every_method_trains(make: Make, tmp_path: Path, algorithm: str) -> None:  # noqa: F811
    """Two iterations from the name alone: finite numbers, whole structure, weights that moved."""
    given = {"algorithm": algorithm, "run": {"dir": str(tmp_path)}}
    if not ALGORITHMS[algorithm].get("judge.enabled", True):
        given["judge"] = QUIET
    trainer = make(run_name="r", **given)
    before = weights(trainer)
    try:
        assert trainer.train() == 2
    finally:
        trainer.close()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(v) for line in lines for v in line.values())
    played = [r for r in records(tmp_path / "r") if r["kind"] == "trajectory"]
    assert len(played) == 12
    turns = sum(len(r["turns"]) for r in played)
    if trainer.config.rollout.max_refills == 0:
        assert lines[0]["cost/environment_turns"] == turns
    assert trainer.environment_turns == sum(line["cost/environment_turns"] for line in lines)


# ----------------------------------------------------------------------------------------------------- dynamic sampling


def test_dead_groups_are_replaced(make: Make, tmp_path: Path) -> None:  # noqa: F811
    """P and N*M stay, no task comes twice, what was dropped is counted, in turns and in tokens."""
    given = {
        "algorithm": "dapo",
        "judge": QUIET,
        "num_tasks": 3,
        "train": {"iterations": 1},
        "run": {"dir": str(tmp_path)},
    }
    plain = make(MixedTaskSet(), run_name="plain", **given, rollout={"max_refills": 0})
    assert plain.train() == 1
    trainer = make(MixedTaskSet(), run_name="r", **given)
    assert trainer.train() == 1
    before, after = (json.loads((tmp_path / n / "metrics.jsonl").read_text()) for n in ("plain", "r"))
    assert before["advantage/dead_groups"] > 0
    assert before["rollout/dropped_groups"] == before["rollout/refills"] == 0
    assert after["rollout/dropped_groups"] >= 1
    assert 1 <= after["rollout/refills"] <= 3
    assert after["cost/environment_turns"] > before["cost/environment_turns"]
    assert after["cost/sampled_tokens"] > before["cost/sampled_tokens"]
    played = records(tmp_path / "r")
    assert [(r["task_index"], r["rollout_index"]) for r in played] == [(p, m) for p in range(3) for m in range(6)]
    tasks = [played[6 * p]["task_id"] for p in range(3)]
    assert len(set(tasks)) == 3
    for p in range(3):
        assert len({r["task_id"] for r in played[6 * p : 6 * p + 6]}) == 1
    kept = {r["task_id"] for r in records(tmp_path / "plain")} & set(tasks)
    for name in kept:  # a group that stays is the very same one
        one, two = ([r for r in records(tmp_path / n) if r["task_id"] == name] for n in ("plain", "r"))
        assert [r["turns"] for r in one] == [r["turns"] for r in two]


def test_refills_work_under_strategies_too(make: Make, tmp_path: Path) -> None:  # noqa: F811
    trainer = make(
        MixedTaskSet(), run_name="r", rollout={"max_refills": 2}, run={"dir": str(tmp_path)}, train={"iterations": 1}
    )
    trainer.train()
    played = records(tmp_path / "r")
    for p in range(2):
        of_task = [r for r in played if r["task_index"] == p]
        assert len({r["task_id"] for r in of_task}) == 1
        texts = [r["text"] for r in of_task if r["kind"] == "strategy"]
        assert [r["strategy"] for r in of_task if r["kind"] == "trajectory"] == [t for t in texts for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------- turn stages


def test_turn_cap_grows_by_stages(make: Make, tmp_path: Path) -> None:  # noqa: F811
    """1, 1, 2, 2, 3 and never more than max_turns; it is a function of the iteration, so a resumed run has it too."""
    stages = {"turns_per_stage": 1, "iterations_per_stage": 2}
    trainer = make(run_name="r", algorithm="scaling_inter", judge=QUIET, rollout=stages, train={"iterations": 7},
                   run={"dir": str(tmp_path)})  # fmt: skip
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/turn_cap"] for line in lines] == [1, 1, 2, 2, 3, 3, 3]
    longest = [max(len(r["turns"]) for r in records(tmp_path / "r", i)) for i in range(7)]
    assert longest == [1, 1, 2, 2, 3, 3, 3]


# --------------------------------------------------------------------------------------------------------- entropy, RLAD


def gradient(
    trainer: Trainer, rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of one optimizer step, and the advantages that the loss was given."""
    import hsg.learner

    seen: list[torch.Tensor] = []
    loss = hsg.learner.policy_loss
    monkeypatch.setattr(hsg.learner, "policy_loss", lambda *a, **k: seen.append(a[2].clone()) or loss(*a, **k))
    trainer.learner.optimizer_step(rows, {"update/skipped_dead": 0.0})
    monkeypatch.setattr(hsg.learner, "policy_loss", loss)
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]), seen


def test_entropy_shapes_the_advantage_of_each_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A + min(0.4 H, |A| / 2) with the entropy of the very distribution; no gradient through it; 0 stays 0."""
    trainer = make(algorithm="entropy_adv", judge=QUIET, update={"microbatch_tokens": 10**6}, optimizer={"lr": 1e-12})
    rows = [row for row in rows_of(trainer) if row.advantages.any()]
    found, (shaped,) = gradient(trainer, rows, monkeypatch)
    (part,) = trainer.learner._split(rows)
    batch = collate(part)
    with trainer.learner._attention(trainer.model), torch.no_grad():
        _, _, entropy = trainer.learner.score(trainer.model, part, with_entropy=True)
    mask, a = batch.response_mask, batch.advantages
    expected = [x + min(0.4 * h, abs(x) / 2) for x, h in zip(a[mask].tolist(), entropy[mask].tolist(), strict=True)]
    assert shaped[mask].tolist() == pytest.approx(expected, abs=1e-6)
    assert not torch.allclose(shaped, a)
    # The same advantages as constants have the same gradient: none came through the entropy.
    fixed = [replace(row, advantages=s[: len(row.advantages)]) for row, s in zip(part, shaped, strict=True)]
    plain = make(algorithm="grpo", judge=QUIET, update={"microbatch_tokens": 10**6}, optimizer={"lr": 1e-12})
    again, _ = gradient(plain, fixed, monkeypatch)
    assert torch.allclose(found, again, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "off"), [("entropy_adv", {"advantage": {"entropy_bonus": 0.0}}), ("rnd", {"rnd": {"weight": 0.0}})]
)
def test_a_method_without_its_part_is_grpo(make: Make, algorithm: str, off: dict[str, Any]) -> None:  # noqa: F811
    """To the last bit, after two iterations."""
    results = []
    for given in ({"algorithm": "grpo"}, {"algorithm": algorithm, **off}):
        trainer = make(**given, judge=QUIET)
        trainer.iterate(0), trainer.iterate(1)
        results.append(weights(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_grpo_is_strata_with_one_constant_strategy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """N = 1, kappa = 0, sigma = 1, trajectory baseline: the flat method's advantages, from the same outcomes."""
    strata = make(num_strategies=1, num_rollouts=6, kappa=0, sigma=1, advantage={"turn_baseline": "trajectory"})
    rows = [row for row in rows_of(strata) if row.level == 1]
    flat = make(algorithm="grpo", num_strategies=1, num_rollouts=6, judge=QUIET)
    held: list[Any] = []
    monkeypatch.setattr(Learner, "update", lambda self, rows, i, on_rows: held.extend(rows) or {})
    monkeypatch.setattr(flat.collector.rollout, "play", lambda episodes, **_: replayed(strata, flat, episodes))
    flat.iterate(0)
    assert len(held) == len(rows) == 12
    assert any(row.advantages.any() for row in rows)
    for a, b in zip(rows, held, strict=True):
        assert torch.equal(a.advantages, b.advantages)


def replayed(strata: Trainer, flat: Trainer, episodes: Any) -> Any:
    """The trajectories of the other method's iteration 0, played once more."""
    team = strata.collector._team(0)
    again = strata.collector._begin(0, team, team.places)
    played = strata.collector._play(0, team, team.places, again, *_costs())
    for episode in episodes:
        episode.wait()
        episode.abandon()
    return [replace(t, strategy=None) for t in played.trajectories], [type(j)(None) for j in played.judgments]


def _costs() -> tuple[Any, Any]:
    from hsg.measure.speed import Clock
    from hsg.rollout import RolloutCosts

    return RolloutCosts(), Clock()


def test_some_rollouts_do_not_see_their_strategy(make: Make, tmp_path: Path) -> None:  # noqa: F811
    """RLAD: about the share that is asked for, the same ones in each run, and the prompt says so."""
    given = {"algorithm": "rlad", "judge": QUIET, "num_rollouts": 12, "strategy": {"dropout": 0.25, "max_tokens": 10},
             "train": {"iterations": 1}, "run": {"dir": str(tmp_path)}}  # fmt: skip
    hidden = []
    for name in "ab":
        make(run_name=name, **given).train()
        played = [r for r in records(tmp_path / name) if r["kind"] == "trajectory"]
        hidden.append([r["strategy"] is None for r in played])
    assert hidden[0] == hidden[1]
    assert 4 <= sum(hidden[0]) <= 20  # of 48, 12 expected
    none = make(run_name="c", **{**given, "strategy": {"dropout": 0.0, "max_tokens": 10}})
    none.train()
    assert all(r["strategy"] is not None for r in records(tmp_path / "c") if r["kind"] == "trajectory")


# ------------------------------------------------------------------------------------------------------- untrained ones


@pytest.mark.parametrize("algorithm", ["prompting", "react"])
def test_untrained_methods_only_ask(make: Make, algorithm: str) -> None:  # noqa: F811
    """Their bundle replaces the flat prompts; each still says where the action goes, and nothing is trained."""
    trainer = make(algorithm=algorithm, judge=QUIET, prompts={"style": "full"})
    before = weights(trainer)
    assert trainer.train() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    prompts: Prompts = trainer.collector.rollout.prompts
    texts = [prompts.first_action("SEEN", None), prompts.next_action(2, "SEEN"),
             prompts.window(2, "FIRST", None, [(1, "x", "did")], "SEEN")]  # fmt: skip
    for text in texts:
        assert "SEEN" in text
        assert "<action>" in text
        assert ("Thought:" in text) == (algorithm == "react")
        assert "{" not in text


# -------------------------------------------------------------------------------------------------------------- the end


def test_run_ends_after_its_environment_turns(make: Make, tmp_path: Path) -> None:  # noqa: F811
    trainer = make(run_name="r", algorithm="grpo", judge=QUIET, run={"dir": str(tmp_path)},
                   train={"iterations": 50, "max_environment_turns": 40})  # fmt: skip
    done = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    turns = [line["cost/environment_turns"] for line in lines]
    assert sum(turns) >= 40 > sum(turns[:-1])
    assert len(lines) == done


def test_resumed_run_has_its_companions_and_its_turns(make: Make, tmp_path: Path, guesser_folder: Path) -> None:  # noqa: F811
    """Four iterations in one go, or the last two from the checkpoint in between: the same critic, novelty and policy."""
    whole = make(run_name="w", algorithm="ppo", judge=QUIET, rnd={"weight": 0.1}, critic={"lr": 1e-3}, run={"dir": str(tmp_path)},
                 train={"iterations": 4}, checkpoint={"every": 2})  # fmt: skip
    whole.train()
    checkpoint = tmp_path / "w" / "checkpoints" / "iteration_000002"
    again = Trainer(whole.config, GuessTaskSet(), str(guesser_folder), Distributed(), None, resume=checkpoint)
    assert 0 < again.environment_turns < whole.environment_turns
    again.train()
    assert again.environment_turns == whole.environment_turns
    for name, value in everything_learned(whole).items():
        torch.testing.assert_close(everything_learned(again)[name], value, rtol=0, atol=1e-9)


def everything_learned(trainer: Trainer) -> dict[str, Any]:
    critic, novelty = trainer.collector.companions.critic, trainer.collector.companions.novelty
    assert critic is not None
    assert novelty is not None
    return {"policy": list(trainer.model.parameters()), "critic": critic.parameters,
            "predictor": list(novelty.predictor.parameters()), "errors": list(novelty.errors)}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ two ranks

RANK_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
import hsg.collector
import hsg.trainer
from hsg.ranks.distributed import Distributed
from hsg.run.tracking import RunFolder
from test_baselines import MixedTaskSet
from test_trainer import configure
model, folder, name = sys.argv[1:]
config = configure(algorithm="ppo", num_tasks=3, run={"dir": folder}, judge={"enabled": False}, rnd={"weight": 0.1, "lr": 1e-2},
                   rollout={"max_refills": 1}, critic={"lr": 1e-2, "epochs": 2})
distributed = Distributed()
run = RunFolder(config, name) if distributed.is_main else None
trainer = hsg.trainer.Trainer(config, MixedTaskSet(), model, distributed, run)
trainer.train()
critic, novelty = trainer.collector.companions.critic, trainer.collector.companions.novelty
held = [*trainer.model.parameters(), *critic.parameters, *novelty.predictor.parameters()]
torch.save([p.detach() for p in held], f"{folder}/{name}.{distributed.rank}.pt")
trainer.close()
distributed.close()
"""


@pytest.mark.slow
def test_two_ranks_equal_one(guesser_folder: Path, tmp_path: Path) -> None:
    """Critic, novelty, refills and whitening, three tasks on two ranks: the same records, metrics and weights."""
    for name, num_ranks in (("one", 1), ("two", 2)):
        launch(guesser_folder, tmp_path, name, num_ranks, RANK_SCRIPT)
    for iteration in (0, 1):
        one, two = (records(tmp_path / name, iteration) for name in ("one", "two"))
        assert len(one) == len(two) == 18
        assert all(close_to(a, b) for a, b in zip(one, two, strict=True))
    metrics = [
        [json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    ]
    for a, b in zip(*metrics, strict=True):
        shared = {
            k for k in a if k.startswith(("critic/", "rnd/", "reward/", "advantage/", "cost/environment", "rollout/"))
        }
        assert {k: (a[k], b[k]) for k in shared - {"rollout/refills"} if not close_to(a[k], b[k])} == {}
    assert metrics[0][0]["rollout/dropped_groups"] > 0
    weights = [torch.load(tmp_path / f"{name}.pt") for name in ("one.0", "two.0", "two.1")]
    for other in weights[1:]:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(weights[0], other, strict=True))
