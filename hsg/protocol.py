"""The words that hsg and its environments share (standard library only).

    task_set = environments.make("toy", **options)        # one TaskSet
    for task in task_set.tasks("train"):                   # stable ids, fixed order
        environment = task_set.create(task, seed=0)        # one Environment = one episode
        observation = environment.start()
        result = environment.step("open door")             # StepResult
        environment.close()

An environment speaks text: observations are strings, actions are strings.  It knows nothing of tokens,
strategies or advantages.  Deliberately absent:
  1. reset(): an Environment is single-use, so no state can leak from one episode into the next;
  2. batching: the rollout steps many environments from threads, so `step` may block but must not share
     mutable state with another Environment of the same TaskSet;
  3. error results: a broken environment raises.  The rollout turns that into a stop reason, never into
     a reward of 0.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any


class StopReason(str, enum.Enum):
    """Why a trajectory ended; each one is a metric `stop/<value>` (share of trajectories)."""

    DONE = "done"  # the environment said so
    MAX_TURNS = "max_turns"  # rollout.max_turns actions were taken
    MAX_TOKENS = "max_tokens"  # the trajectory's token limit was reached
    CONTEXT_FULL = "context_full"  # the next turn does not fit the model's context
    PARSE_ERROR = "parse_error"  # rollout.max_parse_failures unparseable responses
    ENV_ERROR = "env_error"  # the environment raised or returned nonsense
    ENV_TIMEOUT = "env_timeout"  # the environment did not answer in time


FAULTS = frozenset({StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT})
"""Stop reasons that are the environment's fault: such a trajectory has no outcome and trains nothing."""

MAX_OBSERVATION_CHARS = 1_000_000


class EnvironmentFault(RuntimeError):
    """Raised by an environment that has broken (its engine died, say); the episode ends as `env_error`."""


@dataclass(frozen=True)
class Task:
    """One problem to solve. `id` is stable across processes and releases; `kind` groups tasks in reports."""

    id: str
    split: str
    kind: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class StepResult:
    """What one action brought.

    observation  text shown to the agent next
    reward       gain of this action in the environment's units (finite)
    done         the episode is over
    success      the task is solved (may only become True together with `done`)
    score        progress so far in [0, 1], as the benchmark reports it
    valid        the environment understood the action
    feedback     extra text for reflection (failing tests, say); never shown during the episode
    """

    observation: str
    reward: float
    done: bool
    success: bool
    score: float
    valid: bool = True
    feedback: str | None = None


@dataclass(frozen=True)
class Demonstration:
    """One episode played by a known rule, for the warm start: a strategy, actions that follow it, turns that do not.

    strategy  one fixed text for the whole episode, as an agent would write it
    actions   what is done, turn by turn
    wasted    0-based turns that neither follow the strategy nor advance the task (put in on purpose)
    fits      the strategy suits the task (False: a wrong strategy, faithfully followed)
    turn_strategies  what guides each turn by itself, as long as `actions`; empty: `strategy` guides every turn
    """

    strategy: str
    actions: tuple[str, ...]
    wasted: tuple[int, ...] = ()
    fits: bool = True
    turn_strategies: tuple[str, ...] = ()


class Environment(ABC):
    """One episode. `start` once, then `step` until done, then `close` (allowed at any time, and twice)."""

    @abstractmethod
    def start(self) -> str:
        """The first observation, task description included."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Take one action. After `done` every further call returns the last result with reward 0."""

    @property
    @abstractmethod
    def outcome(self) -> float:
        """R(tau) in [0, 1] of the episode so far: what training maximises."""

    def admissible_actions(self) -> list[str] | None:
        """Actions possible now, or None where the environment cannot list them. May be slow: on demand only."""
        return None

    def close(self) -> None:  # noqa: B027 - an environment without resources has nothing to free
        """Free what the episode holds."""


