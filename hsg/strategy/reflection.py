"""Reflection (SGE, arXiv 2603.02045): some rollouts begin with the strategies of an earlier attempt at the same task.

    u ~ U(0, 1) per rollout     u < p_bad          a failed attempt: criticise it, then do better
                                u < p_bad + p_good  a successful one: be inspired
                                else, or where the buffer is empty: the plain prompt

    good, bad   first in, first out, `capacity` attempts each, one pair per task (or one for all)

The prompt that was used is part of the row, so the gradient conditions on it.  Training only: an evaluation never draws.
Deliberately absent: attempts chosen by how good they were (the draw is uniform), attempts of broken environments, advice
written by another model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hsg.config.options import ReflectionConfig
from hsg.engine.seeds import make_generator
from hsg.types import Attempt, Reflection, Trajectory

EVERY_TASK = ""
"""The one key of `scope: global`; no task is named so."""


@dataclass(frozen=True)
class Draw:
    """What one rollout (or, for strategies of whole episodes, one task) begins with.

    asked  bad or good where the draw wanted a reflection, plain where it wanted none
    shown  None: the plain prompt, also where the buffer that was asked had nothing
    """

    asked: str
    shown: Reflection | None


class ReflectionBuffers:
    """Good and bad attempts. Every rank holds all of them: attempts of all ranks are added in the order of the tasks."""

    def __init__(self, config: ReflectionConfig) -> None:
        self.config = config
        self._buffers: dict[tuple[str, bool], deque[Attempt]] = {}

    @property
    def enabled(self) -> bool:
        return self.config.p_bad + self.config.p_good > 0

    def draw(self, task_id: str, key: Sequence[object]) -> Draw:
        """What to show before a rollout of this task; `key` alone decides the random numbers."""
        u, place = torch.rand(2, generator=make_generator(*key, "reflection"), dtype=torch.float64).tolist()
        if u >= self.config.p_bad + self.config.p_good:
            return Draw("plain", None)
        success = u >= self.config.p_bad
        held = self._buffers.get((self._scope(task_id), success), ())
        shown = Reflection(held[int(place * len(held))], success) if held else None
        return Draw("good" if success else "bad", shown)

    def add(self, task_id: str, attempts: Iterable[tuple[Attempt, bool]]) -> None:
        """Take in attempts with their success, in the order in which they were played; the oldest make room."""
        for attempt, success in attempts:
            key = (self._scope(task_id), success)
            self._buffers.setdefault(key, deque(maxlen=self.config.capacity)).append(attempt)

    def _scope(self, task_id: str) -> str:
        return task_id if self.config.scope == "task" else EVERY_TASK

    def sizes(self) -> dict[str, int]:
        """Attempts held, all tasks together."""
        return {
            name: sum(len(held) for (_, success), held in self._buffers.items() if success == good)
            for name, good in (("good", True), ("bad", False))
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint, oldest attempts first."""
        return {
            "buffers": [
                {"scope": scope, "success": success, "attempts": [asdict(attempt) for attempt in held]}
                for (scope, success), held in self._buffers.items()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to what `state_dict` gave, in the same order."""
        self._buffers = {}
        for item in state["buffers"]:
            held = [Attempt(tuple(a["strategies"]), a["feedback"]) for a in item["attempts"]]
            self._buffers[item["scope"], item["success"]] = deque(held, maxlen=self.config.capacity)


def attempt_of(trajectory: Trajectory) -> Attempt | None:
    """What can be reflected on: the strategies that were followed, of every turn or of the episode; None: there are none.

    Its feedback is the environment's; where that says nothing of its own, what the last action brought.
    """
    if not trajectory.valid:
        return None
    texts = [trajectory.strategy] if trajectory.strategy is not None else [turn.strategy for turn in trajectory.turns]
    strategies = tuple(text for text in texts if text)
    told = trajectory.feedback if trajectory.feedback is not None else trajectory.final_observation
    return Attempt(strategies, told or None) if strategies else None
