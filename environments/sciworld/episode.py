"""One ScienceWorld episode and the set of all its tasks, behind hsg.protocol.

    start  -> task description, line feed, the room as "look around" shows it
    step   -> the engine's text; reward = gain of the clamped score; score = max(0, engine score)

Deliberately absent:
  1. a turn limit: the rollout has one, and "free" actions do not count as moves for the engine;
  2. extra text after an observation (inventory, valid actions): what the agent wants it can ask for;
  3. a second load: load() leaves an episode ready to play.
"""

from __future__ import annotations

from dataclasses import replace

from hsg.environments.sciworld import catalog
from hsg.environments.sciworld.demonstrations import House, make_demonstrations, supports
from hsg.environments.sciworld.engine import Engine, Pool
from hsg.environments.sciworld.gold import ExpertStore
from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

LOAD_SECONDS = STEP_SECONDS = 300.0
"""Limits on one answer of an engine (0.05 s and 0.005 s on a free core; minutes on a starved one).
Past them the engine counts as hung and is killed; the rollout has its own, shorter patience."""

NOT_UNDERSTOOD = ("Unknown action", "No known action matches that input.")


class SciWorldEpisode(Environment):
    """One episode; an engine holds it from `start` to `close`. The seed changes nothing: the engine is seeded
    by the variation."""

    def __init__(self, pool: Pool, kind: str, variation: int, simplifications: str):
        self._pool = pool
        self._arguments = (kind, variation, simplifications)
        self._engine: Engine | None = None
        self._episode = -1
        self._closed = False
        self._points = 0  # clamped score, 0 ... 100
        self._last: StepResult | None = None

    def start(self) -> str:
        if self._engine is not None or self._closed:
            raise RuntimeError("an episode can be started once; create another")
        self._engine, self._episode = self._pool.acquire()
        return self._engine.request("L", self._episode, *self._arguments, timeout=LOAD_SECONDS).text.rstrip()

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return replace(self._last, reward=0.0)
        answer = self._live().request("S", self._episode, action, timeout=STEP_SECONDS)
        # A wrong focus scores -100 and ends the task (the engine itself would let it go on); the benchmark counts 0.
        points = max(0, round(100 * answer.score))
        done = answer.completed or answer.score < 0
        gain, self._points = points - self._points, points
        self._last = StepResult(
            observation=answer.text,
            reward=gain / 100,
            done=done,
            success=done and points == 100,
            score=points / 100,
            valid=not answer.text.startswith(NOT_UNDERSTOOD),
        )
        return self._last

    @property
    def outcome(self) -> float:
        return self._points / 100

    def admissible_actions(self) -> list[str]:
        return self._live().request("A", self._episode, timeout=STEP_SECONDS).text.split("\n")

    def _live(self) -> Engine:
        if self._engine is None or self._closed:
            raise RuntimeError("an episode must be started and not closed; call start() first, close() last")
        return self._engine

    def close(self) -> None:
        if not self._closed and self._engine is not None:
            self._pool.release(self._engine, self._episode)
        self._closed = True


class SciWorldTaskSet(TaskSet):
    """The chosen tasks of ScienceWorld in their official splits. Task.id is "find-animal/17"."""

    name = "sciworld"
    splits = catalog.SPLITS
    groups = catalog.GROUPS  # reporting group -> kinds of task, for tables

    def __init__(
        self, kinds: tuple[str, ...], simplifications: str, max_variations: int | None, pool: Pool, experts: ExpertStore
    ):
        self._kinds, self._simplifications, self._max_variations = kinds, simplifications, max_variations
        self._pool, self._experts = pool, experts

    def tasks(self, split: str) -> list[Task]:
        """One variation of every kind, then the next of every kind, ...: any prefix is a balanced sample."""
        if split not in self.splits:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}; see TaskSet.splits")
        columns = [catalog.spread(catalog.variations(kind, split), self._max_variations) for kind in self._kinds]
        return [
            Task(id=f"{kind}/{column[row]}", split=split, kind=kind, data={"variation": column[row]})
            for row in range(max(map(len, columns)))
            for kind, column in zip(self._kinds, columns, strict=True)
            if row < len(column)
        ]

    def create(self, task: Task, seed: int) -> SciWorldEpisode:
        return SciWorldEpisode(self._pool, *split_id(task.id), self._simplifications)

    def expert_actions(self, task: Task) -> list[str] | None:
        """Packaged, cached, or (0.3-55 s) the engine's gold path cut at the win; None where that does not win."""
        return self._experts.actions(*split_id(task.id))

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Strategies and play for the Find and Lifespan tasks under "easy" (they teleport); [] for all others."""
        if not supports(task) or self._simplifications != "easy":
            return []

        house = House(lambda: self.create(task, seed))
        try:
            return make_demonstrations(task, seed, house)
        finally:
            house.close()

    @property
    def engine_pids(self) -> list[int]:
        """Process ids of the JVMs alive now."""
        return self._pool.pids

    def close(self) -> None:
        self._pool.close()
        self._experts.close()


def split_id(task_id: str) -> tuple[str, int]:
    """ "find-animal/17" -> ("find-animal", 17); ValueError where it is no task of ScienceWorld."""
    kind, _, variation = task_id.rpartition("/")
    if kind not in catalog.TASKS or not variation.isdecimal():
        raise ValueError(f"task.id must look like 'find-animal/17', got {task_id!r}; take tasks from TaskSet.tasks()")
    return kind, int(variation)
