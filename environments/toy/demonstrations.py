"""Play by rules for the warm start: every class of strategy faithfully followed, wasted turns and vain unbolting put in.

No demonstration unbolts a place that is bolted, so a policy that learned from them has to find that out by itself.
The clue says little about the class that is shown: `clue_share` of the tasks show the fitting one twice among five, the
others each of the four once.  So a policy that learned from them names the fitting area in (1 - s)/4 + 2s/5 of the cases
(s = clue_share; 0.25 to 0.40), and reinforcement learning has a beginning to strengthen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hsg.environments.toy.world import AREAS, HALL, PLACES, TURN_LIMIT
from hsg.protocol import Demonstration, Task

STRATEGIES = (
    "Search the {area} first: open each place there, then take the {goal}.",
    "Go to the {area} and open each place. Take the {goal} when you see it.",
    "The {goal} may be in the {area}. Search there before any other area.",
    "Start in the {area}. Open each place there and take the {goal}.",
    "First search the {area}, then the other areas.",
)
TURN_STRATEGIES = {
    "go": "Search the {area}.",
    "open": "Search the {area}.",
    "take": "Take the {goal}.",
    "unbolt": "Unbolt the {place}.",
}
WASTED_SHARE = 1 / 3  # of the demonstrations contain 1 to 3 wasted turns


def demonstrations(task: Task, seed: int, unbolt_share: float, clue_share: float) -> list[Demonstration]:
    """One per strategy class, and in `clue_share` of the tasks one more of the fitting class, in random order and wording.

    Each is at most TURN_LIMIT turns long; a wrong one searches its area in vain and may run out of turns.
    """
    rng = random.Random(f"demonstrations/{task.id}/{seed}")
    unbolting = random.Random(f"unbolting/{task.id}/{seed}")
    hinting = random.Random(f"clue/{task.id}/{seed}")
    demonstrations = []
    firsts = rng.sample(AREAS, len(AREAS))
    if hinting.random() < clue_share:
        firsts.insert(hinting.randrange(len(firsts) + 1), task.data["area"])
    for first in firsts:
        actions = list(_faithful_play(task, first, rng))
        wasted: list[int] = []
        if rng.random() < WASTED_SHARE:
            actions, wasted = _waste(task, first, actions, rng)
        elif unbolting.random() < unbolt_share:
            actions = _unbolt_one(task, actions, unbolting)
        demonstrations.append(
            Demonstration(
                strategy=rng.choice(STRATEGIES).format(area=first, goal=task.data["goal"]),
                actions=tuple(actions[:TURN_LIMIT]),
                wasted=tuple(turn for turn in wasted if turn < TURN_LIMIT),
                fits=first == task.data["area"],
                turn_strategies=tuple(_turn_strategies(task, first, actions[:TURN_LIMIT])),
            )
        )
    return demonstrations


def _faithful_play(task: Task, first: str, rng: random.Random) -> Iterator[str]:
    """Search `first`, then the areas after it in their order; within an area the places in any order."""
    start = AREAS.index(first)
    for area in AREAS[start:] + AREAS[:start]:
        yield f"go {area}"
        for place in rng.sample(PLACES[area], len(PLACES[area])):
            yield f"open {place}"
            if place == task.data["place"] and not task.data["bolts"]:
                yield f"take {task.data['goal']}"
                return


def _unbolt_one(task: Task, actions: list[str], rng: random.Random) -> list[str]:
    """Unbolt one place before it is opened, never the one that is bolted: the deed is shown, its use is not."""
    opened = [i for i, a in enumerate(actions) if a.startswith("open ") and a != f"open {task.data['place']}"]
    if not opened:
        return actions
    at = rng.choice(opened)
    return [*actions[:at], actions[at].replace("open", "unbolt"), *actions[at:]]


def _turn_strategies(task: Task, first: str, actions: list[str]) -> Iterator[str]:
    """What guides each turn by itself: the area that is being searched, or the thing to do now."""
    area = first
    for action in actions:
        verb, _, noun = action.partition(" ")
        area = noun if verb == "go" else area
        template = TURN_STRATEGIES.get(verb, TURN_STRATEGIES["go"])
        yield template.format(area=area, goal=task.data["goal"], place=noun)


def _waste(task: Task, first: str, actions: list[str], rng: random.Random) -> tuple[list[str], list[int]]:
    """Put 1 to 3 wasted turns into faithful play: the longer list and the places of the wasted turns in it."""
    positions = set(rng.choices(range(min(len(actions), TURN_LIMIT - 1)), k=rng.randint(1, 3)))
    played: list[str] = []
    wasted: list[int] = []
    area = HALL
    tried: list[str] = []
    for index, action in enumerate(actions):
        if index in positions:
            wasted.append(len(played))
            fillers = ["look", "wait", *(f"open {place}" for place in tried)]
            fillers += [f"unbolt {place}" for place in PLACES.get(area, ()) if place != task.data["place"]]
            # Walking off is plainly wasted only before `first` is searched, and only to where nothing is hidden.
            if index <= len(PLACES[first]):
                fillers += [f"go {other}" for other in AREAS if other not in (first, task.data["area"])]
            played.append(rng.choice(fillers))
            if played[-1].startswith("go ") and area == first:
                played.append(f"go {first}")  # coming back follows the strategy
        verb, noun = action.split()
        if verb == "go":
            area, tried = noun, []
        elif verb == "open":
            tried.append(noun)
        played.append(action)
    return played, wasted
