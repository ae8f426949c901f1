"""Demonstrations for the Find and Lifespan tasks: what an agent could plan before it has seen more than one room.

    strategy     "Go outside and look for an animal. Focus on it, then bring it to the red box in the kitchen."
    play         teleport to outside, look around, focus on dove egg, pick up dove egg, teleport to kitchen, move ...

A strategy names a kind of thing (Find) or of animal (Lifespan) and is followed whether it suits the task or not, so a
pupil learns to follow; which kind suits which task is left to reinforcement.  Three in five strategies suit.
Which animal lives longest is found by trying: the teacher focuses on each of them in an episode of its own.
Deliberately absent: the other 23 tasks (the warm start makes strategies out of their expert actions), any look at the
engine's hidden state (a play uses only what "look around" shows).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from hsg.protocol import Demonstration, Environment, Task

LOOK = "look around"
ANIMAL_KINDS = {
    "reptile": ("giant tortoise", "crocodile", "turtle", "snake", "chameleon", "common toad", "frog", "toad"),
    "bird": ("parrot", "blue jay", "dove", "bird"),
    "insect": ("ant", "bee", "butterfly", "dragonfly", "moth", "spider"),
}
"""Everything else that lives outside is a mammal. Frogs and toads are counted with the reptiles."""
PLACES = {"animal": ("outside",), "plant": ("greenhouse",), "object": ("kitchen", "outside", "greenhouse")}
OBJECTS = {"kitchen": ("thermometer", "lighter", "stopwatch"), "outside": ("axe",), "greenhouse": ("jug",)}
SUITS = {
    "find-animal": ("animal",),
    "find-plant": ("plant",),
    "find-living-thing": ("animal", "plant"),
    "find-non-living-thing": ("object",),
}
ARTICLE = {"animal": "an animal", "plant": "a plant", "object": "an object"}
FIND = (
    "Go {to} and look for {thing}. Focus on it, then bring it to the {box}.",
    "Take {thing} from {place}: focus on it, carry it to the {box}.",
)
LIFESPAN = (
    "Go outside and look. Focus on {first}, else on {second}.",
    "Look outside for {first} or else {second}, and focus on it.",
)
LIFESPAN_BOTH = ("Go outside and look. Focus on {first}, then on {second}.",)
IDLE = (LOOK, "inventory", "look at agent", "wait1")
WASTED_SHARE = 1 / 3


class House:
    """One task's house: looked at in one episode, tried out in others. `create` makes a fresh episode."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._create = create
        self._scout = create()
        self.first_observation = self._scout.start()
        self._seen: dict[str, str] = {}

    def look(self, place: str) -> str:
        """What "look around" shows there."""
        if place not in self._seen:
            self._scout.step(f"teleport to {place}")
            self._seen[place] = self._scout.step(LOOK).observation
        return self._seen[place]

    def score(self, actions: Sequence[str]) -> float:
        """The score of a fresh episode after these actions."""
        episode, score = self._create(), 0.0
        try:
            episode.start()
            for action in actions:
                score = episode.step(action).score
        finally:
            episode.close()
        return score

    def close(self) -> None:
        self._scout.close()

    def right_order(self, animals: Sequence[str], length: int) -> list[str]:
        """The animals to focus on, in order, found by trying."""
        found: list[str] = []
        score = 0.0
        for _ in range(length):
            tries = [a for a in animals if a not in found]
            scores = [self.score(["teleport to outside", *(f"focus on {a}" for a in [*found, one])]) for one in tries]
            best = max(range(len(tries)), key=scores.__getitem__, default=None)
            if best is None or scores[best] <= score:
                break
            found.append(tries[best])
            score = scores[best]
        return found


def supports(task: Task) -> bool:
    """Whether strategies are known for this kind of task."""
    return task.kind in SUITS or task.kind.startswith("lifespan-")


def make_demonstrations(task: Task, seed: int, house: House) -> list[Demonstration]:
    """Five demonstrations, three of which suit where the house allows."""
    rng = random.Random(f"{task.id}/{seed}")
    make = _find if task.kind in SUITS else _lifespan
    made = make(task, rng, house)
    rng.shuffle(made)
    return [
        _waste(rng, *item) if rng.random() < WASTED_SHARE else Demonstration(*item[:2], (), item[2]) for item in made
    ]


# ------------------------------------------------------------------------------------------------------------- Find


