"""Two and three real processes: sharded or not, they do what one does; unequal work and slow worlds never hang."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import Done, run_ranks
from safetensors.torch import load_file
from test_resume import OPTIONS, assert_close_run

from hsg.learning.underway import Underway
from hsg.ranks.distributed import Distributed
from hsg.run.checkpoint import read_state

TWO = {
    **OPTIONS, "train": {"iterations": 2}, "evaluation": {"every": 1, "num_tasks": 5, "final": True, "without_strategy": True},
    "temperature": {"strategy": 0.9, "action": 1.2},
}  # fmt: skip
ITERATIONS = 2


@pytest.fixture(scope="module")
def root(guesser_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    options = {**TWO, "model": {"path": str(guesser_folder), "dtype": "float64"}, "run": {"dir": str(folder)}}
    (folder / "c.yaml").write_text(yaml.safe_dump(options))
    return folder


def run(root: Path, name: str, *overrides: str, resume: str = "none", **given: Any) -> Done:
    sets = [part for item in (f"run.name={name}", *overrides) for part in ("--set", item)]
    return run_ranks(["--config", str(root / "c.yaml"), *sets, "--resume", resume], root, **given)


def alone(root: Path, *overrides: str) -> Path:
    """The run of one process."""
    folder = root / ("alone" + "".join(c if c.isalnum() else "-" for c in "".join(overrides)))
    if not folder.exists():
        done = run(root, folder.name, *overrides)
        assert done.status == [0], done.output[-3000:]
    return folder


def test_gradients_are_added_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a network that is kept on the CPU too: the sum, which comes back as another tensor, stands in them."""
    distributed = Distributed()
    distributed.world_size = 2
    monkeypatch.setattr(distributed, "sum", lambda value: 2 * value)
    has, lacks = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    has.grad = torch.tensor([1.0, 2.0, 3.0])
    distributed.sum_gradients([has, lacks])
    assert has.grad.tolist() == [2.0, 4.0, 6.0]
    assert lacks.grad is not None
    assert lacks.grad.tolist() == [0.0, 0.0]


