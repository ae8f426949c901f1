"""make soak: two ranks in the toy world, one rollout in ten broken, killed about every minute; nothing may be lost.

    python tests/soak.py --minutes 20 [--set key=value]

    straight   a run that nothing happens to, for half of the time; processes, threads, files and memory are watched
    killed     the same iterations, kill -9 of both ranks at random moments, --resume auto until it is finished
    verdict    every record, metric, evaluation, weight and moment of the two is equal in every bit; nothing grew

What breaks is a function of task, seed and action, never of the clock: the two runs meet the same faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from processes import Done, run_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from hsg.engine.seeds import derive_seed  # noqa: E402
from hsg.environments import make as make_environment  # noqa: E402
from hsg.protocol import Environment, StepResult, Task, TaskSet  # noqa: E402

ONE_IN = 60  # actions that break: about one rollout in ten, at six actions each
TIMEOUT_SECONDS = 10.0
OPTIONS = [
    "rollout.env_retries=1", f"rollout.env_timeout_seconds={TIMEOUT_SECONDS}", "rollout.max_error_fraction=0.9",
    "checkpoint.every=1", "checkpoint.keep=2", "evaluation.every=10", "evaluation.num_tasks=8", "log.quiet=true",
    "update.epochs=2", "update.minibatch_trajectories=24", "loss.kl_coef=0.001",
]  # fmt: skip


class Breaking(Environment):
    """A world that breaks at some actions: it raises, answers nonsense, or hangs past its limit."""

    def __init__(self, inner: Environment, key: tuple[object, ...]) -> None:
        self.inner, self.key, self.turn = inner, key, 0

    def start(self) -> str:
        return self.inner.start()

    def step(self, action: str) -> StepResult:
        self.turn += 1
        number = derive_seed("fault", *self.key, self.turn, action)
        if number % ONE_IN == 0:
            kind = number // ONE_IN % 8
            if kind == 0:  # the rarest, since it costs the time that it takes
                time.sleep(TIMEOUT_SECONDS + 2)
            elif kind < 4:
                raise OSError("the engine is gone")
            else:
                values: list[Any] = [None, b"x", "x" * 10_000_000, "\ud800"]
                return values[kind - 4]
        return self.inner.step(action)

    @property
    def outcome(self) -> float:
        return self.inner.outcome

    def close(self) -> None:
        self.inner.close()


class BreakingTaskSet(TaskSet):
    """The tasks of another task set, in worlds that break."""

    def __init__(self, inner: TaskSet) -> None:
        self.inner, self.name = inner, inner.name

    @property
    def splits(self) -> tuple[str, ...]:
        return self.inner.splits

    def tasks(self, split: str) -> list[Task]:
        return self.inner.tasks(split)

    def create(self, task: Task, seed: int) -> Environment:
        return Breaking(self.inner.create(task, seed), (task.id, seed))

    def demonstrations(self, task: Task, seed: int) -> list[Any]:
        return self.inner.demonstrations(task, seed)

    def expert_actions(self, task: Task) -> list[str] | None:
        return self.inner.expert_actions(task)

    def close(self) -> None:
        self.inner.close()


def whole_world() -> None:
    """Called in each rank: the toy world as it is."""
    from hsg import environments

    environments.make = make_environment


def install() -> None:
    """Called in each rank: the toy world breaks."""
    from hsg import environments

    environments.make = lambda name, **options: BreakingTaskSet(make_environment(name, **options))  # type: ignore[assignment]


class Watch:
    """What the ranks hold, sampled every few seconds."""

    def __init__(self, log: Path) -> None:
        self.log = log  # until it is there the ranks are still loading
        self.samples: list[dict[str, float]] = []
        self._last = 0.0

    def __call__(self, pids: list[int]) -> None:
        if time.monotonic() - self._last < 2 or not self.log.exists():
            return
        self._last = time.monotonic()
        total: dict[str, float] = {"files": 0, "threads": 0, "megabytes": 0, "children": 0}
        try:
            for pid in pids:
                status = Path(f"/proc/{pid}/status").read_text()
                fields = dict(line.split(":", 1) for line in status.splitlines())
                total["files"] += len(os.listdir(f"/proc/{pid}/fd"))
                total["threads"] += int(fields["Threads"])
                total["megabytes"] += int(fields["VmRSS"].split()[0]) / 1024
                for task in Path(f"/proc/{pid}/task").iterdir():
                    total["children"] += len((task / "children").read_text().split())
        except (OSError, KeyError):  # a rank has just begun or ended
            return
        self.samples.append(total)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Means of the fourth and of the last sixth: an allocator needs some twenty iterations until it has all it wants."""
        n = len(self.samples)
        if n < 30:
            print(f"{n} samples of processes, files and memory are too few to judge by", flush=True)
            return {}
        parts = [self.samples[n // 2 : 2 * n // 3], self.samples[-(n // 6) :]]
        return {k: (_mean(parts[0], k), _mean(parts[1], k)) for k in self.samples[0]}


def _mean(samples: list[dict[str, float]], name: str) -> float:
    return sum(sample[name] for sample in samples) / len(samples)


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in found]


def differences(one: Path, other: Path, iterations: int) -> list[str]:
    """Names of what is not equal in every bit."""
    found = [name for name in ("metrics.jsonl", "eval.jsonl") if lines(one / name) != lines(other / name)]
    for n in range(iterations):
        name = f"trajectories/iteration_{n:06d}.jsonl"
        if (one / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    folder = f"checkpoints/iteration_{iterations:06d}"
    for name in (f"{folder}/model/model.safetensors", f"{folder}/state.safetensors"):
        a, b = load_file(one / name), load_file(other / name)
        if a.keys() != b.keys() or any(not a[k].equal(b[k]) for k in a):
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="mean time between two kills")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="hsg-soak-"))
    chance = random.Random(time.time_ns())
    watch = Watch(root / "straight" / "metrics.jsonl")

    def run(name: str, *overrides: str, **given: Any) -> Done:
        items = [*OPTIONS, *options.set, f"run.dir={root}", f"run.name={name}", *overrides]
        sets = [part for item in items for part in ("--set", item)]
        command = ["--config", str(ROOT / "experiments/configs/smoke.yaml"), *sets, "--resume", "auto"]
        given = {"setup": install, "limit_seconds": 60 * options.minutes + 1200, **given}
        return run_ranks(command, root, num_ranks=2, **given)

    model = root / "taught" / "checkpoints" / "iteration_000000" / "model"
    taught = run("taught", "train.iterations=0", setup=whole_world)  # in a world that works
    assert taught.status == [0, 0], taught.output[-3000:]
    options.set.append(f"model.path={model}")
    straight = run("straight", "train.iterations=100000", f"train.max_seconds={25 * options.minutes}", watch=watch)
    assert straight.status == [0, 0], straight.output[-3000:]
    metrics = lines(root / "straight" / "metrics.jsonl")
    faults = sum(v for line in metrics for k, v in line.items() if k.startswith("fault/"))
    print(f"straight: {len(metrics)} iterations, {faults:.0f} broken rollouts", flush=True)
    kills, patience, newest = 0, options.kill_seconds, ""
    while True:
        seconds = patience * chance.uniform(0.5, 1.5)
        done = run("killed", f"train.iterations={len(metrics)}", kill_after_seconds=seconds)
        if done.status == [0, 0]:
            break
        assert -signal.SIGKILL in done.status, done.output[-3000:]
        kills += 1
        there = max((p.name for p in (root / "killed" / "checkpoints").glob("iteration_*")), default="")
        print(f"killed after {seconds:.0f} s, newest checkpoint: {there or 'none'}", flush=True)
        if there == newest:  # a machine so slow that nothing is done between two kills would never be through
            patience *= 2
        newest = there
    wrong = differences(root / "straight", root / "killed", len(metrics))
    growth = watch.growth()
    for name, (early, late) in growth.items():
        print(f"{name}: {early:.0f} -> {late:.0f}")
        # Threads of worlds that hang are given up and come back; files and memory breathe a little. A third of the time lies
        # between the two.
        if late > 1.05 * early + {"megabytes": 15, "threads": 12}.get(name, 6):
            wrong.append(f"{name} grew")
    print(f"{kills} kills; " + (f"NOT equal: {', '.join(wrong[:10])}; see {root}" if wrong else "equal in every bit"))
    if not wrong:
        shutil.rmtree(root)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
