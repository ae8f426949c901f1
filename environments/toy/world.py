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

import random
import re

from hsg.protocol import Environment, StepResult, Task

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
AREA_OF = {place: area for area, places in PLACES.items() for place in places}
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
        tried = ", ".join(place for place in AREA_OF if place in self._tried) or "nothing"
        bolted = f" Bolted: {self.task.data['place']}." if self._goal_behind_known_bolts() else ""
        return f"The {self.task.data['goal']} was {'found' if won else 'not found'}. Opened: {tried}.{bolted}"

    def _goal_behind_known_bolts(self) -> bool:
        return self._bolts > 0 and self.task.data["place"] in self._tried

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
