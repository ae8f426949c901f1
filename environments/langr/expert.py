"""The oracle: sees the whole house, takes the way to the goal with the fewest actions, and has tried it before it says so.

    goal -> ways in which it comes true (goals.ways) -> what is not so yet -> skills -> played in a copy of the house

Every wish is served by one errand: a thing is fetched and brought, a door is opened or closed, the robot goes and stands.
Deliberately absent: search over actions; errands do not get into each other's way in any of upstream's kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hsg.environments.langr.goals import LYING, STANDING, Wish, holds, ways
from hsg.environments.langr.words import DOORS, DRAWERS, SURFACES
from hsg.environments.langr.world import TURN_LIMIT, Episode, House

Action = tuple[str, str]  # a skill and its target
MAX_WAYS = 200


def solve(episode: Episode) -> list[Action] | None:
    """The shortest plan that was found to reach the goal within TURN_LIMIT actions; None where there is none."""
    house = House(episode)
    plans = []
    for number, wishes in enumerate(ways(episode.goal, house)):
        if number == MAX_WAYS:
            break
        plan = list(_plan(house, wishes))
        # A goal that is true from the start is noticed after an action: any that leaves it true.
        plans.append(plan or [("go to", _harmless(house, wishes))])
    for plan in sorted(plans, key=len):
        if len(plan) <= TURN_LIMIT and reaches_goal(episode, plan):
            return plan
    return None


def reaches_goal(episode: Episode, plan: Sequence[Action]) -> bool:
    """Whether every action is possible in its turn and the goal is true after the last."""
    house = House(episode)
    for skill, target in plan:
        if house.refusal(skill, target) is not None:
            return False
        house.do(skill, target)
    return holds(episode.goal, house)


def _plan(house: House, wishes: Sequence[Wish]) -> Iterator[Action]:
    """What is not so yet, errand by errand: first what lasts, then what to hold and where to stand in the end."""
    robot: str | None = None
    opened = set(house.opened)
    missing = [(wanted, predicate) for wanted, predicate in wishes if house.is_true(predicate) != wanted]

    def go(place: str) -> Iterator[Action]:
        nonlocal robot
        if robot != place:
            robot = place
            yield ("go to", place)

    def door(place: str, skill: str) -> Iterator[Action]:
        yield from go(place)
        yield (skill, place)
        (opened.add if skill == "open" else opened.discard)(place)

    def fetch(thing: str) -> Iterator[Action]:
        place = house.place_of[thing]
        assert place is not None  # nothing is held when an episode begins
        if place in DRAWERS and place not in opened:
            yield from door(place, "open")
        yield from go(place)
        yield ("pick up", house.category[thing])

    for wanted, (name, *arguments) in missing:
        if name in LYING:
            thing, place = arguments
            target = place if wanted else next(p for p in (*SURFACES, "chair") if p != place and p in house.places)
            yield from fetch(thing)
            yield from go(target)
            yield ("place on", target)
        elif name.startswith(("opened_", "closed_")):
            yield from door(arguments[0], "open" if wanted == name.startswith("opened_") else "close")
    for wanted, (name, *arguments) in missing:
        if wanted and name == "holding":
            yield from fetch(arguments[0])
    for wanted, (name, *arguments) in missing:
        if wanted and name in STANDING:
            yield from go(house.place_of.get(arguments[0]) or arguments[0])


def _harmless(house: House, wishes: Sequence[Wish]) -> str:
    wished = {argument for _, (_, *arguments) in wishes for argument in arguments}
    return next((p for p in house.places if p in wished), next(p for p in house.places if p not in DOORS))
