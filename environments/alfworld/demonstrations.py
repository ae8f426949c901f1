"""Demonstrations for the warm start: a strategy names the places to search, and the play does just that.

    strategy     "Search every drawer, then every shelf for the pen. Put it in the desk."
    play         go to drawer 1, open drawer 1, go to drawer 2, open drawer 2, take pen 1 from drawer 2, go to desk 1, ...

The play uses only what the game has said so far.  Three in five strategies start where the object is (the planner tells),
the others do not and are followed all the same, so a pupil learns to follow; which places suit which object is left to
reinforcement.  Commands are taken from the admissible ones, so they are in the language of the game.
Deliberately absent: games whose task is not one of the templates (the warm start makes strategies out of their expert
actions), several objects in one hand, closing doors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hsg.protocol import Demonstration, Environment, Task

MAX_TURNS = 50
NUM_DEMONSTRATIONS, NUM_SUITED = 5, 3
WASTED_SHARE = 1 / 3
IDLE = ("look", "inventory")
TASK = re.compile(
    r"Your task is to: (?:"
    r"put (?:a|some|two)(?: clean| hot| cool)? (\w+) (?:in|on) (\w+)|"
    r"(?:clean|heat|cool) some (\w+) and put it in (\w+)|"
    r"find two (\w+) and put them in (\w+)|"
    r"(?:look at|examine the) (\w+) (?:under|with) the (\w+))\."
)
ITEM = re.compile(r"\ba ([a-z]+ \d+)")
SEARCH = (
    "Search every {first}, then every {second} for the {obj}.",
    "Look for the {obj} in every {first}, then in every {second}.",
)
TOOLS = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heat", "microwave"),
    "pick_cool_then_place_in_recep": ("cool", "fridge"),
}
LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"


@dataclass(frozen=True)
class Errand:
    """What a task asks for, read from its sentence: `target` is a kind of receptacle, or the lamp."""

    kind: str
    obj: str
    target: str

    @classmethod
    def read(cls, kind: str, first_observation: str) -> Errand | None:
        """The errand, or None where the sentence is not one of the templates."""
        match = TASK.search(first_observation)
        if match is None:
            return None
        obj, target = filter(None, match.groups())
        return cls(kind, obj, target)

    @property
    def end(self) -> str:
        """The second half of a strategy."""
        if self.kind == LOOK:
            return f"Look at it under the {self.target}."
        if self.kind == TWO:
            return f"Put two of them in the {self.target}."
        if self.kind in TOOLS:
            verb, tool = TOOLS[self.kind]
            return f"{verb.capitalize()} it with the {tool}, then put it in the {self.target}."
        return f"Put it in the {self.target}."


class _Stuck(Exception):
    """The play cannot go on: the turns are used up, or nothing is left to search."""


class Search:
    """One episode played by the rule; `actions` is the play so far."""

    def __init__(self, environment: Environment, errand: Errand, order: Sequence[str], first_observation: str) -> None:
        self._environment, self._errand = environment, errand
        places = sorted(places_in(first_observation), key=lambda name: int(name.split()[1]))
        rest = dict.fromkeys(kind_of(place) for place in places_in(first_observation))
        kinds = list(dict.fromkeys([*order, *rest]))
        self._places = [place for kind in kinds for place in places if kind_of(place) == kind]
        self._unsearched = iter(self._places)
        self._seen: dict[str, str] = {}  # thing -> place
        self._here = ""
        self.actions: list[str] = []
        self.won = False

    def play(self) -> None:
        """Do the errand. Ends when it is won, stuck or MAX_TURNS long."""
        try:
            for _ in range(2 if self._errand.kind == TWO else 1):
                self._one()
        except _Stuck:
            pass

    def _one(self) -> None:
        errand = self._errand
        thing = self._find(errand.obj)
        place = self._seen.pop(thing)
        self._go(place)
        self._act(f"take {thing} from {place}")
        if errand.kind == LOOK:
            lamp = self._find(errand.target)
            self._go(self._seen[lamp])
            self._act(f"use {lamp}")
            return
        if errand.kind in TOOLS:
            verb, tool = TOOLS[errand.kind]
            self._go(self._place_of(tool))
            self._act(f"{verb} {thing} with {self._here}")
        self._go(self._place_of(errand.target))
        # "put X in/on Y" or "move X to Y", as the game says it.
        verbs = (f"put {thing} ", f"move {thing} ")
        puts = [command for command in self._commands() if command.startswith(verbs) and command.endswith(self._here)]
        self._act(puts[0] if puts else "look")

    def _find(self, kind: str) -> str:
        """A thing of this kind that has been seen; searches on until one is."""
        while True:
            for thing in self._seen:
                if kind_of(thing) == kind:
                    return thing
            place = next((p for p in self._unsearched if kind_of(p) != self._errand.target), None)
            if place is None:
                raise _Stuck
            self._go(place)

    def _go(self, place: str) -> None:
        if place == self._here:
            return
        text = self._act(f"go to {place}")
        self._here = place
        if f"{place} is closed" in text:
            text = self._act(f"open {place}")
        _, _, seen = text.partition("you see ")
        self._seen.update({thing: place for thing in ITEM.findall(seen)})

    def _place_of(self, kind: str) -> str:
        place = next((place for place in self._places if kind_of(place) == kind), None)
        if place is None:
            raise _Stuck
        return place

    def _commands(self) -> list[str]:
        return self._environment.admissible_actions() or []

    def _act(self, action: str) -> str:
        if len(self.actions) >= MAX_TURNS or self.won:
            raise _Stuck
        self.actions.append(action)
        result = self._environment.step(action)
        self.won = result.success
        return result.observation


def places_in(first_observation: str) -> list[str]:
    """The receptacles that the introduction lists, in its order."""
    listed = first_observation.partition("you see ")[2].partition("Your task is to:")[0]
    return ITEM.findall(listed)


def kind_of(name: str) -> str:
    """ "drawer 3" -> "drawer"."""
    return name.split()[0]


def make_demonstrations(
    task: Task, seed: int, create: Callable[[], Environment], expert: Callable[[], list[str] | None]
) -> list[Demonstration]:
    """Five demonstrations, three of which begin where the object is; [] where the task's sentence is none of the templates."""
    rng = random.Random(f"{task.id}/{seed}")
    scout = create()
    try:
        first = scout.start()
    finally:
        scout.close()
    errand = Errand.read(task.kind, first)
    if errand is None:
        return []
    made = []
    for order, fits in _orders(rng, errand, first, expert() or []):
        environment = create()
        try:
            search = Search(environment, errand, order, environment.start())
            search.play()
        finally:
            environment.close()
        first_kind, second_kind = order
        text = rng.choice(SEARCH).format(first=first_kind, second=second_kind, obj=errand.obj)
        text += " " + errand.end
        made.append(_with_waste(rng, text, search.actions, fits))
    rng.shuffle(made)
    return made


