"""The house: where things are, what the robot holds, five skills with their preconditions; no text of an episode.

    go to P        always                                            the robot stands at P
    pick up C      hands empty, a C stands where the robot is,       it is held
                   not within a closed drawer
    place on P     something held, P reached                         it stands on P
    open P         P reached and closed                              P is open
    close P        P reached and open                                P is closed

P is reached where the robot stands at it or beside it (words.BESIDE).  What can be picked is what stands at the very place:
upstream asks for 2 m to a place and 1.5 m to a thing, and neither meshes nor metres are in the text form.  A closed fridge
hides what is in it and does not lock it, as upstream.

Deliberately absent: arms, collisions, capacity (upstream's are those of its sampler alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsg.environments.langr.goals import LYING, STANDING, Expression, Predicate
from hsg.environments.langr.words import BESIDE, DOORS, DRAWERS, NO_SPACE

TURN_LIMIT = 32  # actions of an episode, upstream's


@dataclass(frozen=True)
class Episode:
    """One episode before it begins.

    places    in the house, in words
    things    (id, category, place) each
    opened    doors and drawers that stand open
    goal, subgoals   as goals.py reads them; a subgoal is reached when all of it is true at once
    """

    instruction: str
    instruct_id: str
    places: tuple[str, ...]
    things: tuple[tuple[str, str, str], ...]
    opened: frozenset[str]
    goal: Expression | Predicate
    subgoals: tuple[tuple[Predicate, ...], ...] = ()


class House:
    """The state of one episode; `do` changes it."""

    def __init__(self, episode: Episode) -> None:
        self.places = episode.places
        self.doors = tuple(place for place in DOORS if place in episode.places)
        self.category = {thing: category for thing, category, _ in episode.things}
        self.place_of: dict[str, str | None] = {thing: place for thing, _, place in episode.things}  # None: held
        self._of_category: dict[str, list[str]] = {}
        for thing, category, _ in episode.things:
            self._of_category.setdefault(category, []).append(thing)
        self.opened = set(episode.opened)
        self.robot: str | None = None  # in the middle of the house, at no place
        self.held: str | None = None

    # ------------------------------------------------------------------ what is so

    def things_of(self, category: str) -> Sequence[str]:
        return self._of_category.get(category, ())

    def reaches(self, place: str | None) -> bool:
        """Whether the robot stands at a place or beside it."""
        return self.robot is not None and (place == self.robot or frozenset((place, self.robot)) in BESIDE)

    def at(self, place: str) -> list[str]:
        """Things at a place, in fixed order."""
        return [thing for thing, where in self.place_of.items() if where == place]

    def seen(self) -> list[str]:
        """Things that the robot sees: those where it stands, but for what is behind a closed door."""
        if self.robot is None or (self.robot in self.doors and self.robot not in self.opened):
            return []
        return self.at(self.robot)

    def is_true(self, predicate: Predicate) -> bool:
        name, *arguments = predicate
        if name in LYING:
            return self.place_of.get(arguments[0]) == arguments[1]
        if name == "holding":
            return self.held == arguments[0]
        if name == "not_holding":
            return self.held is None
        if name in STANDING:
            thing = arguments[0]
            if thing not in self.place_of:
                return self.reaches(thing)
            return self.held == thing or self.reaches(self.place_of[thing])
        if name.startswith("opened_"):
            return arguments[0] in self.opened
        return arguments[0] not in self.opened  # closed_fridge, closed_cab

    def reached(self, subgoal: Sequence[Predicate]) -> bool:
        """Whether a subgoal is true.

        Two things that upstream measures in metres are read loosely: of the places and things that a subgoal has within
        the robot's reach one is enough, and what is held need not also lie over the place that it is held above.
        """
        held = {p[1] for p in subgoal if p[0] == "holding"}
        standing = [p for p in subgoal if p[0] in STANDING]
        others = [p for p in subgoal if p[0] not in STANDING and not (p[0] == "on_top" and p[1] in held)]
        return all(map(self.is_true, others)) and (not standing or any(map(self.is_true, standing)))

    # ------------------------------------------------------------------ what can be done

    def refusal(self, skill: str, target: str) -> str | None:
        """Why a skill cannot be carried out now, as a clause; None where it can."""
        if skill == "go to":
            return None if target in self.places else f"there is no {target}"
        if skill == "pick up":
            if self.held is not None:
                return f"you hold the {self.category[self.held]}"
            return None if self._pickable(target) else f"there is no {target} here to pick up"
        if skill == "place on":
            if self.held is None:
                return "you hold nothing"
            if target not in self.places or target in NO_SPACE:
                return f"nothing can be placed on the {target}"
            return None if self.reaches(target) else f"you are not at the {target}"
        if target not in self.doors:
            return f"the {target} has no door"
        if not self.reaches(target):
            return f"you are not at the {target}"
        is_open = target in self.opened
        return f"the {target} is {'open' if is_open else 'closed'}" if is_open == (skill == "open") else None

    def do(self, skill: str, target: str) -> None:
        """Carry out a skill that `refusal` lets pass."""
        if skill == "go to":
            self.robot = target
        elif skill == "pick up":
            self.held = self._pickable(target)
            assert self.held is not None
            self.place_of[self.held] = None
        elif skill == "place on":
            assert self.held is not None
            # Put down last, listed last.
            del self.place_of[self.held]
            self.place_of[self.held], self.held = target, None
        elif skill == "open":
            self.opened.add(target)
        else:
            self.opened.discard(target)

    def possible(self) -> list[tuple[str, str]]:
        """Every skill that can be carried out now, going to where the robot stands left out."""
        found = [("go to", place) for place in self.places if place != self.robot]
        if self.held is None:
            found += [("pick up", name) for name in dict.fromkeys(self.category[t] for t in self.seen())]
        else:
            found += [("place on", p) for p in self.places if p not in NO_SPACE and self.reaches(p)]
        for place in self.doors:
            if self.reaches(place):
                found.append(("close" if place in self.opened else "open", place))
        return found

    def _pickable(self, category: str) -> str | None:
        place = self.robot
        if place is None or (place in DRAWERS and place not in self.opened):
            return None
        return next((t for t in self.things_of(category) if self.place_of[t] == place), None)
