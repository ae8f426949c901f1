"""One ALFWorld episode and the set of all games, behind hsg.protocol.

    start  -> the engine's introduction: the receptacles of the room, "Your task is to: ..."
    step   -> the engine's text; success = won; reward, score and outcome 1.0 with the win, 0.0 before

Text and admissible commands are the engine's, byte for byte, in the language of the game loaded: "put X in/on Y" in
format 2.1.1, "move X to Y" in 2.1.2.  An action that is not admissible brings "Nothing happens." and valid=False.
Deliberately absent:
  1. a turn limit: the rollout has one (rollout.max_turns; the benchmark's is 50);
  2. verl-agent's reward of 10 for a win: reward.scale gives it;
  3. seeds: a game has no chance in it, so all copies of a task start equal.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

from hsg.environments.alfworld import games
from hsg.environments.alfworld.demonstrations import make_demonstrations
from hsg.environments.alfworld.pool import Pool, Worker
from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

LOADS_PER_STEP = 10
"""A load may take so many times as long as a step: it translates the game."""
EXPERT_TURNS = 50


class AlfWorldEpisode(Environment):
    """One episode; a worker process holds it from `start` to `close`."""

    def __init__(self, pool: Pool, game: str, step_seconds: float) -> None:
        self._pool, self._game, self._step_seconds = pool, game, step_seconds
        self._worker: Worker | None = None
        self._episode = -1
        self._closed = False
        self._commands: list[str] = []
        self._last: StepResult | None = None

    def start(self) -> str:
        if self._worker is not None or self._closed:
            raise RuntimeError("an episode can be started once; create another")
        self._worker, self._episode = self._pool.acquire(self._game)
        limit = LOADS_PER_STEP * self._step_seconds
        answer = self._worker.request("start", episode=self._episode, game=self._game, timeout=limit)
        self._commands = answer["commands"]
        return answer["text"]

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return replace(self._last, reward=0.0)
        # The engine knows lower-case commands only; verl-agent lowers the case too.
        answer = self._live().request("step", episode=self._episode, action=action.lower(), timeout=self._step_seconds)
        won = answer["won"]
        self._commands = answer["commands"]
        self._last = StepResult(
            observation=answer["text"],
            reward=float(won),
            done=won,
            success=won,
            score=float(won),
            valid=answer["valid"],
        )
        return self._last

    @property
    def outcome(self) -> float:
        return self._last.score if self._last is not None else 0.0

    def admissible_actions(self) -> list[str]:
        self._live()
        return list(self._commands)

    def _live(self) -> Worker:
        if self._worker is None or self._closed:
            raise RuntimeError("an episode must be started and not closed; call start() first, close() last")
        return self._worker

    def close(self) -> None:
        if not self._closed and self._worker is not None:
            self._pool.release(self._worker, self._episode)
        self._closed = True


class AlfWorldTaskSet(TaskSet):
    """The games of one data folder. Task.id is "<split>/<game>/<trial>", Task.kind the task type."""

    name = "alfworld"

    def __init__(
        self,
        root: Path,
        kinds: tuple[str, ...],
        max_games: int | None,
        expert: str,
        pool: Pool,
        step_seconds: float,
        cache: Path,
    ) -> None:
        self._root, self._kinds, self._max_games = root, kinds, max_games
        self._expert, self._pool, self._step_seconds, self._cache = expert, pool, step_seconds, cache
        self._tasks: dict[str, list[Task]] = {}
        self._lock = threading.Lock()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the folder has; "dev" and "test" are accepted for valid_seen and valid_unseen."""
        return tuple(split for split in games.SPLITS if (self._root / split).is_dir())

    def tasks(self, split: str) -> list[Task]:
        """One game of every type, then the next of every type, ...: any prefix is a balanced sample."""
        folder = games.ALIASES.get(split, split)
        if folder not in games.SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(games.SPLITS)} (dev = valid_seen, test = valid_unseen), got {split!r}; "
                "see TaskSet.splits"
            )
        with self._lock:
            if folder not in self._tasks:
                self._tasks[folder] = games.find_games(self._root, folder, self._kinds, self._max_games)
            return list(self._tasks[folder])

    def create(self, task: Task, seed: int) -> AlfWorldEpisode:
        return AlfWorldEpisode(self._pool, str(self._game(task)), self._step_seconds)

    def expert_actions(self, task: Task) -> list[str] | None:
        """What the chosen expert does, up to the win; None where it does not win within 50 turns. Cached on disk."""
        return self._expert_plays(task, self._expert)

    def _expert_plays(self, task: Task, expert: str) -> list[str] | None:
        game = self._game(task)
        digest = hashlib.sha256(game.read_bytes()).hexdigest()[:24]
        path = self._cache / "experts" / f"{expert}-{digest}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        worker, episode = self._pool.acquire(str(game))
        try:
            actions: list[str] | None = worker.request(
                "expert",
                kind=expert,
                game=str(game),
                turns=EXPERT_TURNS,
                timeout=LOADS_PER_STEP * self._step_seconds,
            )["actions"]
        finally:
            self._pool.release(worker, episode)
        games.write_whole(path, json.dumps(actions))
        return actions

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Searches that follow a strategy, made by playing: see demonstrations.py."""
        return make_demonstrations(
            task, seed, lambda: self.create(task, seed), lambda: self._expert_plays(task, "planner")
        )

    def _game(self, task: Task) -> Path:
        """The task's file, from its id, so that tasks travel between processes and folders by id alone."""
        path = self._root / task.id / "game.tw-pddl"
        if not path.is_file():
            raise ValueError(
                f"task.id must be '<split>/<game>/<trial>' below {str(self._root)!r}, got {task.id!r}; "
                "take tasks from TaskSet.tasks()"
            )
        return path

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return self._pool.pids

    def close(self) -> None:
        self._pool.close()
