"""The loop on the guessing game: first ratio 1, splits that do not matter, dead and broken updates, seeds, two ranks."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeEncoder, GuessTaskSet

import hsg.collector
import hsg.trainer
from hsg.batch import Row, collate
from hsg.config.loading import make_config
from hsg.config.options import Config
from hsg.losses import AGGREGATIONS, LEVEL_REDUCTIONS
from hsg.model.models import score
from hsg.ranks.distributed import Distributed
from hsg.run.tracking import RunFolder
from hsg.trainer import Trainer
from hsg.types import STRATEGY

BASE: dict[str, Any] = {
    "num_tasks": 2, "num_strategies": 2, "num_rollouts": 3, "sigma": 2,
    "prompts": {"style": "terse"}, "model": {"dtype": "float64"}, "strategy": {"max_tokens": 10},
    "rollout": {"max_turns": 3, "max_action_tokens": 8, "env_timeout_seconds": 30.0}, "judge": {"max_tokens": 12},
    "optimizer": {"lr": 1e-3}, "train": {"iterations": 2}, "checkpoint": {"initial": True},
    "log": {"wandb": "disabled", "quiet": True, "tokens": True},
}  # fmt: skip


def configure(**given: Any) -> Config:
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in BASE.items()}
    for key, value in given.items():
        merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
    return make_config(merged)


Make = Callable[..., Trainer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, guesser_folder: Path) -> Make:
    monkeypatch.setattr(hsg.collector, "load_encoder", lambda *_: FakeEncoder())

    def made(task_set: GuessTaskSet | None = None, run_name: str | None = None, **given: Any) -> Trainer:
        config = configure(**given)
        run = RunFolder(config, run_name) if run_name else None
        return Trainer(config, task_set or GuessTaskSet(), str(guesser_folder), Distributed(), run)

    return made


STALE = {"max_logprob_gap": 1e9}
"""For rows that an older policy sampled, or that are wrong on purpose: nobody compares their log-probs."""


def rows_of(trainer: Trainer, iteration: int = 0) -> list[Row]:
    """The rows of one iteration, without its update."""
    held: list[Row] = []
    update, trainer.learner.update = trainer.learner.update, lambda rows, i, on_rows: held.extend(rows) or {}  # type: ignore[method-assign]
    trainer.iterate(iteration)
    trainer.learner.update = update  # type: ignore[method-assign]
    return held


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def unchanged(before: list[torch.Tensor], trainer: Trainer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class NoOptimizer:
    """Keeps the gradients of the last step for the test to look at."""

    def __init__(self, parameters: Any) -> None:
        self.parameters, self.param_groups, self.rates = list(parameters), [{"lr": 0.0}], []

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        self.last = torch.cat([p.grad.flatten() for p in self.parameters])

    def gradient(self) -> torch.Tensor:
        return self.last


# ----------------------------------------------------------------------------------------------------------- the ratio


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_first_ratio_is_one_for_every_token(make: Make, context: str) -> None:
    """B07, R: strategies at T = 0.8, actions at T = 1.3, both in one batch."""
    trainer = make(temperature={"strategy": 0.8, "action": 1.3}, rollout={"context": context})
    rows = rows_of(trainer)
    batch = collate(rows)
    assert {round(t, 3) for t in batch.temperatures[batch.response_mask].unique().tolist()} == {0.8, 1.3}
    trainer.model.train()
    logprobs, _ = score(trainer.model, batch)
    log_ratio = (logprobs - batch.old_logprobs)[batch.response_mask]
    assert len(log_ratio) > 50
    assert log_ratio.abs().max() < 1e-6  # old log-probs are recorded in float32
    told: list[int] = []
    values = trainer.learner.update(rows, 0, on_rows=told.append)
    assert sum(told) == sum(bool((row.advantages != 0).any()) for row in rows) > 0  # what a progress bar is told
    assert values["update/log_ratio_max"] == pytest.approx(0.0, abs=1e-6)
    assert values["update/clip_fraction"] == 0.0


def test_update_moves_in_the_direction_of_the_advantage(make: Make) -> None:
    trainer = make(optimizer={"lr": 1e-2})
    rows = rows_of(trainer)
    batch = collate(rows)

    def gain() -> float:
        with torch.no_grad():
            return ((score(trainer.model, batch)[0] - batch.old_logprobs) * batch.advantages).sum().item()

    assert abs(gain()) < 1e-4
    trainer.learner.update(rows, 0)
    assert gain() > 0.1


# ------------------------------------------------------------------------------------------------------------ the split


@pytest.mark.parametrize("level_reduction", LEVEL_REDUCTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_split(make: Make, aggregation: str, level_reduction: str) -> None:
    """B15: one row at a time, some, all at once, and in reverse order; old log-probs are moved so that ratios differ."""
    trainer = make(optimizer={"max_grad_norm": 1e9})
    rows = []
    for i, row in enumerate(rows_of(trainer)):
        moved = row.tokens.logprobs + 0.1 * (i % 5 - 2) * row.tokens.response_mask
        rows.append(replace(row, tokens=replace(row.tokens, logprobs=moved)))
    optimizer = trainer.learner.optimizer = NoOptimizer(trainer.model.parameters())  # type: ignore[assignment]
    assert len({len(row) for row in rows}) > 2
    got = []
    for tokens, order in ((1, 1), (150, 1), (10_000, 1), (150, -1)):
        trainer.config = configure(
            optimizer={"max_grad_norm": 1e9}, update={"microbatch_tokens": tokens},
            loss={"aggregation": aggregation, "level_reduction": level_reduction},
        )  # fmt: skip
        metrics, norm = trainer.learner.optimizer_step(rows[::order], {"update/skipped_dead": 0.0})
        got.append((optimizer.gradient(), norm, metrics))
    first, first_norm, first_metrics = got[0]
    assert first_norm is not None
    assert first_norm > 0
    for gradient, norm, metrics in got[1:]:
        assert torch.allclose(gradient, first, rtol=1e-9, atol=1e-12)
        assert norm == pytest.approx(first_norm)
        for name, value in metrics.items():
            assert value.tolist() == pytest.approx(first_metrics[name].tolist(), rel=1e-9), name


def test_rows_without_advantage_count_in_the_denominator(make: Make) -> None:
    """They are not forwarded, yet the mean is over them too: half the rows dead = half the gradient of a doubled set."""
    trainer = make(optimizer={"max_grad_norm": 1e9}, num_strategies=1, sigma=1)
    live = [row for row in rows_of(trainer) if row.level != STRATEGY and row.advantages.any()]
    dead = [replace(row, advantages=torch.zeros_like(row.advantages)) for row in live]
    optimizer = trainer.learner.optimizer = NoOptimizer(trainer.model.parameters())  # type: ignore[assignment]
    metrics, _ = trainer.learner.optimizer_step(live, {"update/skipped_dead": 0.0})
    whole = optimizer.gradient()
    diluted, _ = trainer.learner.optimizer_step(live + dead, {"update/skipped_dead": 0.0})
    assert torch.allclose(optimizer.gradient() * 2, whole, rtol=1e-9, atol=1e-12)
    total, count = metrics["loss_action"].tolist()
    assert diluted["loss_action"].tolist() == pytest.approx([total, 2 * count])  # the logged loss is that of the update


# ----------------------------------------------------------------------------------------------- dead and broken steps


def test_dead_iteration_leaves_weights_and_moments_alone(make: Make) -> None:
    """B11: no gradient, so neither Adam's moments nor weight decay may move anything."""
    trainer = make(optimizer={"lr": 1e-3, "weight_decay": 0.5}, rollout=STALE)
    rows = rows_of(trainer)
    trainer.learner.update(rows, 0)
    before, steps = weights(trainer), trainer.learner.optimizer_steps
    moments = json.dumps(
        [[v.double().sum().item() for v in s.values()] for s in trainer.learner.optimizer.state.values()]
    )
    dead = [replace(row, advantages=torch.zeros_like(row.advantages)) for row in rows]
    for some in (dead, []):
        values = trainer.learner.update(some, 1)
        assert values["update/skipped_dead"] == 1.0
        assert "update/grad_norm" not in values
    assert unchanged(before, trainer)
    assert trainer.learner.optimizer_steps == steps == 1
    after = json.dumps(
        [[v.double().sum().item() for v in s.values()] for s in trainer.learner.optimizer.state.values()]
    )
    assert after == moments
    trainer.learner.update(rows, 2)
    assert not unchanged(before, trainer)


