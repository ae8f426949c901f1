"""LangR: Language Rearrangement in text, a robot that tidies a house as it is told (LLaRP, arXiv 2310.17722; played by SGE).

task_set = environments.make("langr")                            # houses of our own
task_set = environments.make("langr", data="ml-llarp/datasets")  # upstream's episodes

words.py           what places and things are called
goals.py           predicates, goals, ways to reach them
world.py           the house and the five skills
files.py           upstream's episode files
texts.py           how our own instructions ask
generate.py        houses and tasks of our own, over the same kinds and splits
expert.py          the oracle
demonstrations.py  searches that follow a strategy
episode.py         one episode: words, rewards, its end
task_set.py        all episodes, in splits

Real: upstream's episodes, goals, subgoals, skills with their preconditions, and rewards.  Not here: its renderer.  Upstream's
robot sees pictures of ReplicaCAD rooms in habitat-sim, for which no package of this Python and no meshes can be had, so an
adapter to it could not be run, and there is none; what it measures in metres is symbolic here (world.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsg.environments.langr.files import Library
from hsg.environments.langr.generate import KINDS, MAX_OBJECTS, MIN_OBJECTS, SPLIT_KINDS, Generator
from hsg.environments.langr.task_set import LangRTaskSet
from hsg.environments.langr.words import TRAINED
from hsg.environments.langr.world import TURN_LIMIT

__all__ = ["KINDS", "SPLIT_KINDS", "TURN_LIMIT", "LangRTaskSet", "make_task_set"]


def make_task_set(
    data: str | None = None,
    kinds: str | Sequence[str] = "all",
    num_generated: int = 2000,
    num_objects: int = MAX_OBJECTS,
    tidy_share: float = 0.0,
    allow_invalid: bool = True,
) -> LangRTaskSet:
    """The task set `langr`.

    data           folder with upstream's files; each is a split of its name. None = houses of our own, in all its splits;
                   without train.pickle they are the training split
    kinds          "all", or one or more of upstream's instruct_ids (KINDS)
    num_generated  generated training episodes
    num_objects    things in a generated house; upstream's have 34 or 35
    tidy_share     of the things in generated houses stand in the area where they are at home; 0 as upstream: anywhere
    allow_invalid  an action that cannot be carried out changes nothing; else it ends the episode (upstream knows both)

    ValueError: a folder without files, a file that is none of upstream's, a number out of range.
    """
    if num_generated < 1:
        raise ValueError(f"langr.num_generated must be at least 1, got {num_generated}; 2000 is the default")
    if not MIN_OBJECTS <= num_objects <= MAX_OBJECTS:
        raise ValueError(
            f"langr.num_objects must be in {MIN_OBJECTS}..{MAX_OBJECTS}, got {num_objects}; {MAX_OBJECTS} is the default"
        )
    if not 0.0 <= tidy_share <= 1.0:
        raise ValueError(f"langr.tidy_share must be in [0, 1], got {tidy_share}; 0 puts things anywhere")
    library = None if data is None else Library(Path(data).expanduser())
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    known = {"all", *KINDS}
    if library is not None and not wanted <= known:
        known |= {kind for name in library.names for kind in library.file(name).kinds}
    if not wanted or not wanted <= known:
        raise ValueError(
            f"langr.kinds must be all or some of {', '.join(sorted(known))}, got {kinds!r}; see its documentation"
        )
    generator = Generator(TRAINED if library is None else library.categories(), num_objects, tidy_share)
    return LangRTaskSet(
        library, None if "all" in wanted else frozenset(wanted), generator, num_generated, allow_invalid
    )
