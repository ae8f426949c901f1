"""Teams by arithmetic: every rollout is played once, in the order of ranks, and each task has one lead."""

from __future__ import annotations

from typing import Any

import pytest

from hsg.protocol import Task
from hsg.ranks.distributed import Distributed
from hsg.ranks.teams import Team


class Rank(Distributed):
    """One of several, without the others; what they would say is put in by hand."""

    def __init__(self, rank: int, world_size: int, others: dict[int, list[Any]] | None = None) -> None:
        self.rank, self.world_size, self.others = rank, world_size, others or {}

    def gather(self, items: Any) -> list[Any]:
        return [x for r in range(self.world_size) for x in (items if r == self.rank else self.others.get(r, []))]


def tasks(count: int) -> list[Task]:
    return [Task(f"t{p}", "train") for p in range(count)]


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_rollout_is_played_once_in_the_order_of_ranks(num_tasks: int, world_size: int, size: int) -> None:
    teams = [Team(Rank(r, world_size), tasks(num_tasks), size) for r in range(world_size)]
    played = [(p, i) for team in teams for p, _ in team.places for i in range(size) if team.owns(i)]
    assert played == [(p, i) for p in range(num_tasks) for i in range(size)]
    assert [p for team in teams if team.leads for p, _ in team.places] == list(range(num_tasks))
    assert {team.is_split for team in teams} == {num_tasks < world_size}
    loads = [len(team.places) * (team.end - team.begin) for team in teams]
    if num_tasks % world_size == 0 or (world_size % num_tasks == 0 and size * num_tasks % world_size == 0):
        assert len(set(loads)) == 1


def test_whole_tasks_ask_nobody() -> None:
    class Alone(Rank):
        def gather(self, items: Any) -> list[Any]:
            raise AssertionError("no rank has to be asked")

    team = Team(Alone(0, 2), tasks(3), 4)
    assert [p for p, _ in team.places] == [0, 1]
    assert team.join([1, 2]) == [1, 2]
    assert team.agreed(["a", None]) == ["a", None]


def test_a_team_joins_its_own_parts_alone() -> None:
    """Ranks 0 and 1 share task 0, rank 2 has task 1; the lead's environment did not start."""
    others = {0: [(0, [[None]])], 2: [(1, [["other world"]])]}
    team = Team(Rank(1, 3, others), tasks(2), 4)
    assert ([p for p, _ in team.places], team.begin, team.end, team.leads) == ([0], 2, 4, False)
    assert team.agreed(["world"]) == ["world"]
    assert team.agreed([None]) == [None]
    assert team.join([7, 8]) == [[None], 7, 8]


def test_a_team_without_a_place_takes_part() -> None:
    """A refill that leaves this team nothing to play: one exchange all the same, or the others would wait for ever."""
    asked = []

    class Counting(Rank):
        def gather(self, items: Any) -> list[Any]:
            asked.append(items)
            return super().gather(items)

    team = Team(Counting(1, 3, {0: [(0, [[]])]}), tasks(2), 4)
    assert team.agreed([]) == []
    assert len(asked) == 1
