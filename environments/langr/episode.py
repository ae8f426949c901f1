"""One episode in words and the set of all episodes, behind hsg.protocol.

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

The goal is looked at after every action, and the end comes with success, after TURN_LIMIT actions, or, as upstream can have it,
with the first action that cannot be carried out (`allow_invalid`).  Deliberately absent: chance; the seed changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from hsg.environments.langr.demonstrations import make_demonstrations
from hsg.environments.langr.expert import TURN_LIMIT, solve
from hsg.environments.langr.files import SUFFIX, Categories, EpisodeFile
from hsg.environments.langr.generate import EVALUATION_SIZE, SPLIT_KINDS, Generator
from hsg.environments.langr.goals import holds
from hsg.environments.langr.words import TRAINED
from hsg.environments.langr.world import Episode, House
from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

SUCCESS_REWARD, PROGRESS_REWARD = 10.0, 5.0  # upstream's
ALIASES = {"dev": "train_validation", "test": "new_scenes"}  # names that hsg's configurations have by default
_SKILLS = {
    "go to": r"(?:go to|go|walk to|navigate to|nav to)",
    "pick up": r"(?:pick up|pick|take)",
    "place on": r"(?:place on|place in|place|put on|put in|put)",
    "open": r"open",
    "close": r"(?:close|shut)",
}
_ACTION = re.compile(
    "|".join(f"(?P<s{i}>{form})" for i, form in enumerate(_SKILLS.values())) + r"(?!\w)", re.IGNORECASE
)
_ARTICLE = re.compile(r"^(?:the|an|a)\s+", re.IGNORECASE)
ABILITIES = (
    "You are a robot in a house. You can: go to a place, pick up a thing, place on a place what you hold, open or close "
    "the fridge or a drawer."
)


def read_action(text: str) -> tuple[str, str] | None:
    """The skill and its target, in lower case without an article; None where the text is no action."""
    words = " ".join(text.split())
    match = _ACTION.match(words)
    if match is None:
        return None
    skill = next(name for i, name in enumerate(_SKILLS) if match.group(f"s{i}"))
    target = _ARTICLE.sub("", words[match.end() :].strip().rstrip(".")).lower()
    return (skill, target) if target else None


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


class LangRTaskSet(TaskSet):
    """Episodes of upstream's files, of our own making, or both. Task.kind is upstream's `instruct_id` up to "_".

    Task.id is "new_scenes/17" (file / number of the episode) or "train/f0917e29-3" (ours: split / kind - number).
    """

    name = "langr"
    splits: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path | None,
        kinds: frozenset[str] | None,
        num_generated: int,
        num_objects: int,
        tidy_share: float,
        allow_invalid: bool,
    ) -> None:
        self._kinds, self._num_generated, self._allow_invalid = kinds, num_generated, allow_invalid
        self._paths = {} if folder is None else {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}
        # Upstream's training file is 150,000 episodes and waits until it is asked for; the others are small.
        self._files = {name: EpisodeFile(path) for name, path in self._paths.items() if name != "train"}
        self._num_objects, self._tidy_share = num_objects, tidy_share
        self._listed: dict[str, list[Task]] = {}
        others = self._files if self._paths else [name for name in SPLIT_KINDS if name != "train"]
        self.splits = ("train", *(name for name in others if self._has_kinds(name)))
        if not self._has_kinds("train"):
            asked = ", ".join(sorted(kinds or ()))
            raise ValueError(
                f"langr.kinds must be kinds that the training split has, got {asked}; see its documentation"
            )

    def tasks(self, split: str) -> list[Task]:
        """The episodes of a split; "dev" and "test" are accepted for train_validation and new_scenes."""
        name = ALIASES.get(split, split) if split not in self.splits else split
        if name not in self.splits:
            also = ", ".join(f"{alias} = {of}" for alias, of in ALIASES.items() if of in self.splits)
            raise ValueError(
                f"split must be one of {', '.join(self.splits)}{f' ({also})' if also else ''}, got {split!r}; "
                "see TaskSet.splits"
            )
        if name not in self._listed:
            self._listed[name] = self._list(name)
        return list(self._listed[name])

    def episode(self, task: Task) -> Episode:
        """What a task asks for, from its id alone. ValueError where there is no such task."""
        split, _, rest = task.id.partition("/")
        if split in self._paths and rest.isdigit() and int(rest) < len(self._file(split)):
            return self._file(split).episode(int(rest), self._categories_of(split))
        kind, _, number = rest.partition("-")
        if split not in self._paths and kind in SPLIT_KINDS.get(split, ()) and number.isdigit():
            return self._generator.episode(split, kind, int(number))
        raise ValueError(
            f"task.id must be '<split>/<episode>' of a file or '<split>/<kind>-<number>', got {task.id!r}; "
            "take tasks from TaskSet.tasks()"
        )

    def create(self, task: Task, seed: int) -> LangREpisode:
        return LangREpisode(self.episode(task), self._allow_invalid)

    def expert_actions(self, task: Task) -> list[str] | None:
        """What the oracle does, which sees the whole house; None where no errands lead to the goal in 32 actions."""
        plan = solve(self.episode(task))
        return None if plan is None else [f"{skill} {target}" for skill, target in plan]

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Searches in the order of a strategy, whether it suits or not: see demonstrations.py."""
        return make_demonstrations(self.episode(task), f"{task.id}/{seed}", self._allow_invalid)

    def _list(self, split: str) -> list[Task]:
        if split in self._paths:
            ids = enumerate(self._file(split).instruct_ids)
            found = [Task(f"{split}/{i}", split, name.split("_")[0], {"instruct_id": name}) for i, name in ids]
            return [task for task in found if self._kinds is None or task.kind in self._kinds]
        kinds = self._generated_kinds(split)
        size = self._num_generated if split == "train" else EVALUATION_SIZE
        # One of every kind, then the next of every kind: any prefix is a balanced sample.
        pairs = ((kinds[i % len(kinds)], i // len(kinds)) for i in range(size))
        return [Task(f"{split}/{kind}-{number}", split, kind, {"instruct_id": kind}) for kind, number in pairs]

    def _has_kinds(self, split: str) -> bool:
        if self._kinds is None:
            return True
        if split in self._paths:
            return not self._kinds.isdisjoint(name.split("_")[0] for name in self._file(split).instruct_ids)
        return bool(self._generated_kinds(split))

    def _generated_kinds(self, split: str) -> list[str]:
        return [kind for kind in SPLIT_KINDS[split] if self._kinds is None or kind in self._kinds]

    def _file(self, split: str) -> EpisodeFile:
        if split not in self._files:
            self._files[split] = EpisodeFile(self._paths[split])
        return self._files[split]

    @cached_property
    def _learned(self) -> list[tuple[str, str]]:
        """What the files say of things; the training file has a say only where there is no other."""
        files = self._files if any(name != "train" for name in self._paths) else {"train": self._file("train")}
        return [
            mention for name, file in files.items() if name != "train" or len(files) == 1 for mention in file.mentions()
        ]

    @cached_property
    def _categories(self) -> Categories:
        return Categories(self._learned)

    def _categories_of(self, split: str) -> Categories:
        return self._train_categories if split == "train" else self._categories

    @cached_property
    def _train_categories(self) -> Categories:
        """The same names as in the other files, and for things that they do not have its own."""
        known = {name for name, _ in self._learned}
        return Categories([*self._learned, *(m for m in self._file("train").mentions() if m[0] not in known)])

    @cached_property
    def _generator(self) -> Generator:
        """With files, our houses are furnished with what theirs are."""
        if not self._files:
            return Generator(TRAINED, self._num_objects, self._tidy_share)
        found = {self._categories.of(thing) for file in self._files.values() for thing in file.things()}
        return Generator(tuple(sorted(found)), self._num_objects, self._tidy_share)