SHARDED = ["distributed.sharding=full"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("weights", ["", "gathered", "sharded"])
def test_any_number_of_ranks_does_what_one_does(root: Path, num_ranks: int, weights: str) -> None:
    """Three tasks on two ranks, five evaluations on three: unequal work. Records, metrics, evaluations and weights agree."""
    overrides = [*SHARDED, f"rollout.weights={weights}"] if weights else []
    name = f"ranks{num_ranks}{weights}"
    done = run(root, name, *overrides, num_ranks=num_ranks)
    assert done.status == [0] * num_ranks, done.output[-3000:]
    assert_close_run(alone(root), root / name, ITERATIONS)


METHODS = {
    "strata": [],
    "window": ["rollout.context=window"],
    "dapo": ["algorithm=dapo", "judge.enabled=false", "rollout.max_refills=2"],
    "refilled": ["rollout.max_refills=2"],
    "ppo": ["algorithm=ppo"],
    "rnd": ["algorithm=rnd", "reward.scale=0.0001"],
    "sge": ["algorithm=sge", "rollout.max_action_tokens=16", "reflection.p_bad=0.6"],
    "reflecting": ["reflection.p_bad=0.6", "advantage.whiten=true", "strategy.dropout=0.3"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_tasks", "num_ranks", "sharded"),
    [
        *((method, 1, 2, []) for method in METHODS if method != "refilled"),
        ("refilled", 2, 3, []),  # one team may have a dead group while the other has none
        ("refilled", 2, 3, ["rollout.weights=sharded"]),
        ("reflecting", 2, 3, []),  # teams of two ranks and of one
        ("dapo", 2, 3, []),
        ("strata", 1, 2, ["rollout.weights=sharded"]),
        ("strata", 1, 3, ["rollout.weights=gathered"]),
    ],
)
def test_rollouts_of_one_task_are_dealt_to_several_ranks(
    root: Path, method: str, num_tasks: int, num_ranks: int, sharded: list[str]
) -> None:
    """Fewer tasks than ranks: no rank is idle, and records, metrics, evaluations and weights are those of one process."""
    given = [*METHODS[method], f"num_tasks={num_tasks}", "num_rollouts=3"]
    name = f"dealt-{method}-{num_tasks}-{num_ranks}-{len(sharded)}"
    setup = say_how_many_are_played
    done = run(root, name, *given, *sharded, *(SHARDED if sharded else []), num_ranks=num_ranks, setup=setup)
    assert done.status == [0] * num_ranks, done.output[-3000:]
    assert done.output.count("plays ") >= ITERATIONS * num_ranks  # each rank some, in each iteration
    # Each rank forwards the prompts of its own rows.
    assert_close_run(alone(root, *given), root / name, ITERATIONS, but=("cost/update_unique_tokens",))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["strata", "ppo", "rnd"])
def test_more_ranks_than_rollouts(root: Path, method: str) -> None:
    """Two rollouts on three ranks: one of them plays and trains nothing, and takes part in everything."""
    given = [*METHODS[method], "num_tasks=1", "num_rollouts=1"]
    done = run(root, f"empty-{method}", *given, num_ranks=3)
    assert done.status == [0] * 3, done.output[-3000:]
    assert_close_run(alone(root, *given), root / f"empty-{method}", ITERATIONS, but=("cost/update_unique_tokens",))


@pytest.mark.slow
def test_dealt_rollouts_are_taken_up_by_other_ranks(root: Path) -> None:
    """A signal to the second member in the middle of an update: both save and leave, and three ranks go on."""
    given = ["num_tasks=1", "num_rollouts=3", "update.minibatch_trajectories=2"]
    stopped = run(root, "taken-up", *given, num_ranks=2, kill=("optimizer_step", 8), send=signal.SIGTERM, to=1)
    assert stopped.status == [143, 143], stopped.output[-3000:]
    done = run(root, "taken-up", *given, num_ranks=3, resume="auto")
    assert done.status == [0] * 3, done.output[-3000:]
    assert_close_run(alone(root, *given), root / "taken-up", ITERATIONS, but=("cost/update_unique_tokens",))


def say_how_many_are_played() -> None:
    from hsg.rollout import Rollout

    begin = Rollout.begin
    Rollout.begin = lambda self, requests, max_turns=None: (  # type: ignore[method-assign]
        print(f"plays {len(requests)}") if requests and requests[0].key[0] == "rollout" else None,
        begin(self, requests, max_turns),
    )[1]


def say_when_sharded() -> None:
    from hsg.model import sharding

    shard = sharding.shard
    sharding.shard = lambda *given, **options: (print("one more is sharded"), shard(*given, **options))[1]


@pytest.mark.slow
def test_fsdp_file_of_the_launcher_is_enough(root: Path) -> None:
    """`accelerate launch --config_file experiments/accelerate/fsdp.yaml` sets these; policy and reference are sharded."""
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    given = ["train.iterations=1", "evaluation.every=0", "evaluation.initial=false", "evaluation.final=false"]
    done = run(root, "launched", *given, num_ranks=2, env=env, setup=say_when_sharded)
    assert done.status == [0, 0], done.output[-3000:]
    assert done.output.count("one more is sharded") == 2 * 2


@pytest.mark.slow
def test_hybrid_sharding_over_two_hosts(root: Path) -> None:
    """Two hosts of one rank each: a whole copy on each, gradients added between them."""
    given = {"num_ranks": 2, "env": {"LOCAL_WORLD_SIZE": "1"}}
    done = run(root, "hybrid", "distributed.sharding=hybrid", **given)
    assert done.status == [0, 0], done.output[-3000:]
    assert_close_run(alone(root), root / "hybrid", ITERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["gathered", "sharded"])
def test_sharded_reference_that_judges(root: Path, weights: str) -> None:
    """Two sharded models are forwarded in turns, by ranks that ask for them at different times."""
    given = ["judge.model=reference", "judge.temperature=1.0"]
    name = f"judge{weights}"
    done = run(root, name, *given, *SHARDED, f"rollout.weights={weights}", num_ranks=2)
    assert done.status == [0, 0], done.output[-3000:]
    assert_close_run(alone(root, *given), root / name, ITERATIONS)


@pytest.mark.slow
def test_sharded_run_resumes_without_sharding_and_the_other_way_round(root: Path) -> None:
    """A checkpoint holds whole weights and moments, whoever wrote it."""
    first = run(root, "back", *SHARDED, num_ranks=2, kill=("optimizer_step", 6))
    assert first.status[0] == -9
    assert "iteration_000001" in {p.name for p in (root / "back" / "checkpoints").iterdir()}
    done = run(root, "back", resume="auto")
    assert done.status == [0], done.output[-3000:]
    assert_close_run(alone(root), root / "back", ITERATIONS)
    first = run(root, "forth", kill=("optimizer_step", 6))
    assert first.status == [-9]
    done = run(root, "forth", *SHARDED, num_ranks=2, resume="auto")
    assert done.status == [0, 0], done.output[-3000:]
    assert_close_run(alone(root), root / "forth", ITERATIONS)


@pytest.mark.slow
def test_half_precision_is_sharded_with_float32_slices(root: Path) -> None:
    """bfloat16 compute: the run goes through, and what is saved are float32 weights that moved by less than bfloat16 shows."""
    done = run(root, "half", *SHARDED, "model.dtype=bfloat16", "optimizer.lr=1e-6", num_ranks=2)
    assert done.status == [0, 0], done.output[-3000:]
    before, after = (
        load_file(root / "half" / f"checkpoints/iteration_00000{n}/model/model.safetensors") for n in (0, 2)
    )
    assert {str(v.dtype) for v in after.values()} == {"torch.float32"}
    moved = sum(int((before[k] != after[k]).sum()) for k in before)
    assert moved > 1000
    assert all((before[k] - after[k]).abs().max() < 1e-4 for k in before)


# ------------------------------------------------------------------------------------------- ranks that are not alike


def slow_second_rank() -> None:
    """Rank 1's environments take their time at every step."""
    import os

    from fakes import GuessEnvironment

    step = GuessEnvironment.step
    if os.environ.get("RANK") == "1":
        GuessEnvironment.step = lambda self, action: (time.sleep(0.3), step(self, action))[1]  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["gathered", "sharded"])