def test_iteration_of_equal_outcomes_is_dead(make: Make, tmp_path: Path) -> None:
    """Nobody ever wins, nothing is flagged: every group is dead, the metric says 1.0, and the loop goes on."""

    class Hopeless(GuessTaskSet):
        def tasks(self, split: str) -> list[Any]:
            return [replace(t, data={**t.data, "answer": 77}) for t in super().tasks(split)]

    trainer = make(Hopeless(), judge={"enabled": False})
    before = weights(trainer)
    values = trainer.iterate(0)
    assert values["advantage/dead_groups"] == values["advantage/strategy_dead_groups"] == 1.0
    assert values["update/skipped_dead"] == 1.0
    assert values["reward/outcome"] == 0.0
    assert unchanged(before, trainer)


def test_nonfinite_step_is_skipped_counted_and_at_last_stops_the_run(make: Make) -> None:
    trainer = make(optimizer={"max_nonfinite": 3}, rollout=STALE)
    rows = rows_of(trainer)
    # exp of +1e4 overflows on the side that is not clipped, which is that of a negative advantage.
    at = next(i for i, row in enumerate(rows) if bool((row.advantages < 0).any()))
    tokens = replace(rows[at].tokens, logprobs=rows[at].tokens.logprobs - 1e4)
    broken = [*rows[:at], replace(rows[at], tokens=tokens), *rows[at + 1 :]]
    before = weights(trainer)
    for _ in range(2):
        values = trainer.learner.update(broken, 0)
        assert values["update/skipped_nonfinite"] == 1.0
        assert trainer.learner.optimizer_steps == 0
    assert unchanged(before, trainer)
    assert not trainer.learner.optimizer.state
    trainer.learner.update(rows, 0)  # a good step in between: counting starts again
    assert trainer.learner.optimizer_steps == 1
    for _ in range(2):
        trainer.learner.update(broken, 1)
    with pytest.raises(RuntimeError, match="3 optimizer steps in a row"):
        trainer.learner.update(broken, 1)


