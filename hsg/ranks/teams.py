"""Who plays what of an iteration: whole tasks where there are enough of them, else parts of one task's rollouts.

    P >= W    a rank owns whole tasks, and nothing is joined
    P < W     rank r is in the team of task r * P // W, whose members play consecutive parts of its N x M rollouts

    first observation   that of the first member whose environments start         -> `agreed`
    candidates          drawn by the lead, the first member                        -> `join`, on every member
    trajectories        played in parts, joined after the rollout                  -> `join`: credit sees whole groups
    rows                each member trains those of its own rollouts; the lead alone logs and counts what is whole

So an iteration of two tasks keeps eight ranks busy.  Ranks keep their order, so that joined parts are row-major (N, M) and
the rows of all ranks stand as one rank would have them.  Deliberately absent: a rank with parts of two tasks (where P does
not divide W some teams are larger by one rank), process groups of teams (P < W groups of records reach every rank, which
keeps its team's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hsg.protocol import Task
from hsg.ranks.distributed import Distributed

T = TypeVar("T")


class Team:
    """This rank's part of an iteration.

    places        (p, task) of the tasks it plays, one where they are split
    begin, end    which of the N*M rollouts of each, row-major
    """

    def __init__(self, distributed: Distributed, tasks: Sequence[Task], size: int) -> None:
        self._distributed = distributed
        numbered = list(enumerate(tasks))
        self.is_split = len(tasks) < distributed.world_size
        if self.is_split:
            place_of = [r * len(tasks) // distributed.world_size for r in range(distributed.world_size)]
            place = place_of[distributed.rank]
            member, num_members = distributed.rank - place_of.index(place), place_of.count(place)
            self.places = [numbered[place]]
            self.begin, self.end = (round(i * size / num_members) for i in (member, member + 1))
            self.leads = member == 0
        else:
            self.places, self.begin, self.end, self.leads = distributed.share(numbered), 0, size, True

    def owns(self, rollout: int) -> bool:
        """Whether this rank plays that one of a task's N*M rollouts."""
        return self.begin <= rollout < self.end

    def join(self, part: Sequence[T]) -> list[T]:
        """The members' lists end to end, on each of them. Collective where tasks are split, of all teams."""
        if not self.is_split:
            return list(part)
        place = self.places[0][0]  # that of the iteration: a refill may bring it another task
        return [item for p, items in self._distributed.gather([(place, list(part))]) if p == place for item in items]

    def agreed(self, values: Sequence[T | None]) -> list[T | None]:
        """For each of the rank's places the first value that any member has. Collective where tasks are split.

        A refill may leave a team without a place to play: it takes part all the same.
        """
        if not self.is_split:
            return list(values)
        of_members = self.join([values])  # one list of each
        return [next((v for v in held if v is not None), None) for held in zip(*of_members, strict=True)]

    def anywhere(self, wanted: bool) -> bool:
        """Whether any rank wants it. Collective."""
        return self._distributed.max(float(wanted)) > 0
