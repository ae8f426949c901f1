"""A house with a hidden object: the smallest world in which a strategy decides (pure Python, microseconds a turn).

                 hall                     First observation:
      ┌────────┬──┴─────┬─────────┐         Find the key. You are in the hall.
    attic   cellar   garden   kitchen       Ways: garden, attic, kitchen, cellar. Clue: wine and coal.
    trunk   barrel   shed     oven        One of these places holds the object. The two clue words tell the area
    basket  crate    pot      drawer      (wine, coal -> cellar) and nothing tells the place within it.
    chest   shelf    well     cupboard

A strategy class is the area that is searched first: four classes, of which one fits.  Searching a wrong area takes
1 + 3 = 4 turns, half of TURN_LIMIT = 8.  In closed form, with b bolts before the object (0 in most tasks):

    fewest turns      t*    = 3 + b                               go, unbolt (b times), open, take
    outcome           R(t)  = max(0.2, 1 - 0.1 (t - t*))          found at turn t; 0 while it is not found
    best one can do   E[R]  = mean over k = 1..3 of R(k + 2)      b = 0: the clue read, the k-th place is the one

A bolted task (option `bolted_share`) looks like any other until its place turns out to be bolted; no demonstration
unbolts a bolted place, so a policy that learned from them almost never solves it, yet can stumble on it.
Deliberately absent:
  1. a turn limit: the rollout has one (rollout.max_turns; 8 is the natural one here);
  2. partial progress: nothing but taking the object pays, so that outcomes come from search alone;
  3. any claim to be a benchmark: it serves tests, notebooks and fast ablations.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

TURN_LIMIT = 8
PLACES = {
    "attic": ("trunk", "basket", "chest"),
    "cellar": ("barrel", "crate", "shelf"),
    "garden": ("shed", "pot", "well"),
    "kitchen": ("oven", "drawer", "cupboard"),
}
CLUES = {
    "attic": ("dust", "moths", "letters", "rafters", "feathers", "hats", "toys", "cobwebs"),
    "cellar": ("wine", "coal", "rats", "mould", "stone", "damp", "ice", "roots"),
    "garden": ("roses", "bees", "grass", "soil", "leaves", "rain", "birds", "worms"),
    "kitchen": ("bread", "soup", "salt", "onions", "butter", "plates", "honey", "steam"),
}
GOALS = ("key", "ring", "coin", "map", "bell", "lamp")
AREAS = tuple(PLACES)
HALL = "hall"
STRATEGIES = (
    "Search the {area} first: open each place there, then take the {goal}.",
    "Go to the {area} and open each place. Take the {goal} when you see it.",
    "The {goal} may be in the {area}. Search there before any other area.",
    "Start in the {area}. Open each place there and take the {goal}.",
    "First search the {area}, then the other areas.",
)
WASTED_SHARE = 1 / 3  # of the demonstrations contain 1 to 3 wasted turns
_AREA_OF = {place: area for area, places in PLACES.items() for place in places}
_AREA_WORD = re.compile(r"\b(" + "|".join(AREAS) + r")s?\b", re.IGNORECASE)


def optimal_turns(task: Task) -> int:
    """Fewest turns in which the task can be solved, knowing where the object is."""
    return 3 + task.data["bolts"]


def outcome_at(task: Task, turn: int) -> float:
    """R(t) in [0.2, 1] when the object is taken in the given turn (1-based; every action counts, valid or not)."""
    return max(0.2, 1.0 - (turn - optimal_turns(task)) / 10)


def optimal_outcome(task: Task) -> float:
    """The largest outcome that any sequence of actions reaches: 1 by construction of R(t)."""
    return outcome_at(task, optimal_turns(task))


def expected_optimal_outcome(task: Task) -> float:
    """The mean outcome of the best policy that knows the area from the clue but not the place (nor of bolts).

    Places are searched in any order, so the object is in the k-th with equal chance. A bolted place costs one turn
    more than in `optimal_turns`: opening it in vain tells of the bolts.
    """
    num_places = len(PLACES[task.data["area"]])
    surprise = 1 if task.data["bolts"] else 0
    turns = [optimal_turns(task) + k + surprise for k in range(num_places)]
    return sum(outcome_at(task, turn) for turn in turns) / num_places


def strategy_class(text: str) -> str | None:
    """The area that a strategy text names first, or None when it names none."""
    match = _AREA_WORD.search(text)
    return match.group(1).lower() if match else None


class ToyEnvironment(Environment):
    """One search. `StepResult.feedback` names the state reached: equal feedback = equal outcome of the search."""

    def __init__(self, task: Task, seed: int):
        self.task = task
        self._area = HALL
        self._tried: set[str] = set()  # places that were opened, or found bolted
        self._bolts = task.data["bolts"]
        self._num_turns = 0
        self._outcome = 0.0
        self._last: StepResult | None = None
        self._ways = random.Random(f"ways/{task.id}/{seed}").sample(AREAS, len(AREAS))

    def start(self) -> str:
        goal, clue = self.task.data["goal"], " and ".join(self.task.data["clue"])
        return f"Find the {goal}. {self._where()} Clue: {clue}."

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return self._last
        self._num_turns += 1
        observation = self._act(action.lower().split())
        valid = observation is not None
        won = self._outcome > 0.0
        result = StepResult(
            observation=observation or "Nothing happens.",
            reward=self._outcome,
            done=won,
            success=won,
            score=self._outcome,
            valid=valid,
            feedback=self._feedback(won),
        )
        # A latched episode repeats its last words but pays nothing a second time.
        self._last = StepResult(result.observation, 0.0, won, won, result.score, valid, result.feedback)
        return result

    @property
    def outcome(self) -> float:
        return self._outcome

    def admissible_actions(self) -> list[str]:
        if self._outcome > 0.0:
            return []
        actions = [f"go {area}" for area in AREAS if area != self._area]
        for place in PLACES.get(self._area, ()):
            bolted = place in self._tried and self._is_bolted(place)
            actions.append(f"unbolt {place}" if bolted else f"open {place}")
        if self._goal_in_sight() and self._area == self.task.data["area"]:
            actions.append(f"take {self.task.data['goal']}")
        return [*actions, "look", "wait"]

    def _act(self, words: list[str]) -> str | None:
        """Carry out an action; the observation, or None for an action that cannot be understood or done here."""
        if words == ["look"]:
            return self._where()
        if words == ["wait"]:
            return "Time passes."
        if len(words) != 2:
            return None
        verb, noun = words
        if verb == "go" and noun in PLACES and noun != self._area:
            self._area = noun
            return self._where()
        if verb in ("open", "unbolt") and noun in PLACES.get(self._area, ()):
            return self._open(noun) if verb == "open" else self._unbolt(noun)
        goal = self.task.data["goal"]
        if verb == "take" and noun == goal and self._goal_in_sight() and self._area == self.task.data["area"]:
            self._outcome = outcome_at(self.task, self._num_turns)
            return f"You have the {goal}."
        return None

    def _open(self, place: str) -> str:
        self._tried.add(place)
        if place != self.task.data["place"]:
            return f"The {place} is empty."
        return f"The {place} is bolted." if self._bolts else f"The {place} holds the {self.task.data['goal']}."

    def _unbolt(self, place: str) -> str:
        if not self._is_bolted(place):
            return f"The {place} has no bolt."
        self._bolts -= 1
        # Opening it is a turn of its own, so the place counts as not yet tried again.
        self._tried.discard(place)
        return f"The {place} is {'still bolted' if self._bolts else 'not bolted now'}."

    def _where(self) -> str:
        if self._area == HALL:
            return f"You are in the hall. Ways: {', '.join(self._ways)}."
        return f"You are in the {self._area}. You see {', '.join(PLACES[self._area])}."

    def _is_bolted(self, place: str) -> bool:
        return self._bolts > 0 and place == self.task.data["place"]

    def _goal_in_sight(self) -> bool:
        return self.task.data["place"] in self._tried and not self._bolts

    def _feedback(self, won: bool) -> str:
        tried = ", ".join(place for place in _AREA_OF if place in self._tried) or "nothing"
        return f"The {self.task.data['goal']} was {'found' if won else 'not found'}. Opened: {tried}."

    def distance(self) -> int:
        """Fewest turns from here to the object; 0 when it is taken."""
        if self._outcome > 0.0:
            return 0
        away = self._area != self.task.data["area"]
        return away + (1 if self._goal_in_sight() else 2 + self._bolts)

    def follows(self, action: str, first: str | None) -> bool:
        """Whether an action, taken now, follows the strategy "search `first`, then the other areas".

        With the object in sight only taking it does. Else going to an area and opening its untried places does:
        `first` as long as it has untried places, then any area, each to its end. None: any area from the start.
        """
        if self._goal_in_sight() or self._outcome > 0.0:
            return action == f"take {self.task.data['goal']}" and self.distance() == 1
        open_areas = [area for area in AREAS if not self._tried.issuperset(PLACES[area])]
        if first in open_areas:
            open_areas = [first]
        if self._area in open_areas:
            return any(action == f"open {place}" for place in PLACES[self._area] if place not in self._tried)
        return any(action == f"go {area}" for area in open_areas)


def wasted_turns(task: Task, strategy: str, actions: list[str] | tuple[str, ...]) -> tuple[int, ...]:
    """The oracle of self-judgment: 0-based turns that neither follow the strategy nor advance the task.

    A turn advances the task when fewer turns than before are needed after it (`distance`, which knows the hidden
    place). Turns after the end are not judged. Source: spec of critical self-judgment, StraTA (arXiv 2605.06642).
    """
    environment, first = ToyEnvironment(task, seed=0), strategy_class(strategy)
    wasted = []
    for turn, action in enumerate(actions):
        before = environment.distance()
        if before == 0:
            break
        follows = environment.follows(" ".join(action.lower().split()), first)
        environment.step(action)
        if not follows and environment.distance() >= before:
            wasted.append(turn)
    return tuple(wasted)


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


class ToyTaskSet(TaskSet):
    """All tasks (area x place x goal x pair of clue words), dealt to three splits; the ids spell the task out."""

    name = "toy"
    splits = ("train", "dev", "test")

    def __init__(self, sizes: dict[str, int], bolted_share: float, num_bolts: int):
        catalogue = _catalogue()
        cut = len(catalogue) // 60 * 12  # a fifth, in whole dozens that hold each place once
        pools = {"test": catalogue[:cut], "dev": catalogue[cut : 2 * cut], "train": catalogue[2 * cut :]}
        self._tasks: dict[str, list[Task]] = {}
        for split, size in sizes.items():
            if not 1 <= size <= len(pools[split]):
                raise ValueError(f"toy.num_{split} must be in 1..{len(pools[split])}, got {size}; choose fewer tasks")
            self._tasks[split] = [
                _task(split, *pools[split][i], bolts=num_bolts if _is_share_step(i, bolted_share) else 0)
                for i in range(size)
            ]

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}; see TaskSet.splits")
        return list(self._tasks[split])

    def create(self, task: Task, seed: int) -> ToyEnvironment:
        return ToyEnvironment(task, seed)

    def expert_actions(self, task: Task) -> list[str]:
        area, place, goal = (task.data[name] for name in ("area", "place", "goal"))
        return [f"go {area}", *[f"unbolt {place}"] * task.data["bolts"], f"open {place}", f"take {goal}"]

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """One per strategy class, in random order and wording, so that the clue says nothing about the class.

        Each is at most TURN_LIMIT turns long; a wrong one searches its area in vain and may run out of turns.
        """
        rng = random.Random(f"demonstrations/{task.id}/{seed}")
        demonstrations = []
        for first in rng.sample(AREAS, len(AREAS)):
            actions = list(_faithful_play(task, first, rng))
            wasted: list[int] = []
            if rng.random() < WASTED_SHARE:
                actions, wasted = _waste(task, first, actions, rng)
            demonstrations.append(
                Demonstration(
                    strategy=rng.choice(STRATEGIES).format(area=first, goal=task.data["goal"]),
                    actions=tuple(actions[:TURN_LIMIT]),
                    wasted=tuple(turn for turn in wasted if turn < TURN_LIMIT),
                    fits=first == task.data["area"],
                )
            )
        return demonstrations


def _catalogue() -> list[tuple[str, str, str, tuple[str, str]]]:
    """Every (area, place, goal, clue) once, in one fixed order in which each four neighbours are of four areas.

    The splits are cut from it at fixed points, so neither sizes nor process change which task is in which split.
    """
    rng = random.Random("toy catalogue")
    cells = {}
    for area in AREAS:
        clues = list(itertools.combinations(CLUES[area], 2))
        by_place = [list(itertools.product([place], GOALS, clues)) for place in PLACES[area]]
        for cell in by_place:
            rng.shuffle(cell)
        cells[area] = [entry for row in zip(*by_place, strict=True) for entry in rng.sample(row, len(row))]
    blocks = zip(*([(area, *entry) for entry in cells[area]] for area in AREAS), strict=True)
    return [entry for block in blocks for entry in rng.sample(block, len(block))]


def _task(split: str, area: str, place: str, goal: str, clue: tuple[str, str], *, bolts: int) -> Task:
    data = {"area": area, "place": place, "goal": goal, "clue": clue, "bolts": bolts}
    name = "-".join((area, place, goal, *clue, *(["bolted"] if bolts else [])))
    return Task(id=name, split=split, kind="bolted" if bolts else "open", data=data)


def _is_share_step(index: int, share: float) -> bool:
    """True for `share` of all indices, spread evenly."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def make_task_set(
    num_train: int = 256, num_dev: int = 64, num_test: int = 64, bolted_share: float = 0.0, num_bolts: int = 2
) -> ToyTaskSet:
    """The toy world. `bolted_share` in [0, 1] of each split's tasks hide their object behind `num_bolts` bolts."""
    if not 0.0 <= bolted_share <= 1.0:
        raise ValueError(f"toy.bolted_share must be in [0, 1], got {bolted_share}; 0 makes every task an open one")
    if not 1 <= num_bolts <= 3:
        raise ValueError(f"toy.num_bolts must be in 1..3, got {num_bolts}; more hardly fit {TURN_LIMIT} turns")
    return ToyTaskSet({"train": num_train, "dev": num_dev, "test": num_test}, bolted_share, num_bolts)
