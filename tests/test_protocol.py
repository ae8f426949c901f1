"""Every kind of fault, put into a tiny sound environment one at a time, must be named by `check_environment`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from hsg.protocol import (
    MAX_OBSERVATION_CHARS,
    Demonstration,
    Environment,
    StepResult,
    Task,
    TaskSet,
    check_environment,
    check_observation,
    check_outcome,
    check_step,
)

SOUND = StepResult(observation="ok", reward=0.0, done=False, success=False, score=0.0)


class Door(Environment):
    """Push the door three times."""

    def __init__(self, task: Task, seed: int):
        self.task, self.seed, self.pushes, self.closed = task, seed, 0, False

    def start(self) -> str:
        return f"Door {self.task.id}, seed {self.seed}."

    def step(self, action: str) -> StepResult:
        if self.pushes == 3:
            return self.result(reward=0.0)
        valid = action == "push"
        self.pushes += valid
        return self.result(reward=valid / 3, valid=valid)

    def result(self, reward: float, valid: bool = True) -> StepResult:
        done = self.pushes == 3
        return StepResult(f"Pushed {self.pushes} times.", reward, done, done, self.outcome, valid)

    @property
    def outcome(self) -> float:
        return self.pushes / 3

    def admissible_actions(self) -> list[str] | None:
        return ["push", "wait"]


class Doors(TaskSet):
    name = "doors"
    splits = ("train", "dev")
    environment: type[Door] = Door

    def tasks(self, split: str) -> list[Task]:
        if split not in self.splits:
            raise ValueError(f"split must be one of train, dev, got {split!r}")
        return [Task(f"{split}-{i}", split) for i in range(3)]

    def create(self, task: Task, seed: int) -> Environment:
        return self.environment(task, seed)

    def expert_actions(self, task: Task) -> list[str] | None:
        return ["push"] * 3

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        return [Demonstration("Push on.", ("push", "wait", "push", "push"), wasted=(1,))]


def with_door(**methods: object) -> Doors:
    """A task set whose doors have other methods."""
    doors = Doors()
    doors.environment = type("Broken", (Door,), methods)
    return doors


def with_doors(**methods: object) -> Doors:
    """A task set with other methods."""
    return type("Broken", (Doors,), methods)()


def altered(**fields: object) -> Callable[[Door, str], object]:
    """A step whose result has other fields."""
    return lambda self, action: replace(Door.step(self, action), **fields)  # type: ignore[arg-type]


def raises(*args: object) -> object:
    raise RuntimeError("engine died")


def raises_key_error(self: Doors, split: str) -> list[Task]:
    return {name: Doors.tasks(self, name) for name in ("train", "dev")}[split]


def shares_state() -> Doors:
    """All doors count their pushes in one place."""
    count = [0]

    def start(self: Door) -> str:
        count[0] = 0
        return Door.start(self)

    def step(self: Door, action: str) -> StepResult:
        self.pushes = count[0]
        result = Door.step(self, action)
        count[0] = self.pushes
        return result

    return with_door(start=start, step=step)


def one_thread_only() -> Doors:
    main = threading.get_ident()

    def step(self: Door, action: str) -> StepResult:
        if threading.get_ident() != main:
            raise RuntimeError("wrong thread")
        return Door.step(self, action)

    return with_door(step=step)


def differs_in_threads() -> Doors:
    main = threading.get_ident()

    def step(self: Door, action: str) -> StepResult:
        return replace(Door.step(self, action), feedback="main" if threading.get_ident() == main else "other")

    return with_door(step=step)


def closes_once(self: Door) -> None:
    if self.closed:
        raise RuntimeError("already closed")
    self.closed = True


def speaks_after_done(self: Door, action: str) -> StepResult:
    done = self.pushes == 3
    return replace(Door.step(self, action), **({"observation": "Still here."} if done else {}))


def reopens_after_done(self: Door, action: str) -> StepResult:
    done = self.pushes == 3
    return replace(Door.step(self, action), **({"done": False, "success": False} if done else {}))


def refuses_long_actions(self: Door, action: str) -> StepResult:
    if len(action) > 100:
        raise ValueError("too long")
    return Door.step(self, action)


def refuses_unicode(self: Door, action: str) -> StepResult:
    action.encode("ascii")
    return Door.step(self, action)


def is_solved_by_nothing(self: Door, action: str) -> StepResult:
    if not action.strip():
        self.pushes = 3
        return self.result(reward=1.0)
    return Door.step(self, action)


def forgets_seed_0(self: Door) -> str:
    return f"Door {self.seed or random.random()}."


def noisy(self: Door, action: str) -> StepResult:
    result = Door.step(self, action)
    return result if self.pushes == 3 else replace(result, observation=f"Noise {random.random()}.")


def as_demonstration(*args: object, **kwargs: object) -> Callable[..., list[Demonstration]]:
    return lambda self, task, seed: [Demonstration(*args, **kwargs)]  # type: ignore[arg-type]


def task_ids(make: Callable[[str, int], object]) -> Callable[[Doors, str], list[Task]]:
    return lambda self, split: [
        replace(task, id=make(split, i))  # type: ignore[arg-type]
        for i, task in enumerate(Doors.tasks(self, split))
    ]


FAULTS: dict[str, tuple[Callable[[], Doors], str]] = {
    "no name": (lambda: with_doors(name=""), "TaskSet.name must be a non-empty str"),
    "splits are a list": (lambda: with_doors(splits=["train", "dev"]), "splits must be a tuple of distinct names"),
    "splits twice": (lambda: with_doors(splits=("train", "train")), "splits must be a tuple of distinct names"),
    "an empty split": (lambda: with_doors(tasks=lambda self, split: Doors.tasks(self, split)[:0]), "non-empty list"),
    "tasks are no tasks": (lambda: with_doors(tasks=lambda self, split: Doors.tasks(self, split) and ["a"]), "of Task"),
    "ids are numbers": (lambda: with_doors(tasks=task_ids(lambda split, i: i)), "Task.id must be a non-empty str"),
    "ids twice": (lambda: with_doors(tasks=task_ids(lambda split, i: split)), "task ids must be unique"),
    "ids of each call": (lambda: with_doors(tasks=task_ids(lambda s, i: f"{s}{random.random()}")), "same tasks twice"),
    "splits overlap": (lambda: with_doors(tasks=task_ids(lambda split, i: str(i))), "splits must be disjoint"),
    "wrong split": (
        lambda: with_doors(tasks=lambda self, split: [replace(t, split="x") for t in Doors.tasks(self, split)]),
        "Task.split of train-0 must be 'train'",
    ),
    "unknown split is empty": (
        lambda: with_doors(tasks=lambda self, split: Doors.tasks(self, split) if split in self.splits else []),
        "an unknown split must raise a ValueError that names the known ones, got no error",
    ),
    "unknown split is a KeyError": (lambda: with_doors(tasks=raises_key_error), "must not raise, got KeyError"),
    "create raises": (lambda: with_doors(create=raises), "must not raise, got RuntimeError: engine died"),
    "start raises": (lambda: with_door(start=raises), "must not raise, got RuntimeError: engine died"),
    "step raises": (lambda: with_door(step=raises), "must not raise, got RuntimeError: engine died"),
    "seed 0 is forgotten": (lambda: with_door(start=forgets_seed_0), "must give the same first observation"),
    "results vary": (lambda: with_door(step=noisy), "same task, seed and actions must give the same results"),
    "state is shared": (shares_state, "an episode must not change another one"),
    "one thread only": (one_thread_only, "must not raise, got RuntimeError: wrong thread"),
    "threads differ": (differs_in_threads, "steps taken from another thread must give the same results"),
    "closes once": (lambda: with_door(close=closes_once), "closing twice must not raise, got RuntimeError: already"),
    "first observation is None": (lambda: with_door(start=lambda self: None), "an observation must be a str"),
    "step returns a tuple": (lambda: with_door(step=lambda self, action: ("ok", 0.0)), "must return a StepResult"),
    "reward is NaN": (lambda: with_door(step=altered(reward=float("nan"))), "reward must be a finite number"),
    "score is 100": (lambda: with_door(step=altered(score=100.0)), "score must be in [0, 1]"),
    "outcome is 2 at the start": (
        lambda: with_door(outcome=property(lambda self: 2.0)),
        "after start() outcome must be a number in [0, 1], got 2.0",
    ),
    "outcome is below 0 at the end": (
        lambda: with_door(
            outcome=property(lambda self: -0.1 if self.pushes == 3 else 0.0),
            result=lambda self, reward, valid=True: replace(SOUND, done=self.pushes == 3, success=self.pushes == 3),
        ),
        "after action 'push' outcome must be a number in [0, 1], got -0.1",
    ),
    "success without done": (lambda: with_door(step=altered(success=True)), "success must come with done"),
    "never solved": (lambda: with_door(step=altered(success=False)), "its actions must solve the task"),
    "pays after done": (lambda: with_door(step=altered(reward=1.0)), "after done must have reward 0"),
    "speaks after done": (lambda: with_door(step=speaks_after_done), "after done must repeat observation"),
    "reopens after done": (lambda: with_door(step=reopens_after_done), "after done must repeat done and success"),
    "infinite sum": (lambda: with_door(step=altered(reward=1e308)), "the sum of rewards must be finite"),
    "long action": (lambda: with_door(step=refuses_long_actions), "nonsense actions must not raise"),
    "unicode action": (lambda: with_door(step=refuses_unicode), "nonsense actions must not raise"),
    "nothing solves it": (lambda: with_door(step=is_solved_by_nothing), "'' must not solve the task"),
    "admissible is a tuple": (
        lambda: with_door(admissible_actions=lambda self: ("push",)),
        "must return a list of str",
    ),
    "expert is a text": (lambda: with_doors(expert_actions=lambda self, task: "push"), "must be a list of str or None"),
    "demonstrations are texts": (
        lambda: with_doors(demonstrations=lambda self, task, seed: ["push"]),
        "it must return a list of Demonstration",
    ),
    "demonstrations vary": (
        lambda: with_doors(demonstrations=lambda self, task, seed: [Demonstration(str(random.random()), ("push",))]),
        "the same task and seed must give the same list",
    ),
    "wasted out of range": (
        lambda: with_doors(demonstrations=as_demonstration("Push.", ("push",), wasted=(1,))),
        "wasted must be a tuple of ascending turns",
    ),
    "wasted out of order": (
        lambda: with_doors(demonstrations=as_demonstration("Push.", ("wait", "wait"), wasted=(1, 0))),
        "wasted must be a tuple of ascending turns",
    ),
    "no strategy": (lambda: with_doors(demonstrations=as_demonstration(" ", ("push",))), "strategy must be"),
    "no play": (lambda: with_doors(demonstrations=as_demonstration("Push.", ())), "actions must be a tuple of str"),
}


def test_a_sound_environment_has_no_finding():
    assert check_environment(Doors()) == []


def test_a_sound_environment_without_expert_and_lists_has_no_finding():
    doors = with_doors(expert_actions=TaskSet.expert_actions, demonstrations=TaskSet.demonstrations)
    doors.environment = type("Plain", (Door,), {"admissible_actions": Environment.admissible_actions})
    assert check_environment(doors, num_tasks=10) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence(fault: str):
    make, expected = FAULTS[fault]
    findings = check_environment(make())
    assert any(expected in finding for finding in findings), findings
    assert all(finding.endswith(".") and "\n" not in finding for finding in findings), findings


def test_tasks_are_taken_from_all_splits():
    seen: set[str] = set()

    class Watched(Doors):
        def create(self, task: Task, seed: int) -> Environment:
            seen.add(task.id)
            return super().create(task, seed)

    assert check_environment(Watched(), num_tasks=2) == []
    assert seen == {"train-0", "dev-0"}
    with pytest.raises(ValueError, match="num_tasks must be at least 1, got 0"):
        check_environment(Doors(), num_tasks=0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"observation": 3}, "an observation must be a str"),
        ({"observation": "\ud800"}, "lone surrogate"),
        ({"observation": "x" * (MAX_OBSERVATION_CHARS + 1)}, "at most 1,000,000 characters"),
        ({"reward": float("inf")}, "StepResult.reward must be a finite number"),
        ({"reward": True}, "StepResult.reward must be a finite number"),
        ({"score": -0.01}, "StepResult.score must be in"),
        ({"done": 1}, "StepResult.done must be a bool"),
        ({"success": None}, "StepResult.success must be a bool"),
        ({"valid": "yes"}, "StepResult.valid must be a bool"),
        ({"feedback": ["failed"]}, "StepResult.feedback must be a str or None"),
        (
            {"feedback": "\ud800"},
            "StepResult.feedback must be a str or None; an observation must be encodable as UTF-8",
        ),
    ],
)
def test_check_step_names_the_field(fields: dict, problem: str):
    assert check_step(SOUND) is None
    assert problem in (check_step(replace(SOUND, **fields)) or "")


def test_checks_of_single_values():
    assert check_step(None) == "step() must return a StepResult, got NoneType"
    assert check_observation("Grüße 門") is None
    assert all(check_outcome(value) is None for value in (0, 1.0, 0.5))
    assert all(check_outcome(value) is not None for value in (-0.1, 1.1, float("nan"), None, True))