# ---------------------------------------------------------------------------------------------- schedule, epochs, KL, R3


def test_learning_rate_warms_up_and_follows_the_cosine(make: Make) -> None:
    """R6: 2 iterations x 2 epochs x 2 mini-batches = 8 steps; warm-up over 3 steps: 1/4, 2/4, 3/4, then 1."""
    options = {"lr": 1.0, "warmup_steps": 3}
    for schedule in ("constant", "cosine"):
        trainer = make(
            optimizer={**options, "schedule": schedule}, update={"epochs": 2, "minibatch_trajectories": 6},
            kappa=0.5,
        )  # fmt: skip
        optimizer = trainer.learner.optimizer = NoOptimizer(trainer.model.parameters())  # type: ignore[assignment]
        rows = rows_of(trainer)
        for iteration in range(2):
            trainer.learner.update(rows, iteration)
        warm = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
        shape = [1.0] * 8 if schedule == "constant" else [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
        assert optimizer.rates == pytest.approx([w * s for w, s in zip(warm, shape, strict=True)])


def test_cosine_with_minibatches_of_turns_lasts_until_the_end(make: Make) -> None:
    """How many turns there will be is not known beforehand; the rate must not reach 0 before the last mini-batch."""
    trainer = make(
        optimizer={"lr": 1.0, "schedule": "cosine"}, rollout={"context": "window"}, update={"minibatch_turns": 5},
        judge={"enabled": False},
    )  # fmt: skip
    optimizer = trainer.learner.optimizer = NoOptimizer(trainer.model.parameters())  # type: ignore[assignment]
    rows = rows_of(trainer)
    for iteration in range(2):
        trainer.learner.update(rows, iteration)
    assert len(optimizer.rates) >= 6
    assert optimizer.rates == sorted(optimizer.rates, reverse=True)
    assert 0 < optimizer.rates[-1] < 0.2


def test_epochs_and_minibatches_are_optimizer_steps(make: Make) -> None:
    trainer = make(update={"epochs": 3, "minibatch_trajectories": 5})  # 12 trajectories: 3 mini-batches of 4
    rows, seen = rows_of(trainer), []
    step = trainer.learner.optimizer_step
    trainer.learner.optimizer_step = lambda part, *given: seen.append(part) or step(part, *given)  # type: ignore
    values = trainer.learner.update(rows, 0)
    assert [len({row.trajectory for row in part}) for part in seen] == [4] * 9
    for epoch in range(3):
        assert sorted(id(r) for part in seen[3 * epoch : 3 * epoch + 3] for r in part) == sorted(map(id, rows))
    assert [r.trajectory for r in seen[0]] != [r.trajectory for r in seen[3]]  # shuffled anew
    assert values["update/optimizer_steps"] + values["update/skipped_dead"] == 9
    assert values["update/log_ratio_max"] > 1e-3  # later steps are off-policy


def test_metrics_of_every_step_are_kept_on_the_cpu(make: Make) -> None:
    """A resumed update adds up those that came out of a file and those that a GPU has just worked out."""

    class Elsewhere:
        def cpu(self) -> torch.Tensor:
            return torch.tensor([3.0, 2.0], dtype=torch.float64)

    trainer = make(update={"epochs": 2})
    trainer.learner.optimizer_step = lambda *given: ({"loss": Elsewhere()}, None)  # type: ignore
    assert trainer.learner.update(rows_of(trainer), 0)["update/loss"] == 1.5


def test_kl_to_an_identical_reference_is_zero_at_first(make: Make) -> None:
    trainer = make(loss={"kl_coef": 0.5}, temperature={"strategy": 0.7, "action": 1.5}, optimizer={"lr": 1e-2})
    first, second = trainer.iterate(0), trainer.iterate(1)
    assert first["update/kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["update/kl"] > 1e-5
    assert trainer.reference is not None
    assert trainer.reference.model is not trainer.model


def test_kl_holds_dead_rows_too(make: Make) -> None:
    trainer = make(loss={"kl_coef": 1.0}, optimizer={"lr": 1e-2}, rollout=STALE)
    rows = rows_of(trainer)
    dead = [replace(row, advantages=torch.zeros_like(row.advantages)) for row in rows]
    trainer.learner.update(rows, 0)
    before = weights(trainer)
    trainer.learner.update(dead, 1)
    assert not unchanged(before, trainer)


def test_small_steps_move_weights_in_bfloat16_runs(make: Make) -> None:
    """R3: at lr 1e-6 a bfloat16 weight would stay where it is.  Gradients are gone by the next rollout."""
    trainer = make(model={"dtype": "bfloat16"}, optimizer={"lr": 1e-6})
    rows = rows_of(trainer)
    before = weights(trainer)
    values = trainer.learner.update(rows, 0)
    assert values["update/optimizer_steps"] == 1
    assert all(p.grad is None for p in trainer.model.parameters())
    moments = trainer.learner.optimizer.state
    trained = [(a, b, moments[b]["exp_avg"]) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    moved = sum(int(((a != b) & (m != 0)).sum()) for a, b, m in trained)
    total = sum(int((m != 0).sum()) for _, _, m in trained)
    assert all(b.dtype == torch.float32 for b in trainer.model.parameters())
    assert moved > 0.9 * total > 0


# --------------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 8])
def test_no_task_twice_and_every_task_seen(make: Make, num_tasks: int) -> None:
    trainer = make(num_tasks=num_tasks)
    everything = [t.id for t in GuessTaskSet().tasks("train")]
    per_pass = 8 // num_tasks
    passes = []
    for number in range(6):
        ids = [[t.id for t in trainer.collector.next_tasks(number * per_pass + i)] for i in range(per_pass)]
        assert all(len(set(part)) == num_tasks for part in ids)
        flat = [name for part in ids for name in part]
        assert len(set(flat)) == len(flat) == per_pass * num_tasks
        passes.append(flat)
    assert {name for flat in passes for name in flat} == set(everything)
    assert len({tuple(flat) for flat in passes}) > 1
    other = make(num_tasks=num_tasks, seed=1)
    assert [[t.id for t in other.collector.next_tasks(i)] for i in range(6)] != [
        [t.id for t in trainer.collector.next_tasks(i)] for i in range(6)
    ]


def test_tasks_that_cannot_be_had_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"num_tasks must be at most the 8 tasks"):
        make(num_tasks=9)
    with pytest.raises(ValueError, match="empty split 'empty'"):
        make(environment={"train_split": "empty"})
    with pytest.raises(ValueError, match=r"evaluation.split must have tasks"):
        make(evaluation={"split": "empty"})


# --------------------------------------------------------------------------------------------------------------- faults


def test_iteration_with_some_broken_environments_goes_on(make: Make) -> None:
    faults = {1: ("step 1", "raise"), 4: ("start", "nan")}
    values = make(GuessTaskSet(faults=lambda n: faults.get(n)), rollout={"env_threads": 1}).iterate(0)
    assert values["stop/env_error"] == pytest.approx(2 / 12)
    assert (values["fault/raised"], values["fault/nonsense"], values["fault/timeout"], values["fault/engine"]) == (
        1,
        1,
        0,
        0,
    )
    assert all(math.isfinite(v) for v in values.values())


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_too_many_broken_environments_stop_the_run(make: Make, share: float) -> None:
    """B19: a clear stop, never a silent empty step."""
    limit = 1.0 if share == 1.0 else 0.5
    trainer = make(
        GuessTaskSet(faults=lambda n: ("step 1", "raise") if n % 4 < 4 * share else None),
        rollout={"max_error_fraction": limit, "env_threads": 1},
    )  # fmt: skip
    counted = (
        r"environments must fail in at most .* got (9|12) of 12 \((9|12) OSError\); first errors: OSError: engine died"
    )
    with pytest.raises(RuntimeError, match=counted):
        trainer.iterate(0)


# ---------------------------------------------------------------------------------------------------- runs and seeds


def run_files(make: Make, folder: Path, name: str, **given: Any) -> list[bytes]:
    trainer = make(run_name=name, run={"dir": str(folder)}, **given)
    try:
        assert trainer.train() == 2
    finally:
        trainer.close()
    return [path.read_bytes() for path in sorted((folder / name / "trajectories").iterdir())]


def test_same_seed_same_run(make: Make, tmp_path: Path) -> None:
    one = run_files(make, tmp_path, "a")
    assert len(one) == 2
    assert one == run_files(make, tmp_path, "b", rollout={"env_threads": 2})
    assert one != run_files(make, tmp_path, "c", seed=1)
    metrics = [
        [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))}
         for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in "ab"
    ]  # fmt: skip
    assert metrics[0] == metrics[1]
    assert [m["iteration"] for m in metrics[0]] == [0, 1]
    assert sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir()) == [
        "iteration_000000",
        "iteration_000002",
    ]


