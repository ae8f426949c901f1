"""Dynamic sampling of DAPO (arXiv 2503.14476, eq. 11): tasks without any contrast give their place to other tasks.

    groups (P) ──> outcomes all equal? ── no ──> keep
                          └─ yes, and a task is spare ──> play that one instead, at most `rollout.max_refills` rounds

A task keeps its place p and brings all its N x M rollouts along, so the structure (P, N, M) never changes.  What is dropped
is counted: its tokens and its turns were paid for.  After the last round, or without a spare task, the dead group stays.
Deliberately absent: waiting until every place is live (it may never come), looking at other ranks' places (but every rank
comes along to each round, with nothing to play where none of its own is dead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hsg.protocol import Task
from hsg.types import Candidates, Judgment, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Played:
    """The groups of some places, as one rollout brought them."""

    places: list[tuple[int, Task]]  # which of the P places, and the task that stands there
    candidates: list[Candidates] | None  # one per place
    trajectories: list[Trajectory]  # N*M per place, row-major
    judgments: list[Judgment]
    draws: Sequence[Any] = ()  # what was drawn to reflect on: as many per place, or none

    @property
    def size(self) -> int:
        """N*M."""
        return len(self.trajectories) // max(1, len(self.places))

    def group(self, i: int) -> list[Trajectory]:
        return _part(self.trajectories, i, len(self.places))


def _part(items: Sequence[T], i: int, num_parts: int) -> list[T]:
    """The i-th of equal parts."""
    size = len(items) // max(1, num_parts)
    return list(items[i * size : (i + 1) * size])


def nest(flat: Sequence[T], num_strategies: int, num_rollouts: int) -> list[list[list[T]]]:
    """A row-major list of P*N*M records as nested lists (P, N, M)."""
    groups = [list(flat[i : i + num_rollouts]) for i in range(0, len(flat), num_rollouts)]
    return [groups[i : i + num_strategies] for i in range(0, len(groups), num_strategies)]


@dataclass
class Dropped:
    """What refills cost: groups that were played and not trained on, and their turns."""

    groups: int = 0
    turns: int = 0
    rounds: int = 0


def is_dead(outcomes: Sequence[float | None]) -> bool:
    """Whether the outcomes of a task's valid trajectories are all equal, or there is at most one; None: not valid."""
    return len({outcome for outcome in outcomes if outcome is not None}) <= 1


def refill(
    played: Played,
    spare: Sequence[Task],
    num_places: int,
    max_refills: int,
    play: Callable[[list[tuple[int, Task]]], Played],
    *,
    join: Callable[[list[Any]], list[Any]] = list,
    anywhere: Callable[[bool], bool] = bool,
) -> tuple[Played, Dropped]:
    """Replace dead groups, at most `max_refills` times each, by those of spare tasks. `join`, `anywhere`: those of a `Team`.

    In round r place p may have spare task r * num_places + p, so that no two places and no two rounds take the same one,
    and what one place gets depends on no other.
    """
    dropped = Dropped()
    for number in range(max_refills):
        whole = [join([(t.outcome, len(t.turns)) for t in played.group(i)]) for i in range(len(played.places))]
        dead = [i for i, group in enumerate(whole) if is_dead([outcome for outcome, _ in group])]
        wanted = {i: number * num_places + played.places[i][0] for i in dead}
        wanted = {i: at for i, at in wanted.items() if at < len(spare)}
        if not anywhere(bool(wanted)):
            break
        fresh = play([(played.places[i][0], spare[at]) for i, at in wanted.items()])
        dropped.rounds += 1  # every rank comes along
        dropped.groups += len(wanted)
        dropped.turns += sum(turns for i in wanted for _, turns in whole[i])
        played = _replaced(played, dict(zip(wanted, range(len(wanted)), strict=True)), fresh)
    return played, dropped


def _replaced(played: Played, by: dict[int, int], fresh: Played) -> Played:
    """`played` with its i-th group replaced by the by[i]-th of `fresh`."""
    sources = [(fresh, by[i]) if i in by else (played, i) for i in range(len(played.places))]

    def joined(name: str) -> list[Any]:
        return [item for one, i in sources for item in _part(getattr(one, name), i, len(one.places))]

    candidates = None if played.candidates is None else joined("candidates")
    return Played(joined("places"), candidates, *(joined(name) for name in ("trajectories", "judgments", "draws")))
