"""Dynamic sampling by hand: who is replaced by whom, what is counted, when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import make_strategy, make_trajectory

from hsg.config.loading import make_config
from hsg.play.curriculum import iteration_tasks, spare_tasks
from hsg.play.refill import Dropped, Played, is_dead, refill
from hsg.protocol import Task
from hsg.types import Candidates, Judgment

DEAD, LIVE = (0.7, 0.7), (1.0, 0.0)


def task(name: str) -> Task:
    return Task(name, "train")


def play(
    places: list[tuple[int, str]], outcomes: list[tuple[float | None, ...]], *, strategies: bool = False
) -> Played:
    """Groups of two rollouts of two turns; each judgment says which place and rollout it is of."""
    trajectories = [
        make_trajectory(o, (2, 2), task=name) for (_, name), of in zip(places, outcomes, strict=True) for o in of
    ]
    judgments = [Judgment(f"{name} {m}") for _, name in places for m in range(2)]
    drawn = [Candidates((make_strategy(name),), (0,), 0.0, 0.0) for _, name in places] if strategies else None
    return Played([(p, task(name)) for p, name in places], drawn, trajectories, judgments)


def names(played: Played) -> list[str]:
    assert [t.task.id for t in played.trajectories[:: played.size]] == [t.id for _, t in played.places]
    return [t.id for _, t in played.places]


@pytest.mark.parametrize(
    ("outcomes", "dead"),
    [((0.7, 0.7), True), ((1.0, 0.0), False), ((0.7, None), True), ((None, None), True), ((0.0, 0.0, 1e-9), False)],
)
def test_dead_is_without_contrast(outcomes: tuple[float | None, ...], dead: bool) -> None:
    assert is_dead(outcomes) is dead


@pytest.mark.parametrize("strategies", [False, True])
def test_dead_groups_give_their_places_away(strategies: bool) -> None:
    """Places 1 and 2 are dead; of 3 places, round 0 offers spares 1 and 2, round 1 spare 3 + 2 to the one still dead."""
    first = play([(0, "a"), (1, "b"), (2, "c")], [LIVE, DEAD, DEAD], strategies=strategies)
    spare = [task(f"s{i}") for i in range(9)]
    asked = []

    def again(places: list[tuple[int, Task]]) -> Played:
        asked.append([(p, t.id) for p, t in places])
        outcomes = [DEAD if t.id == "s2" else LIVE for _, t in places]
        return play([(p, t.id) for p, t in places], outcomes, strategies=strategies)

    got, dropped = refill(first, spare, 3, 10, again)
    assert asked == [[(1, "s1"), (2, "s2")], [(2, "s5")]]
    assert names(got) == ["a", "s1", "s5"]
    assert [p for p, _ in got.places] == [0, 1, 2]
    assert [j.text for j in got.judgments] == [f"{n} {m}" for n in ("a", "s1", "s5") for m in range(2)]
    if strategies:
        assert got.candidates is not None
        assert [c.kept[0].text for c in got.candidates] == ["a", "s1", "s5"]
    assert dropped == Dropped(groups=3, turns=12, rounds=2)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_refills_end(rounds: int) -> None:
    """Nothing ever becomes live: so many rounds, then the dead group stays and the structure is whole."""
    first = play([(0, "a"), (1, "b")], [DEAD, DEAD])
    spare = [task(f"s{i}") for i in range(100)]
    got, dropped = refill(first, spare, 2, rounds, lambda p: play([(i, t.id) for i, t in p], [DEAD] * len(p)))
    assert (dropped.groups, dropped.rounds, len(got.trajectories)) == (2 * rounds, rounds, 4)


def test_refills_end_with_the_spare_tasks() -> None:
    first = play([(0, "a"), (1, "b")], [DEAD, DEAD])
    got, dropped = refill(first, [task("s0")], 2, 50, lambda p: play([(i, t.id) for i, t in p], [DEAD] * len(p)))
    assert names(got) == ["s0", "b"]
    assert dropped.groups == 1


def test_places_do_not_depend_on_other_places() -> None:
    """As two ranks see it: each holds one of the two places, and gets what it would get beside the other."""
    spare = [task(f"s{i}") for i in range(9)]

    def again(places: list[tuple[int, Task]]) -> Played:
        return play([(p, t.id) for p, t in places], [LIVE if t.id in ("s0", "s3") else DEAD for _, t in places])

    both, _ = refill(play([(0, "a"), (1, "b")], [DEAD, DEAD]), spare, 2, 5, again)
    alone = [refill(play([(p, n)], [DEAD]), spare, 2, 5, again)[0] for p, n in ((0, "a"), (1, "b"))]
    assert names(both) == [name for part in alone for name in names(part)] == ["s0", "s3"]
    empty, dropped = refill(Played([], None, [], []), spare, 2, 5, again)  # a rank without a task
    assert (empty.places, dropped) == ([], Dropped())


def test_spare_tasks_are_others_in_an_order_of_the_iteration() -> None:
    tasks = [task(f"t{i}") for i in range(20)]
    config = make_config({"num_tasks": 20 // 2})

    def order(iteration: int, **given: int) -> list[str]:
        return [t.id for t in spare_tasks(replace(config, **given), tasks, iteration)]

    taken = {t.id for t in iteration_tasks(config, tasks, 6)}
    assert sorted(order(6)) == sorted({t.id for t in tasks} - taken)
    assert order(6) == order(6)
    assert len({tuple(order(i)) for i in (6, 8)} | {tuple(order(6, seed=1))}) == 3
