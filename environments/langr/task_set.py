"""The set of all episodes: upstream's files, houses of our own, or both, behind hsg.protocol.TaskSet.

    no files             twelve splits of our own houses (generate.py)
    files                each is a split of its name
    files, none `train`  the same, and the training split is houses of our own, furnished with what theirs are

Task.id is "new_scenes/17" (file / number of the episode) or "train/f0917e29-3" (ours: split / kind - number), Task.kind is
upstream's `instruct_id` up to "_".  Deliberately absent: chance; every split is the same list in every process.
"""

from __future__ import annotations

from hsg.environments.langr.demonstrations import make_demonstrations
from hsg.environments.langr.episode import LangREpisode
from hsg.environments.langr.expert import solve
from hsg.environments.langr.files import Library
from hsg.environments.langr.generate import EVALUATION_SIZE, SPLIT_KINDS, Generator
from hsg.environments.langr.world import Episode
from hsg.protocol import Demonstration, Task, TaskSet

ALIASES = {"dev": "train_validation", "test": "new_scenes"}  # names that hsg's configurations have by default


class LangRTaskSet(TaskSet):
    """kinds: None for all; num_generated: training houses of our own."""

    name = "langr"
    splits: tuple[str, ...] = ()

    def __init__(
        self,
        library: Library | None,
        kinds: frozenset[str] | None,
        generator: Generator,
        num_generated: int,
        allow_invalid: bool,
    ) -> None:
        self._library, self._kinds, self._generator = library, kinds, generator
        self._num_generated, self._allow_invalid = num_generated, allow_invalid
        self._listed: dict[str, list[Task]] = {}
        others = SPLIT_KINDS if library is None else library.names
        self.splits = ("train", *(name for name in others if name != "train" and self._has_kinds(name)))
        if not self._has_kinds("train"):
            asked = ", ".join(sorted(kinds or ()))
            raise ValueError(
                f"langr.kinds must name a kind that the training split has, got {asked}; see its documentation"
            )

    def tasks(self, split: str) -> list[Task]:
        """The episodes of a split; "dev" and "test" are accepted for train_validation and new_scenes."""
        name = split if split in self.splits else ALIASES.get(split, split)
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
        if self._library is not None and split in self._library.names:
            if rest.isdecimal() and int(rest) < len(self._library.file(split)):
                return self._library.episode(split, int(rest))
        else:
            kind, _, number = rest.partition("-")
            if kind in SPLIT_KINDS.get(split, ()) and number.isdecimal():
                return self._generator.episode(split, kind, int(number))
        raise ValueError(
            f"task.id must be '<split>/<episode>' of a file or '<split>/<kind>-<number>', got {task.id!r}; "
            "take tasks from TaskSet.tasks()"
        )

    def create(self, task: Task, seed: int) -> LangREpisode:
        """The seed changes nothing: upstream fixes the whole house in the episode."""
        return LangREpisode(self.episode(task), self._allow_invalid)

    def expert_actions(self, task: Task) -> list[str] | None:
        """What the oracle does, which sees the whole house; None where no errands lead to the goal in 32 actions."""
        plan = solve(self.episode(task))
        return None if plan is None else [f"{skill} {target}" for skill, target in plan]

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Searches in the order of a strategy, whether it suits or not: see demonstrations.py."""
        return make_demonstrations(self.episode(task), f"{task.id}/{seed}", self._allow_invalid)

    def _list(self, split: str) -> list[Task]:
        if self._library is not None and split in self._library.names:
            ids = enumerate(self._library.file(split).instruct_ids)
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
        if self._library is not None and split in self._library.names:
            return not self._kinds.isdisjoint(self._library.file(split).kinds)
        return bool(self._generated_kinds(split))

    def _generated_kinds(self, split: str) -> list[str]:
        return [kind for kind in SPLIT_KINDS[split] if self._kinds is None or kind in self._kinds]