@pytest.mark.parametrize("per", [{}, {"judge": {"enabled": True, "max_tokens": 12}}])
def test_flat_method_writes_no_strategies(make: Make, tmp_path: Path, per: dict[str, Any]) -> None:
    given = {"algorithm": "grpo", "judge": {"enabled": False, "max_tokens": 12}, **per}
    (first, _) = run_files(make, tmp_path, "flat", **given)
    lines = [json.loads(line) for line in first.splitlines()]
    assert {line["kind"] for line in lines} == {"trajectory"}
    assert {(line["strategy"], line["strategy_index"]) for line in lines} == {(None, 0)}
    for p in range(2):
        assert [line["rollout_index"] for line in lines if line["task_index"] == p] == list(range(6))
    asked = {line["judgment"] is not None for line in lines}
    assert asked == {bool(per)}


def test_training_stops_when_its_time_is_over(make: Make, tmp_path: Path) -> None:
    trainer = make(run_name="t", run={"dir": str(tmp_path)}, train={"iterations": 50, "max_seconds": 1e-3})
    assert trainer.train() == 1
    assert (tmp_path / "t" / "checkpoints" / "iteration_000001" / "model").is_dir()
    assert not trainer.collector._begun  # the second iteration's environments had been started already


def test_checkpoints_and_evaluations_come_as_configured(make: Make, tmp_path: Path) -> None:
    trainer = make(
        run_name="t", run={"dir": str(tmp_path)}, train={"iterations": 4},
        checkpoint={"every": 1, "keep": 2, "initial": True}, evaluation={"every": 2, "num_tasks": 3},
    )  # fmt: skip
    assert trainer.train() == 4
    kept = sorted(p.name for p in (tmp_path / "t" / "checkpoints").iterdir())
    assert kept == ["iteration_000000", "iteration_000003", "iteration_000004"]
    evaluations = [json.loads(line) for line in (tmp_path / "t" / "eval.jsonl").read_text().splitlines()]
    assert [(e["iteration"], e["num_tasks"], e["split"]) for e in evaluations] == [(2, 3, "dev"), (4, 3, "dev")]


