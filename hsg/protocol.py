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
from collections.abc import Mapping, Sequence
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
    """

    strategy: str
    actions: tuple[str, ...]
    wasted: tuple[int, ...] = ()
    fits: bool = True


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
    if result.feedback is not None and not isinstance(result.feedback, str):
        return f"StepResult.feedback must be a str or None, got {type(result.feedback).__name__}"
    return None


MAX_OBSERVATION_CHARS = 1_000_000


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