class TaskSet(ABC):
    """All tasks of one environment, in named splits, and the way to play them."""

    name: str

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, the training split first."""

    @abstractmethod
    def tasks(self, split: str) -> list[Task]:
        """The tasks of one split, always in the same order. Unknown split: ValueError naming the known ones."""

    @abstractmethod
    def create(self, task: Task, seed: int) -> Environment:
        """A fresh episode. The same (task, seed) gives the same first observation. Thread-safe."""

    def expert_actions(self, task: Task) -> list[str] | None:
        """Actions that solve the task with any seed, or None where no expert is known."""
        return None

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Episodes to learn from: strategies that fit and strategies that do not, each with play that follows it.

        The same (task, seed) gives the same list. An environment that only knows `expert_actions` returns []; the
        warm start then makes strategies of its own out of the expert's actions.
        """
        return []

    def close(self) -> None:  # noqa: B027
        """Free everything the task set holds (engines, worker processes)."""


def check_step(result: object) -> str | None:
    """What is wrong with a value that `Environment.step` returned, in one sentence, or None."""
    if not isinstance(result, StepResult):
        return f"step() must return a StepResult, got {type(result).__name__}"
    if problem := check_observation(result.observation):
        return problem
    for name in ("reward", "score"):
        value = getattr(result, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"StepResult.{name} must be a finite number, got {value!r}"
    if not 0.0 <= result.score <= 1.0:
        return f"StepResult.score must be in [0, 1], got {result.score!r}"
    for name in ("done", "success", "valid"):
        if not isinstance(getattr(result, name), bool):
            return f"StepResult.{name} must be a bool, got {getattr(result, name)!r}"
    if result.feedback is not None and (problem := check_observation(result.feedback)):
        return f"StepResult.feedback must be a str or None; {problem}"
    return None


def check_observation(text: object) -> str | None:
    """What is wrong with an observation, in one sentence, or None."""
    if not isinstance(text, str):
        return f"an observation must be a str, got {type(text).__name__}"
    if len(text) > MAX_OBSERVATION_CHARS:
        return f"an observation must have at most {MAX_OBSERVATION_CHARS:,} characters, got {len(text):,}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "an observation must be encodable as UTF-8, got a lone surrogate"
    return None


def check_outcome(value: object) -> str | None:
    """What is wrong with `Environment.outcome`, in one sentence, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        return f"outcome must be a number in [0, 1], got {value!r}"
    return None


def check_environment(task_set: TaskSet, *, num_tasks: int = 3) -> list[str]:
    """What is wrong with an environment, one sentence per fault; an empty list means that hsg can train on it.

    num_tasks tasks, spread evenly over all splits, are played several times (about ten episodes each: alone, again,
    interleaved, from another thread, with nonsense, by the expert). A fault is a sentence, never a traceback. The
    task set stays open. A `step` that never answers hangs the check: only the rollout has a time limit.
    """
    if num_tasks < 1:
        raise ValueError(f"num_tasks must be at least 1, got {num_tasks}; one task already shows most faults")
    findings: list[str] = []
    tasks = _check_tasks(task_set, findings)
    num_tasks = min(num_tasks, len(tasks))
    chosen = [tasks[i * len(tasks) // num_tasks] for i in range(num_tasks)]
    tries = [_attempt(findings, f"{task.id}: playing", _check_play, task_set, task) for task in chosen]
    # An environment that cannot be played at all has said so once; what follows would only repeat it.
    alone: list[_Played] = [played for played in tries if played is not None]
    for played, other in zip(alone, alone[1:] + alone[:1], strict=True):
        _attempt(findings, f"{played.task.id}: playing again and closing twice", _check_again, task_set, played)
        _attempt(findings, f"{played.task.id}: playing two at once", _check_interleaved, task_set, played, other)
        _attempt(findings, f"{played.task.id}: nonsense actions", _check_nonsense, task_set, played)
        _attempt(findings, f"{played.task.id}: expert_actions()", _check_expert, task_set, played.task)
        _attempt(findings, f"{played.task.id}: demonstrations()", _check_demonstrations, task_set, played.task)
    return findings


_SEED = 0  # the seed that `seed or something_random` forgets
_SCRIPT_LENGTH = 12  # actions replayed per episode: enough to see shared state, quick on a slow engine
_NONSENSE = ("", " ", "x" * 10_000, "öffne die 门 🔑", "look\nlook", "\x00", "{}'\"\\</action>")


class _Fault(Exception):
    """One finding: its text is the sentence."""


@dataclass(frozen=True)
class _Played:
    """An episode as it went: equal episodes compare equal."""

    task: Task
    actions: tuple[str, ...]
    first: str
    steps: tuple[tuple[StepResult, float], ...]  # (result, outcome after it)


def _require(condition: object, fault: str) -> None:
    if not condition:
        raise _Fault(fault)


def _is_of(values: Any, container: type[list] | type[tuple], kind: type) -> bool:
    return isinstance(values, container) and all(isinstance(value, kind) for value in values)


def _attempt(findings: list[str], what: str, check: Callable[..., Any], *args: Any) -> Any:
    try:
        return check(*args)
    except _Fault as fault:
        findings.append(f"{what}: {fault}.")
    except Exception as error:  # a stranger's code: whatever it raises is a finding
        findings.append(f"{what} must not raise, got {type(error).__name__}: {' '.join(str(error).split())[:200]}.")


def _check_tasks(task_set: TaskSet, findings: list[str]) -> list[Task]:
    names = _attempt(findings, "splits", _check_splits, task_set) or ()
    found = [_attempt(findings, f"split {name!r}", _check_split, task_set, name) or [] for name in names]
    home: dict[str, str] = {}
    for task in (tasks := [task for tasks in found for task in tasks]):
        if home.setdefault(task.id, task.split) != task.split:
            findings.append(f"splits must be disjoint, but {task.id!r} is in {home[task.id]!r} and in {task.split!r}.")
    return tasks


def _check_splits(task_set: TaskSet) -> tuple[str, ...]:
    name, names = task_set.name, task_set.splits
    _require(isinstance(name, str) and name, f"TaskSet.name must be a non-empty str, got {name!r}")
    good = _is_of(names, tuple, str) and names and all(names) and len(set(names)) == len(names)
    _require(good, f"splits must be a tuple of distinct names, got {names!r}")
    try:
        message = f"no error but {task_set.tasks('no such split')!r:.80}"
    except ValueError as error:
        message = str(error)
    good = not message.startswith("no error") and all(split in message for split in names)
    _require(good, f"an unknown split must raise a ValueError that names the known ones, got {message}")
    return names


def _check_split(task_set: TaskSet, split: str) -> list[Task]:
    tasks = task_set.tasks(split)
    _require(_is_of(tasks, list, Task) and tasks, f"tasks() must return a non-empty list of Task, got {tasks!r:.80}")
    for task in tasks:
        _require(isinstance(task.id, str) and task.id, f"Task.id must be a non-empty str, got {task.id!r}")
        _require(task.split == split, f"Task.split of {task.id} must be {split!r}, got {task.split!r}")
    ids = [task.id for task in tasks]
    _require(len(set(ids)) == len(ids), "task ids must be unique")
    _require([task.id for task in task_set.tasks(split)] == ids, "tasks() must give the same tasks twice")
    return tasks


def _start(environment: Environment) -> str:
    first = environment.start()
    problem = check_observation(first) or check_outcome(environment.outcome)
    _require(problem is None, f"after start() {problem}")
    actions = environment.admissible_actions()
    good = actions is None or _is_of(actions, list, str)
    _require(good, f"admissible_actions() must return a list of str or None, got {actions!r:.80}")
    return first


def _step(environment: Environment, action: str) -> tuple[StepResult, float]:
    result = environment.step(action)
    problem = check_step(result) or check_outcome(environment.outcome)
    _require(problem is None, f"after action {action[:40]!r} {problem}")
    _require(result.done or not result.success, f"success must come with done, got done=False after {action[:40]!r}")
    return result, environment.outcome


def _play(environment: Environment, actions: Sequence[str], step: Callable[..., Any] = _step) -> tuple[str, tuple]:
    first, steps = _start(environment), []
    for action in actions:
        steps.append(step(environment, action))
        if steps[-1][0].done:
            break
    return first, tuple(steps)


def _check_play(task_set: TaskSet, task: Task) -> _Played:
    """Play the expert's first actions, or what is admissible at first, and keep the episode to compare with."""
    with closing(task_set.create(task, _SEED)) as environment:
        _start(environment)
        actions = task_set.expert_actions(task) or environment.admissible_actions() or ["look", "help"]
        script = actions[:_SCRIPT_LENGTH]
    with closing(task_set.create(task, _SEED)) as environment:
        return _Played(task, tuple(script), *_play(environment, script))


def _check_again(task_set: TaskSet, played: _Played) -> None:
    task_set.create(played.task, _SEED).close()  # allowed before start()
    with closing(task_set.create(played.task, _SEED)) as environment:
        first, steps = _play(environment, played.actions)
        environment.close()
    _require(first == played.first, "the same task and seed must give the same first observation")
    _require(steps == played.steps, "the same task, seed and actions must give the same results")
    with closing(task_set.create(played.task, _SEED)) as environment, ThreadPoolExecutor(1) as pool:
        _, steps = _play(environment, played.actions, lambda *args: pool.submit(_step, *args).result())
    _require(steps == played.steps, "steps taken from another thread must give the same results")


def _check_interleaved(task_set: TaskSet, played: _Played, other: _Played) -> None:
    with closing(task_set.create(played.task, _SEED)) as one, closing(task_set.create(other.task, _SEED)) as two:
        pair = ((one, played), (two, other))
        same = [_start(environment) == alone.first for environment, alone in pair]
        for turn in range(_SCRIPT_LENGTH):
            for environment, alone in pair:
                if turn < len(alone.steps):
                    same.append(_step(environment, alone.actions[turn]) == alone.steps[turn])
    _require(all(same), f"an episode must not change another one, but beside {other.task.id} it went differently")


def _check_nonsense(task_set: TaskSet, played: _Played) -> None:
    with closing(task_set.create(played.task, _SEED)) as environment:
        _start(environment)
        for action in (*_NONSENSE, *played.actions[:1]):
            result, _ = _step(environment, action)
            _require(action not in _NONSENSE or not result.success, f"{action[:40]!r} must not solve the task")
            if result.done:
                return _check_latch(environment, result)


def _check_latch(environment: Environment, last: StepResult) -> None:
    outcome = environment.outcome
    for action in ("", "look"):
        result, later_outcome = _step(environment, action)
        _require(result.reward == 0, f"a step after done must have reward 0, got {result.reward}")
        same = (result.observation, result.score, later_outcome) == (last.observation, last.score, outcome)
        _require(same, "a step after done must repeat observation, score and outcome")
        _require(result.done and result.success == last.success, "a step after done must repeat done and success")


def _check_expert(task_set: TaskSet, task: Task) -> None:
    if (actions := task_set.expert_actions(task)) is None:
        return
    _require(_is_of(actions, list, str) and actions, f"it must be a list of str or None, got {actions!r:.80}")
    for seed in (_SEED, 1):
        with closing(task_set.create(task, seed)) as environment:
            _, steps = _play(environment, actions)
            _require(steps[-1][0].success, f"its actions must solve the task, but with seed {seed} they do not")
            _require(math.isfinite(sum(result.reward for result, _ in steps)), "the sum of rewards must be finite")
            _check_latch(environment, steps[-1][0])


def _check_demonstrations(task_set: TaskSet, task: Task) -> None:
    found = task_set.demonstrations(task, _SEED)
    _require(_is_of(found, list, Demonstration), f"it must return a list of Demonstration, got {found!r:.80}")
    _require(found == task_set.demonstrations(task, _SEED), "the same task and seed must give the same list")
    for item in found:
        text, actions, wasted = item.strategy, item.actions, item.wasted
        _require(isinstance(text, str) and text.strip(), f"strategy must be a non-empty str, got {text!r:.80}")
        _require(_is_of(actions, tuple, str) and actions, f"actions must be a tuple of str, got {actions!r:.80}")
        turns = tuple(sorted(set(wasted) & set(range(len(actions)))))
        _require(wasted == turns, f"wasted must be a tuple of ascending turns of the play, got {wasted!r}")
