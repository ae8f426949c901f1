"""Demonstrations: which area is searched first, told or not by anything that was read, and play that follows it.

    strategy   "Search the kitchen, then the seats, then the tables. Bring the ball to the sofa."
    play       go to sink, go to left counter, pick up ball, go to sofa, place on sofa

A thing whose place the instruction does not tell has to be searched.  A strategy is an order of the areas, and places within
an area come in any order.  One demonstration begins with each area, and a second one with the area that holds the thing: so a
pupil learns to follow a strategy whether it suits or not, has an inkling of where things are at home (where they are:
`tidy_share`), and reinforcement has something to sharpen; where each area came once, training for minutes found nothing.
Where nothing has to be searched, one demonstration does what the instruction says.

Deliberately absent: use of where things are, but for what the instruction tells and what was seen on the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hsg.environments.langr.expert import solve
from hsg.environments.langr.goals import Expression, holds
from hsg.environments.langr.words import AREAS, DOORS
from hsg.environments.langr.world import TURN_LIMIT, Episode, House
from hsg.protocol import Demonstration

STRATEGIES = (
    "Search {areas}. {errands}",
    "Look in {areas}. {errands}",
    "{errands} Search {areas}.",
)
TELLING = frozenset(
    {"42f1b012", "9a1dd6ee", "6e7f4383", "93b2ef41", "92bcf9b3"}
)  # kinds that tell where a thing stands
WASTED_SHARE = 1 / 3  # of the demonstrations contain one or two wasted turns


@dataclass(frozen=True)
class Errand:
    """One part of a plan: bring `thing` from `source` to `target`, find it, use a door, or go somewhere.

    source  None: the instruction does not tell it, and the thing has to be searched
    skill   of a door: "open" or "close"; else empty
    """

    thing: str | None = None
    source: str | None = None
    target: str | None = None
    skill: str = ""

    @property
    def searched(self) -> bool:
        return self.thing is not None and self.source is None

    def words(self) -> str:
        if self.skill:
            return f"{self.skill.capitalize()} the {self.target}."
        if self.thing is None:
            return f"Go to the {self.target}."
        if self.target is None:
            return f"Find the {self.thing}."
        if self.source is None:
            return f"Bring the {self.thing} to the {self.target}."
        return f"Take the {self.thing} from the {self.source} to the {self.target}."


def make_demonstrations(episode: Episode, name: str, allow_invalid: bool) -> list[Demonstration]:
    """Demonstrations of one episode, at most TURN_LIMIT turns each; [] where the oracle knows no way."""
    errands = errands_of(episode)
    if errands is None:
        return []
    rng = random.Random(f"demonstrations/{name}")
    areas = [area for area, places in AREAS.items() if any(place in episode.places for place in places)]
    orders = [areas]
    if any(errand.searched for errand in errands):
        firsts = [*areas, *(area for area in areas if _suits(area, errands, episode))]
        orders = [[first, *rng.sample([a for a in areas if a != first], len(areas) - 1)] for first in firsts]
        rng.shuffle(orders)
    return [_demonstrate(episode, errands, order, rng, allow_invalid) for order in orders]


def errands_of(episode: Episode) -> list[Errand] | None:
    """The oracle's plan as errands, without the places that the instruction does not tell."""
    plan = solve(episode)
    if plan is None:
        return None
    told = episode.instruct_id.split("_")[0] in TELLING
    errands: list[Errand] = []
    robot = thing = source = None
    for skill, place in plan:
        if skill == "go to":
            robot = place
        elif skill == "pick up":
            thing, source = place, robot
        elif skill == "place on":
            errands.append(Errand(thing, source if told else None, place))
            thing = None
        else:
            errands.append(Errand(target=place, skill=skill))
    if plan[-1][0] == "go to":
        sought = _sought(episode)
        errands.append(Errand(thing=sought) if sought else Errand(target=robot))
    # What depends on a door has to be looked at.
    told_doors = [place for place in DOORS if place in episode.instruction.lower()]
    doors = [place for place in told_doors if not any(errand.target == place for errand in errands)]
    return [*(Errand(target=place) for place in doors), *errands]


def _sought(episode: Episode) -> str | None:
    """The category of a thing that the robot has to stand by, and no more; None where the goal is another one."""
    goal = episode.goal
    if isinstance(goal, Expression) and goal.inputs and goal.parts == (("robot_at", goal.inputs[0][0]),):
        return goal.inputs[0][1]
    return None


def _suits(area: str, errands: Sequence[Errand], episode: Episode) -> bool:
    """Whether the area has all that is searched."""
    there = {category for _, category, place in episode.things if place in AREAS[area]}
    return all(errand.thing in there for errand in errands if errand.searched)