# ------------------------------------------------------------------------------------------------------------ two ranks

RANK_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
import hsg.collector
import hsg.trainer
from fakes import FakeEncoder, GuessTaskSet
from hsg.ranks.distributed import Distributed
from hsg.run.tracking import RunFolder
from test_trainer import configure
hsg.collector.load_encoder = lambda *_: FakeEncoder()
model, folder, name = sys.argv[1:]
config = configure(num_tasks=3, run={"dir": folder}, evaluation={"num_tasks": 5, "every": 1}, kappa=0.5)
distributed = Distributed()
run = RunFolder(config, name) if distributed.is_main else None
trainer = hsg.trainer.Trainer(config, GuessTaskSet(), model, distributed, run)
trainer.train()
torch.save([p.detach() for p in trainer.model.parameters()], f"{folder}/{name}.{distributed.rank}.pt")
trainer.close()
distributed.close()
"""


def launch(model: Path, folder: Path, name: str, num_ranks: int, script: str = RANK_SCRIPT) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
        if num_ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, "-c", script, str(model), str(folder), name]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in ranks:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output[-3000:]


def close_to(a: Any, b: Any) -> bool:
    """Equal, numbers within 1e-6."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close_to(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(close_to(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        return a == pytest.approx(b, rel=1e-6, abs=1e-6)
    return a == b


