"""ALFWorld: household tasks in text, on the real TextWorld engine (Shridhar et al. 2021, arXiv 2010.03768).

task_set = environments.make("alfworld", data="~/alfworld", tasks=["pick_and_place_simple"])
task_set = environments.make("alfworld", data="generated")          # no download: games made here, once

games.py           splits, task types and files
pool.py, worker.py the two ends of the pipe to the processes that hold the engine
speed.py           why a step takes milliseconds: the engine's pure functions remember
episode.py         Environment and TaskSet
experts.py         planner and handcoded expert
demonstrations.py  searches that follow a strategy, for the warm start
generate.py        new games of all six types; rooms.py: the room layouts and what may stand where
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from hsg.environments.alfworld import games
from hsg.environments.alfworld.episode import AlfWorldTaskSet
from hsg.environments.alfworld.games import KINDS, SPLITS
from hsg.environments.alfworld.pool import Pool
from hsg.environments.workers import usable_cores

__all__ = ["KINDS", "SPLITS", "make_task_set"]

EXPERTS = ("planner", "handcoded")


def make_task_set(
    data: str | None = None,
    tasks: str | Sequence[str] = "all",
    max_games_per_type: int | None = None,
    expert: str = "planner",
    num_workers: int | None = None,
    step_seconds: float = 60.0,
    num_generated: int = 120,
    cache_dir: str | None = None,
) -> AlfWorldTaskSet:
    """The task set `alfworld`.

    data                "generated", or a folder with the splits or with json_2.1.* that holds them;
                        None = $ALFWORLD_DATA or ~/.cache/alfworld, where alfworld-download puts the official games
    tasks               "all" or names of task types
    max_games_per_type  at most so many games per type and split; None = all
    expert              who plays `expert_actions`: planner (sees all) or handcoded (searches)
    num_workers         processes at most, each serving any number of episodes; None = one per core, at most 8
    step_seconds        limit on one step of the engine (0.002 s on a free core); a load may take ten times as long
    num_generated       training games of "generated" (a second of CPU each); every other split gets a fourth as many
    cache_dir           where generated games and expert plays are kept;
                        None = $XDG_CACHE_HOME/hsg/alfworld or ~/.cache/hsg/alfworld

    Splits: train, valid_seen, valid_unseen; "dev" and "test" are other names of the latter two.
    ValueError: no data, unknown task type, a number out of range, no alfworld.
    """
    kinds = games.select_kinds(tasks)
    if importlib.util.find_spec("alfworld") is None or importlib.util.find_spec("textworld") is None:
        raise ValueError("alfworld must be installed, got no such package; pip install hsg[alfworld]")
    if expert not in EXPERTS:
        raise ValueError(f"alfworld.expert must be one of {', '.join(EXPERTS)}, got {expert!r}; choose one")
    if num_workers is None:
        num_workers = usable_cores()
    for name, value in (
        ("max_games_per_type", max_games_per_type),
        ("num_workers", num_workers),
        ("num_generated", num_generated),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"alfworld.{name} must be an integer of at least 1, got {value!r}; leave it out?")
    if not 0 < step_seconds <= 3600:
        raise ValueError(f"alfworld.step_seconds must be > 0 and at most 3600, got {step_seconds!r}; leave it out?")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsg" / "alfworld"
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default
    if data == "generated":
        from hsg.environments.alfworld.generate import cached_games

        root = cached_games(cache, num_generated, kinds, num_workers)
    else:
        root = games.find_data(data)
    return AlfWorldTaskSet(root, kinds, max_games_per_type, expert, Pool(num_workers), step_seconds, cache)
