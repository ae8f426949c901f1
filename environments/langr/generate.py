"""Houses and instructions of our own, over upstream's seventeen kinds and ten generalisation splits, for use without its data.

    (split, kind, number) -> seed -> furniture, a task of that kind, clutter -> Episode

Which kinds a split holds, and what is new in it, is upstream's (apple/ml-llarp, LLaRP, arXiv 2310.17722); words, things and
houses are ours.  Nothing is kept: an episode is made when it is played, the same one every time.

    train, train_validation   nine kinds, all furniture or all but one piece
    every other split         two pieces are missing, and
      rephrasing              sentences that training never uses       irrelevant_text   a second sentence that misleads
      referring_expressions   a thing by its looks                     novel_objects     things that training never asks for
      spatial_relationships   a place by its neighbour                 multiple_objects  all things of a kind
      context                 a thing by its use                       multiple_rearrangements  three things
      conditional_instructions  one of two things, as the fridge is

Deliberately absent: meshes and metres; upstream's sentences.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from hsg.environments.langr.goals import Expression, Predicate
from hsg.environments.langr.texts import MISLEADING, REPHRASED_TEXTS, TRAINING_TEXTS
from hsg.environments.langr.words import AREAS, HOME_OF, NOVEL, PURPOSES, REFERRED, ROOM, SPATIAL, SURFACES, TRAINED
from hsg.environments.langr.world import Episode

KINDS = {  # upstream's instruct_id of each kind: what is asked
    "42f1b012": "take a thing from one place to another",
    "f0917e29": "bring a thing, wherever it is",
    "9a1dd6ee": "clear a place of a thing",
    "fd8dd56c": "bring two things",
    "6e7f4383": "swap two things",
    "6e3da8a1": "close the fridge",
    "68216d8c": "open the fridge",
    "311525c5": "go to a place",
    "2f2d797d": "find a thing",
    "8a66dec9": "bring a thing known by its looks",
    "93b2ef41": "take a thing to a place known by its neighbour",
    "21e2ce5f": "bring a thing known by its use",
    "db3119cd": "bring three things",
    "3ef02c70": "bring all things of a kind",
    "92bcf9b3": "take all things of a kind from one place to another",
    "5d5460d6": "if the fridge is open, bring one thing, else another: it is open",
    "e75d9d69": "the same: it is closed",
}
TRAINING = tuple(KINDS)[:9]
SPLIT_KINDS = {
    "train": TRAINING,
    "train_validation": TRAINING,
    "new_scenes": TRAINING,
    "rephrasing": TRAINING,
    "referring_expressions": ("8a66dec9",),
    "spatial_relationships": ("93b2ef41",),
    "context": ("21e2ce5f",),
    "irrelevant_text": ("f0917e29",),
    "multiple_rearrangements": ("db3119cd",),
    "novel_objects": ("42f1b012", "f0917e29", "9a1dd6ee", "fd8dd56c", "6e7f4383", "2f2d797d"),
    "multiple_objects": ("3ef02c70", "92bcf9b3"),
    "conditional_instructions": ("5d5460d6", "e75d9d69"),
}
EVALUATION_SIZE = 100  # episodes of every split but train
FURNITURE = ("black table", "brown table", "TV stand", "sofa", "chair")  # the kitchen is always there
MIN_OBJECTS, MAX_OBJECTS = 8, 33
SINK_SPACE = 2  # upstream's sampler puts no more things into it

_X = "X"


class Generator:
    """Makes episodes.

    categories   what training asks for; the things of upstream's files where they are there, else our own
    num_objects  things in a house, upstream's have 34 or 35, of 33 categories
    tidy_share   of the things stand in the area where they are at home; 0: anywhere, as upstream
    """

    def __init__(
        self, categories: Sequence[str] = TRAINED, num_objects: int = MAX_OBJECTS, tidy_share: float = 0.0
    ) -> None:
        self.trained = tuple(c for c in categories if c not in NOVEL)
        self.everything = (*self.trained, *NOVEL)
        self.num_objects, self.tidy_share = num_objects, tidy_share

    def episode(self, split: str, kind: str, number: int) -> Episode:
        """One episode; equal arguments give the equal episode, in every process."""
        rng = random.Random(f"langr/{split}/{kind}/{number}")
        draft = _Draft(self, split, rng)
        text, goal, suffix = _RECIPES[kind](draft, kind)
        if split == "irrelevant_text":
            other = rng.choice([c for c in self.trained if c not in draft.asked])
            text = rng.choice(MISLEADING).format(ay=_a(other), text=text)
        draft.clutter()
        opened = frozenset({"fridge"} if kind in ("6e3da8a1", "5d5460d6") else ())
        return Episode(
            instruction=text,
            instruct_id=kind + suffix,
            places=draft.places,
            things=tuple(draft.things),
            opened=opened,
            goal=goal,
            subgoals=tuple(draft.subgoals),
        )


class _Draft:
    """A house that is being furnished."""

    def __init__(self, generator: Generator, split: str, rng: random.Random) -> None:
        self.rng, self.split, self._generator = rng, split, generator
        if split in ("train", "train_validation"):
            missing: tuple[str, ...] = rng.choice(((), *((piece,) for piece in FURNITURE)))
        else:
            missing = rng.choice(tuple(itertools.combinations(FURNITURE, 2)))
        self.places = tuple(place for place in ROOM if place not in missing)
        self.surfaces = tuple(place for place in SURFACES if place not in missing)
        self.things: list[tuple[str, str, str]] = []
        self.asked: list[str] = []
        self.subgoals: list[tuple[Predicate, ...]] = []
        self._done: tuple[Predicate, ...] = ()

    def category(self) -> str:
        """A category to ask for, another one each time."""
        asked = NOVEL if self.split == "novel_objects" else self._generator.trained
        return self.ask(self.rng.choice([c for c in asked if c not in self.asked]))

    def ask(self, category: str) -> str:
        self.asked.append(category)
        return category

    def surface(self, other_than: str = "") -> str:
        return self.rng.choice([place for place in self.surfaces if place != other_than])

    def put(self, category: str, place: str | None = None, other_than: str = "") -> tuple[str, str]:
        """A thing of the category at the place, or wherever such a thing stands but there: its id and the place."""
        place = self._somewhere(category, other_than) if place is None else place
        count = sum(1 for _, other, _ in self.things if other == category)
        self.things.append((f"{category} {count + 1}", category, place))
        return self.things[-1][0], place

    def clutter(self) -> None:
        """Other things, each category at most once, until the house has as many as it should have."""
        others = [c for c in self._generator.everything if c not in self.asked]
        self.rng.shuffle(others)
        for category in others[: max(0, self._generator.num_objects - len(self.things))]:
            self.put(category)
        self.rng.shuffle(self.things)

    def carried(self, thing: str, source: str, target: str) -> None:
        """The subgoals of one errand, after those of the errands before it, as upstream's oracle has them."""
        there = (*self._done, ("on_top", thing, target))
        self.subgoals += [
            (*self._done, ("robot_at", source)),
            (*self._done, ("holding", thing), ("robot_at", source)),
            (*self._done, ("holding", thing), ("robot_at", target)),
            (*there, ("robot_at", target)),
        ]
        self._done = there

    def say(self, kind: str, **words: str) -> str:
        texts = REPHRASED_TEXTS if self.split == "rephrasing" else TRAINING_TEXTS
        return self.rng.choice(texts[kind]).format(**words)

    def _somewhere(self, category: str, other_than: str) -> str:
        full = {"sink"} if sum(1 for *_, place in self.things if place == "sink") >= SINK_SPACE else set()
        free = [place for place in self.surfaces if place != other_than and place not in full]
        home = [place for place in free if place in AREAS[_home(category)]]
        return self.rng.choice(home if home and self.rng.random() < self._generator.tidy_share else free)