@pytest.mark.slow
def test_two_ranks_equal_one(guesser_folder: Path, tmp_path: Path) -> None:
    """Three tasks on two ranks: unequal shares. Records, metrics, evaluations and weights of two iterations agree."""
    for name, num_ranks in (("one", 1), ("two", 2)):
        launch(guesser_folder, tmp_path, name, num_ranks)

    def read(path: str) -> list[list[Any]]:
        files = [(tmp_path / name / path) for name in ("one", "two")]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    for path in ("trajectories/iteration_000000.jsonl", "trajectories/iteration_000001.jsonl", "eval.jsonl"):
        one, two = read(path)
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert close_to(a, b), (path, a, b)
    # Positions depend on who shares a batch; time is time.
    one, two = ([{k: v for k, v in m.items() if not k.startswith(("time/", "memory/")) and not k.endswith("_positions")} for m in run]
                for run in read("metrics.jsonl"))  # fmt: skip
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert {k: (a[k], b[k]) for k in a if not close_to(a[k], b[k])} == {}
    assert any(m["advantage/penalty_only_groups"] > 0 for m in one), "the test wants this count to be added up"
    weights = [torch.load(tmp_path / f"{name}.pt") for name in ("one.0", "two.0", "two.1")]
    for other in weights[1:]:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(weights[0], other, strict=True))
    assert weights[0][0].dtype == torch.float64
