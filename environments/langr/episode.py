"""One episode in words, behind hsg.protocol.Environment.

    go to PLACE    pick up THING    place on PLACE    open PLACE    close PLACE

    Task: Bring a ball to the sofa.
    ...
    > go to sink              You are at the sink. Here: ball, can. You hold nothing.
    > pick up ball            You hold the ball.
    > go to sofa              You are at the sofa. Here: book. You hold the ball.
    > place on sofa           The ball is on the sofa.                      (done, success)

What the robot sees is what stands where it is; all else it has to remember.  Rewards are upstream's: 10 with success and
5 times the gain in the share of subgoals reached.  Upstream also computes a penalty of 0.05 for an action that cannot be
carried out and then overwrites it, so it was never paid; neither is it here (`reward.invalid_action_penalty` pays one).

outcome   1 with success, else 0: what training maximises        score   share of subgoals reached, 1 with success

The goal is looked at after every action.  The end comes with success, after TURN_LIMIT actions, or with the first action that
cannot be carried out where `allow_invalid` is false; upstream has the same switch.  Deliberately absent: chance.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hsg.environments.langr.goals import holds
from hsg.environments.langr.world import TURN_LIMIT, Episode, House
from hsg.protocol import Environment, StepResult

SUCCESS_REWARD, PROGRESS_REWARD = 10.0, 5.0  # upstream's
_SKILLS = {
    "go to": r"(?:go to|go|walk to|navigate to|nav to)",
    "pick up": r"(?:pick up|pick|take)",
    "place on": r"(?:place on|place in|place|put on|put in|put)",
    "open": r"open",
    "close": r"(?:close|shut)",
}
_ACTIONS = {skill: re.compile(rf"{form}(?!\w)\s*(.*)", re.IGNORECASE) for skill, form in _SKILLS.items()}
_ARTICLE = re.compile(r"^(?:the|an|a)\s+", re.IGNORECASE)
ABILITIES = (
    "You are a robot in a house. You can: go to a place, pick up a thing, place on a place what you hold, open or close "
    "the fridge or a drawer."
)


def read_action(text: str) -> tuple[str, str] | None:
    """The skill and its target, in lower case without an article; None where the text is no action."""
    words = " ".join(text.split()).rstrip(".")
    for skill, form in _ACTIONS.items():
        if match := form.match(words):
            target = _ARTICLE.sub("", match.group(1)).strip().lower()
            return (skill, target) if target else None
    return None


class LangREpisode(Environment):
    """One instruction in one house."""

    def __init__(self, episode: Episode, allow_invalid: bool) -> None:
        self._episode, self._allow_invalid = episode, allow_invalid
        self._house = House(episode)
        # "tv stand" is understood as "TV stand".
        names = (*self._house.places, *self._house.category.values())
        self._named = {name.lower(): name for name in names}
        self._missing = list(episode.subgoals)
        self._num_turns = 0
        self._visited: dict[str, None] = {}
        self._last: StepResult | None = None
        self._progress()

    def start(self) -> str:
        places = ", ".join(self._house.places)
        return f"Task: {self._episode.instruction}\n{ABILITIES}\nPlaces: {places}.\nYou hold nothing."

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return replace(self._last, reward=0.0)
        self._num_turns += 1
        before, refused = self._share(), self._act(action)
        self._progress()
        success = refused is None and holds(self._episode.goal, self._house)
        done = success or self._num_turns >= TURN_LIMIT or (refused is not None and not self._allow_invalid)
        self._last = StepResult(
            observation=self._told if refused is None else f"That cannot be done: {refused}.",
            reward=PROGRESS_REWARD * (self._share() - before) + SUCCESS_REWARD * success,
            done=done,
            success=success,
            score=1.0 if success else self._share(),
            valid=refused is None,
            feedback=self._feedback(success),
        )
        return self._last

    @property
    def outcome(self) -> float:
        return float(self._last is not None and self._last.success)

    def admissible_actions(self) -> list[str]:
        if self._last is not None and self._last.done:
            return []
        return [f"{skill} {target}" for skill, target in self._house.possible()]

    def _act(self, action: str) -> str | None:
        """Carry out an action and say what came of it in `_told`; else return why it cannot be done."""
        read = read_action(action)
        if read is None:
            return "that is none of your skills"
        skill, target = read[0], self._named.get(read[1])
        if target is None:
            return "there is nothing of that name here"
        refused = self._house.refusal(skill, target)
        if refused is None:
            thing = self._house.held
            self._house.do(skill, target)
            self._told = self._tell(skill, target, thing)
        return refused

    def _tell(self, skill: str, target: str, held: str | None) -> str:
        house = self._house
        if skill == "pick up":
            return f"You hold the {target}."
        if skill == "place on":
            assert held is not None
            return f"The {house.category[held]} is {'in' if target in house.doors else 'on'} the {target}."
        if skill == "close":
            return f"The {target} is closed."
        if skill == "go to":
            self._visited[target] = None
        sight = self._sight() if skill == "go to" or target == house.robot else ""
        return f"You are at the {target}. {sight}" if skill == "go to" else f"The {target} is open. {sight}".strip()

    def _sight(self) -> str:
        house = self._house
        place = house.robot
        state = f"It is {'open' if place in house.opened else 'closed'}. " if place in house.doors else ""
        things = ", ".join(house.category[thing] for thing in house.seen()) or "nothing"
        holding = f"the {house.category[house.held]}" if house.held else "nothing"
        return f"{state}Here: {things}. You hold {holding}."

    def _progress(self) -> None:
        self._missing = [subgoal for subgoal in self._missing if not self._house.reached(subgoal)]

    def _share(self) -> float:
        total = len(self._episode.subgoals)
        return (total - len(self._missing)) / total if total else 0.0

    def _feedback(self, success: bool) -> str:
        if success:
            return "The task is done."
        house = self._house
        been = ", ".join(self._visited) or "nowhere"
        holding = f"the {house.category[house.held]}" if house.held else "nothing"
        return f"The task is not done. You went to: {been}. You hold {holding}."