def _orders(
    rng: random.Random, errand: Errand, first: str, plan: Sequence[str]
) -> Iterator[tuple[tuple[str, str], bool]]:
    """(kinds of place to search first, whether the object is in one of the first kind)."""
    kinds = [kind for kind in dict.fromkeys(map(kind_of, places_in(first))) if kind != errand.target]
    found = [kind_of(action.rpartition(" from ")[2]) for action in plan if action.startswith("take ")]
    right = [kind for kind in found[:1] if kind in kinds]
    wrong = [kind for kind in kinds if kind not in found]
    lamp = [kind_of(place) for place in _destinations(plan)[1:] if errand.kind == LOOK and kind_of(place) in kinds]
    for index in range(NUM_DEMONSTRATIONS):
        fits = bool(right) and (index < NUM_SUITED or not wrong)
        one = right[0] if fits else rng.choice(wrong or kinds)
        others = [kind for kind in kinds if kind != one] or [one]
        if fits and lamp[-1:] != [one]:
            others = lamp[-1:] or others  # the lamp has to be found too
        yield (one, rng.choice(others)), fits


def _destinations(plan: Sequence[str]) -> list[str]:
    return [action.removeprefix("go to ") for action in plan if action.startswith("go to ")]


def _with_waste(rng: random.Random, strategy: str, actions: Sequence[str], fits: bool) -> Demonstration:
    """The play, in some demonstrations with one or two idle turns put in before its last action."""
    mixed = [(action, False) for action in actions]
    if rng.random() < WASTED_SHARE:
        for _ in range(rng.choice((1, 1, 2))):
            mixed.insert(rng.randrange(len(mixed)), (rng.choice(IDLE), True))
    wasted = tuple(turn for turn, (_, idle) in enumerate(mixed) if idle)
    return Demonstration(strategy, tuple(action for action, _ in mixed), wasted, fits)