def test_rank_with_slow_environments_is_waited_for(root: Path, weights: str) -> None:
    given = [*SHARDED, f"rollout.weights={weights}", "train.iterations=1", "evaluation.every=0"]
    done = run(root, f"slow{weights}", *given, num_ranks=2, setup=slow_second_rank)
    assert done.status == [0, 0], done.output[-3000:]


def stuck_second_rank() -> None:
    """Rank 1 never comes back from its rollout."""
    import os

    from hsg.rollout import Rollout

    if os.environ.get("RANK") == "1":
        Rollout.play = lambda self, *_, **__: time.sleep(3600)  # type: ignore[method-assign, assignment, return-value]


@pytest.mark.slow
def test_rank_that_never_comes_ends_the_run(root: Path) -> None:
    """After `distributed.timeout_seconds` the others stop waiting; the launcher ends the one that is stuck."""
    given = ["distributed.timeout_seconds=15", "evaluation.initial=false"]
    done = run(root, "stuck", *given, num_ranks=2, setup=stuck_second_rank, stop_at_failure=True)
    assert 0 not in done.status, done.output[-3000:]
    assert set(done.status) != {-9}, done.output[-3000:]  # not because the test lost its patience


# ---------------------------------------------------------------------------------------------- numbers that are none


def broken_second_rank() -> None:
    """The loss of rank 1 is infinite from the third optimizer step on; its gradients are finite."""
    import math
    import os

    import hsg.learner

    loss, calls = hsg.learner.policy_loss, iter(range(10**6))

    def broken(*given: Any, **options: Any) -> Any:
        value, metrics = loss(*given, **options)
        return (value + math.inf if os.environ.get("RANK") == "1" and next(calls) >= 2 else value), metrics

    hsg.learner.policy_loss = broken


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [[], SHARDED], ids=["whole", "sharded"])
def test_loss_that_is_not_finite_on_one_rank_stops_all(root: Path, sharded: list[str]) -> None:
    """All ranks skip the same steps, stop together, and leave the batch of each rank behind."""
    name = f"broken{len(sharded)}"
    given = [*sharded, "optimizer.max_nonfinite=2", "update.epochs=4"]
    done = run(root, name, *given, num_ranks=2, setup=broken_second_rank)
    assert done.status == [1, 1], done.output[-3000:]
    assert "got 2 optimizer steps in a row that are not" in done.output
    folder = root / name / "nonfinite"
    assert f"the batch is in {folder}" in done.output
    states = [read_state(folder / f"rank_{rank}") for rank in range(2)]
    rows = [row for state in states for row in Underway.join([state], of=state).rows]
    assert sum(row.tokens.num_sampled for row in rows) > 0
    assert (folder / "model" / "model.safetensors").is_file()