def _find(task: Task, rng: random.Random, house: House) -> list[tuple[str, tuple[str, ...], bool]]:
    start = house.first_observation
    here = _place(start)
    box, room = re.search(r"move it to the (.+ box) in the (.+?)\.", start).groups()  # type: ignore[union-attr]
    suits = list(SUITS[task.kind])
    others = [thing for thing in PLACES if thing not in suits]
    chosen = [rng.choice(suits) for _ in range(3)] + [rng.choice(others) for _ in range(2)]
    made = []
    for thing in chosen:
        place = rng.choice(PLACES[thing])
        name = rng.choice(_things(thing, place, house.look(place)))
        actions = []
        if here != place:
            actions.append(f"teleport to {place}")
            actions.append(LOOK)
        actions += [f"focus on {name}", f"pick up {name}"]
        if room != place:
            actions.append(f"teleport to {room}")
        actions.append(f"move {name} to {box}")
        text = rng.choice(FIND).format(
            to="outside" if place == "outside" else f"to the {place}",
            place="outside" if place == "outside" else f"the {place}",
            thing=ARTICLE[thing],
            box=f"{box} in the {room}",
        )
        made.append((text, tuple(actions), thing in suits))
    return made


def _place(text: str) -> str:
    """The room that a text of "look around" is about."""
    return re.search(r"(?:room|location) is called the ([a-z ]+?)\.", text).group(1)  # type: ignore[union-attr]


def _things(thing: str, place: str, seen: str) -> list[str]:
    if thing == "animal":
        return _animals(seen)
    if thing == "plant":
        return list(dict.fromkeys(re.findall(r"containing an? ([a-z ]+?) in the [a-z ]+ stage", seen)))
    return [name for name in OBJECTS[place] if re.search(rf"\ban? {name}\b", seen)]


def _animals(seen: str) -> list[str]:
    """Animals by the name an action can use: "dove egg", "baby mouse"."""
    names = re.findall(r"^\tan? ([a-z ]+)", seen, flags=re.MULTILINE)
    return [n.strip() for n in names if n.strip().endswith(" egg") or n.startswith(("baby ", "juvenile ", "adult "))]


# --------------------------------------------------------------------------------------------------------- Lifespan


def _kind(animal: str) -> str:
    plain = re.sub(r"^(baby|juvenile|adult) | egg$", "", animal)
    return next((kind for kind, names in ANIMAL_KINDS.items() if plain in names), "mammal")


def _lifespan(task: Task, rng: random.Random, house: House) -> list[tuple[str, tuple[str, ...], bool]]:
    animals = _animals(house.look("outside"))
    kinds = ("reptile", "bird", "mammal", "insect")
    go = () if _place(house.first_observation) == "outside" else ("teleport to outside", LOOK)
    both = task.kind == "lifespan-longest-lived-then-shortest-lived"
    target = house.right_order(animals, 2 if both else 1)

    def pick(first: str, second: str) -> list[str]:
        """The animals that following (first, second) focuses on."""
        ones, others = ([a for a in animals if _kind(a) == kind] for kind in (first, second))
        if both:
            one = rng.choice(ones or animals)
            rest = [a for a in others or animals if a != one] or [a for a in animals if a != one]
            return [one, rng.choice(rest)]
        return [rng.choice(ones or others or animals)]

    made = []
    pairs = [(a, b) for a in kinds for b in kinds if a != b or both]
    rng.shuffle(pairs)
    drawn = [(pair, pick(*pair)) for pair in pairs]
    right = [item for item in drawn if item[1] == target]
    wrong = [item for item in drawn if item[1] != target]
    for (first, second), names in (right[:3] + wrong)[:3] + wrong[-2:]:
        words = {k: f"{'an' if k[0] == 'i' else 'a'} {k}" for k in kinds}
        template = rng.choice(LIFESPAN_BOTH if both else LIFESPAN)
        text = template.format(first=words[first], second="another" if first == second else words[second])
        made.append((text, (*go, *(f"focus on {name}" for name in names)), names == target))
    return made


# ------------------------------------------------------------------------------------------------------------ waste


def _waste(rng: random.Random, strategy: str, actions: tuple[str, ...], fits: bool) -> Demonstration:
    """The same play with one or two idle turns put in before its last action."""
    mixed: list[tuple[str, bool]] = [(action, False) for action in actions]
    for _ in range(rng.choice((1, 1, 2))):
        mixed.insert(rng.randrange(len(mixed)), (rng.choice(IDLE), True))
    wasted = tuple(i for i, (_, idle) in enumerate(mixed) if idle)
    return Demonstration(strategy, tuple(action for action, _ in mixed), wasted, fits)