class _Player:
    """Plays errands in the house, remembering what it saw."""

    def __init__(self, episode: Episode, order: Sequence[str], rng: random.Random) -> None:
        self.house, self._goal = House(episode), episode.goal
        self._route = [
            (area, place)
            for area in order
            for place in rng.sample(AREAS[area], len(AREAS[area]))
            if place in episode.places
        ]
        self._saw: list[tuple[str, str]] = []  # category and place of what stands where the robot has been
        self.actions: list[tuple[str, str]] = []
        self.turn_strategies: list[str] = []

    @property
    def over(self) -> bool:
        return bool(self.actions) and holds(self._goal, self.house)

    def do(self, skill: str, target: str, strategy: str) -> None:
        self.house.do(skill, target)
        self.actions.append((skill, target))
        self.turn_strategies.append(strategy)
        here = self.house.robot
        if here is not None:
            self._saw = [(category, place) for category, place in self._saw if place != here]
            self._saw += [(self.house.category[thing], here) for thing in self.house.seen()]

    def carry_out(self, errand: Errand) -> bool:
        """Whether the errand could be done."""
        if errand.thing is None:
            assert errand.target is not None
            self._go(errand.target, errand.words())
            if errand.skill and self.house.refusal(errand.skill, errand.target) is None:
                self.do(errand.skill, errand.target, errand.words())
            return True
        place = errand.source or self._where(errand) or self._search(errand)
        if place is None:
            return False
        take = f"Take the {errand.thing} from the {place}."
        self._go(place, take)
        if errand.target is None:
            return True
        if self.house.refusal("pick up", errand.thing) is not None:
            return False
        self.do("pick up", errand.thing, take)
        bring = f"Bring the {errand.thing} to the {errand.target}."
        self._go(errand.target, bring)
        self.do("place on", errand.target, bring)
        return True

    def _go(self, place: str, strategy: str) -> None:
        if self.house.robot != place:
            self.do("go to", place, strategy)

    def _where(self, errand: Errand) -> str | None:
        """Where such a thing was seen that is not yet where it should be."""
        found = (place for category, place in self._saw if category == errand.thing and place != errand.target)
        return next(found, None)

    def _search(self, errand: Errand) -> str | None:
        while self._route and not self.over:
            area, place = self._route.pop(0)
            if self.house.robot != place:
                self.do("go to", place, f"Search the {area} for the {errand.thing}.")
            if found := self._where(errand):
                return found
        return None


def _demonstrate(
    episode: Episode, errands: Sequence[Errand], order: Sequence[str], rng: random.Random, allow_invalid: bool
) -> Demonstration:
    player = _Player(episode, order, rng)
    for errand in errands:
        if player.over or not player.carry_out(errand):
            break
    words = " ".join(errand.words() for errand in errands)
    if any(errand.searched for errand in errands):
        areas = ", then ".join(f"the {area}" for area in order)
        words = rng.choice(STRATEGIES).format(areas=areas, errands=words)
    actions = [f"{skill} {target}" for skill, target in player.actions]
    strategies = list(player.turn_strategies)
    wasted: list[int] = []
    if rng.random() < WASTED_SHARE:
        for turn, action in sorted(_detours(player, episode, rng, allow_invalid), reverse=True):
            actions.insert(turn, action)
            strategies.insert(turn, strategies[turn])
            wasted = [turn, *(place + 1 for place in wasted)]
    return Demonstration(
        strategy=words,
        actions=tuple(actions[:TURN_LIMIT]),
        wasted=tuple(turn for turn in wasted if turn < TURN_LIMIT),
        fits=_suits(order[0], errands, episode),
        turn_strategies=tuple(strategies[:TURN_LIMIT]),
    )


def _detours(player: _Player, episode: Episode, rng: random.Random, allow_invalid: bool) -> Iterator[tuple[int, str]]:
    """One or two turns that lead nowhere: a walk to a door before another walk, or a second thing to pick up."""
    walks = [turn for turn, (skill, _) in enumerate(player.actions) if skill == "go to"]
    places = [turn for turn, (skill, _) in enumerate(player.actions) if skill == "place on"]
    doors = [place for place in episode.places if place in DOORS and place not in episode.instruction.lower()]
    for turn in rng.sample(walks, min(len(walks), rng.randint(1, 2))):
        if doors:
            yield turn, f"go to {rng.choice(doors)}"
    if places and allow_invalid and rng.random() < 0.3:
        yield rng.choice(places), f"pick up {rng.choice(episode.things)[1]}"  # it already holds something
