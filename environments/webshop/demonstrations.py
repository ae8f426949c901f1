"""Demonstrations: what a customer could plan from the instruction alone, suited or not, and play that follows it.

    strategy   "Search long sleeve quick dry shirts. Open the first result, choose red, large, then buy."
    play       search[long sleeve quick dry shirts], click[NOVALI], click[red], click[large], click[Buy Now]

A strategy fixes what to search (all that is wanted, attributes and kind, or the kind alone), which result to open (the
first, the cheapest, the one whose title fits best), and whether to choose the options.  All of them are played; one suits
where the purchase earns the full reward.  Three in five of those shown suit where so many do, so a pupil learns to follow
a strategy whether it suits or not, and which one suits is left to reinforcement.  Deliberately absent: any use of the
goal's product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from hsg.environments.webshop import pages
from hsg.environments.webshop.expert import PRICE_LIMIT, read_results, wanted_values
from hsg.environments.webshop.goals import Goal
from hsg.protocol import Demonstration, Environment, Task

QUERIES = ("all", "attributes", "kind")
CHOICES = {"first": "the first result", "cheapest": "the cheapest result", "title": "the result whose title fits best"}
OPTIONS = (True, False)
PREV, BUY = f"click[{pages.PREV}]", f"click[{pages.BUY}]"
NUM_SHOWN, NUM_SUITED = 5, 3
FEATURES_SHARE = 1 / 4  # of the strategies say to read the features first
WASTED_SHARE = 1 / 3  # of the demonstrations contain a detour


@dataclass(frozen=True)
class Wish:
    """What an instruction asks for, in the words of its text."""

    attributes: tuple[str, ...]
    kind: str
    values: tuple[str, ...]

    def words(self, query: str) -> str:
        parts = {"all": (*self.attributes, self.kind, *self.values), "attributes": (*self.attributes, self.kind)}
        return " ".join(parts.get(query, (self.kind,)))


@dataclass(frozen=True)
class _Play:
    strategy: str
    actions: tuple[str, ...]
    fits: bool


def make_demonstrations(task: Task, seed: int, create: Callable[[], Environment], goal: Goal) -> list[Demonstration]:
    """At most NUM_SHOWN demonstrations of one task, NUM_SUITED of which suit where so many do. `create` makes an episode."""
    rng = random.Random(f"{task.id}/{seed}")
    wanted = goal["goal_options"]
    wish = Wish(
        tuple(goal["attributes"]), goal["query"], tuple(wanted.values() if isinstance(wanted, dict) else wanted)
    )
    plays = []
    for query, choice, options in itertools.product(QUERIES, CHOICES, OPTIONS):
        if options and not wish.values:
            continue
        play = _play(wish, query, choice, options, rng.random() < FEATURES_SHARE, create())
        if play is not None:
            plays.append(play)
    rng.shuffle(plays)
    suited, others = [p for p in plays if p.fits], [p for p in plays if not p.fits]
    num_suited = min(len(suited), max(NUM_SUITED, NUM_SHOWN - len(others)))
    shown = suited[:num_suited] + others[: NUM_SHOWN - num_suited]
    rng.shuffle(shown)
    return [_with_detour(play, rng) if rng.random() < WASTED_SHARE else _plain(play) for play in shown]


def _play(wish: Wish, query: str, choice: str, options: bool, features: bool, episode: Environment) -> _Play | None:
    """Follow one strategy; None where the search finds nothing."""
    instruction = episode.start().split(pages.SEPARATOR)[2]
    actions = [f"search[{wish.words(query)}]"]
    results = read_results(episode.step(actions[0]).observation)
    if not results:
        return None
    if choice == "cheapest":
        asin = min(results, key=lambda row: row[2])[0]
    elif choice == "title":
        asked = set(wish.words("all").lower().split())
        asin = max(results, key=lambda row: len(asked & set(row[1].lower().split())))[0]
    else:
        asin = results[0][0]
    actions.append(f"click[{asin}]")
    page = episode.step(actions[-1]).observation
    if features:
        actions += ["click[Features]", PREV]
    if options:
        text = PRICE_LIMIT.sub("", instruction).lower()
        actions += [f"click[{value}]" for value in wanted_values(page, episode.admissible_actions() or [], text)]
    actions.append(BUY)
    for action in actions[2:]:
        result = episode.step(action)
    steps = ["read its features"] if features else []
    steps += [f"choose {', '.join(wish.values)}"] if options else []
    strategy = f"Search {wish.words(query)}. Open {CHOICES[choice]}, {', '.join([*steps, 'then buy'])}."
    return _Play(strategy, tuple(actions), result.success)


def _plain(play: _Play) -> Demonstration:
    return Demonstration(play.strategy, play.actions, (), play.fits)


def _with_detour(play: _Play, rng: random.Random) -> Demonstration:
    """The same play with two turns put in that lead away and back, or with one click that the page does not offer."""
    place = rng.randrange(len(play.actions))
    if place == 0 or rng.random() < 1 / 3:
        detour = ["click[Description]" if place == 0 else "click[next page]"]
    elif place == 1:
        detour = ["click[Next >]", PREV]
    elif play.actions[place] == PREV:  # on the page of features, from where nothing else leads on
        detour = [BUY]
    else:
        detour = ["click[Description]", PREV]
    actions = (*play.actions[:place], *detour, *play.actions[place:])
    return Demonstration(play.strategy, actions, tuple(range(place, place + len(detour))), play.fits)