def _home(category: str) -> str:
    """The area of a category; one that our table has not gets one by its letters."""
    return HOME_OF.get(category) or tuple(AREAS)[sum(map(ord, category)) % len(AREAS)]


def _a(category: str) -> str:
    return f"{'an' if category[0] in 'aeiou' else 'a'} {category}"


def _exists(*wanted: tuple[str, str], more: Sequence[Predicate] = ()) -> Expression:
    """EXISTS things of the categories, each on its place, hands empty."""
    names = "XYZ"[: len(wanted)]
    inputs = tuple((name, category) for name, (category, _) in zip(names, wanted, strict=True))
    on_top = tuple(("on_top", name, place) for name, (_, place) in zip(names, wanted, strict=True))
    return Expression("AND", "EXISTS", inputs, (*more, *on_top, ("not_holding",)))


# Each recipe: the draft and the kind -> the sentence, the goal, what is put behind the kind in instruct_id.


def _bring(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    """One thing to one place; by its name, its looks or its use; from a place that is told or not."""
    suffix, words = "", {}
    if kind == "8a66dec9":
        x = draft.ask(draft.rng.choice(list(REFERRED)))
        words, suffix = {"looks": REFERRED[x]}, f"_{x}"
    elif kind == "21e2ce5f":
        x = draft.ask(draft.rng.choice(list(PURPOSES)))
        words, suffix = {"use": PURPOSES[x]}, f"_{x}"
    else:
        x = draft.category()
    if kind == "93b2ef41":
        target = draft.rng.choice(list(SPATIAL))
        words, suffix = {"spot": draft.rng.choice(SPATIAL[target])}, f"_{target.replace(' ', '-')}"
    else:
        target = draft.surface()
    thing, source = draft.put(x, other_than=target)
    draft.carried(thing, source, target)
    return draft.say(kind, x=x, ax=_a(x), a=source, b=target, **words), _exists((x, target)), suffix


def _clear(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    x = draft.category()
    thing, source = draft.put(x)
    draft.subgoals += [(("robot_at", source),), (("holding", thing), ("robot_at", source)), (("not_holding",),)]
    gone = Expression("NAND", "EXISTS", ((_X, x),), (("on_top", _X, source),))
    return draft.say(kind, x=x, a=source), Expression("AND", None, (), (("not_holding",), gone)), ""


def _bring_several(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    """Two things to one place, or three to places of their own."""
    targets = [draft.surface()] * 2 if kind == "fd8dd56c" else [draft.surface() for _ in range(3)]
    words: dict[str, str] = {}
    wanted = []
    for letter, spot, target in zip("xyz", "bcd", targets, strict=False):
        category = draft.category()
        thing, source = draft.put(category, other_than=target)
        draft.carried(thing, source, target)
        words |= {f"a{letter}": _a(category), spot: target}
        wanted.append((category, target))
    return draft.say(kind, **words), _exists(*wanted), ""


def _swap(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    x, y = draft.category(), draft.category()
    first, a = draft.put(x)
    second, b = draft.put(y, other_than=a)
    draft.carried(first, a, b)
    draft.carried(second, b, a)
    return draft.say(kind, x=x, y=y, a=a, b=b), _exists((x, b), (y, a)), ""


def _door(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    wanted = ("closed_fridge" if kind == "6e3da8a1" else "opened_fridge", "fridge")
    draft.subgoals += [(("robot_at", "fridge"),), (wanted, ("robot_at", "fridge"))]
    return draft.say(kind), Expression("AND", None, (), (wanted,)), ""


def _go(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    target = draft.surface()
    draft.subgoals.append((("robot_at", target),))
    return draft.say(kind, b=target), Expression("AND", None, (), (("robot_at", target),)), ""


def _find(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    x = draft.category()
    _, source = draft.put(x)
    draft.subgoals.append((("robot_at", source),))
    return draft.say(kind, ax=_a(x)), Expression("AND", "EXISTS", ((_X, x),), (("robot_at", _X),)), ""


def _every(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    x = draft.category()
    target = draft.surface()
    source = draft.surface(target) if kind == "92bcf9b3" else None
    for _ in range(draft.rng.choice((2, 3))):
        thing, place = draft.put(x, source, target)
        draft.carried(thing, place, target)
    goal = Expression("AND", "FORALL", ((_X, x),), (("on_top", _X, target), ("not_holding",)))
    return draft.say(kind, x=x, a=source or "", b=target), goal, ""


def _conditional(draft: _Draft, kind: str) -> tuple[str, Expression, str]:
    """The first thing if the fridge is open, else the second; the other one stays where it is."""
    x, y, target = draft.category(), draft.category(), draft.surface()
    (first, a), (second, b) = draft.put(x, other_than=target), draft.put(y, other_than=target)
    is_open = kind == "5d5460d6"
    draft.carried(*((first, a, target) if is_open else (second, b, target)))
    goal = _exists(
        (x, target if is_open else a), (y, b if is_open else target),
        more=[("opened_fridge" if is_open else "closed_fridge", "fridge")],
    )  # fmt: skip
    return draft.say(kind, ax=_a(x), ay=_a(y), b=target), goal, ""


_RECIPES: dict[str, Callable[[_Draft, str], tuple[str, Expression, str]]] = {
    **dict.fromkeys(("42f1b012", "f0917e29", "8a66dec9", "93b2ef41", "21e2ce5f"), _bring),
    **dict.fromkeys(("fd8dd56c", "db3119cd"), _bring_several),
    **dict.fromkeys(("6e3da8a1", "68216d8c"), _door),
    **dict.fromkeys(("3ef02c70", "92bcf9b3"), _every),
    **dict.fromkeys(("5d5460d6", "e75d9d69"), _conditional),
    "9a1dd6ee": _clear,
    "6e7f4383": _swap,
    "311525c5": _go,
    "2f2d797d": _find,
}
