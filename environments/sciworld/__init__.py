"""ScienceWorld: 30 elementary-science tasks in a simulated house (Wang et al. 2022, arXiv 2203.07540).

task_set = environments.make("sciworld", tasks=["Find", "boil"], simplifications="easy")

catalog.py    task names, groups, official splits
engine.py     JVMs and the pipe to them; Engine.java, engine.jar: their Java half
episode.py    Environment and TaskSet
expert.py     expert actions: packaged, cached or from the engine's gold path
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hsg.environments.sciworld import catalog
from hsg.environments.sciworld.catalog import GROUPS, TASKS
from hsg.environments.sciworld.engine import Pool
from hsg.environments.sciworld.episode import SciWorldTaskSet
from hsg.environments.sciworld.gold import ExpertStore
from hsg.environments.workers import usable_cores

__all__ = ["GROUPS", "TASKS", "make_task_set"]


def make_task_set(
    tasks: str | Sequence[str] = "all",
    simplifications: str = "easy",
    max_variations_per_task: int | None = None,
    num_engines: int | None = None,
    engine_memory_mb: int = 768,
    cache_dir: str | None = None,
) -> SciWorldTaskSet:
    """The task set `sciworld`.

    tasks                    "all", task names, group names (Measure, Test-Cond, Find, Chem-Mix, Lifespan)
    simplifications          "easy", "" (none), or a comma list of the engine's names
    max_variations_per_task  at most so many variations per task and split, evenly spaced; None = all
    num_engines              JVMs at most, each serving any number of episodes; None = one per core, at most 8
    engine_memory_mb         heap limit of one JVM
    cache_dir                where gold paths are kept; None = $XDG_CACHE_HOME/hsg/sciworld or ~/.cache/hsg/sciworld

    ValueError: unknown task or simplification, a number out of range, no Java, no scienceworld.
    """
    kinds = catalog.select_tasks(tasks)
    simplifications = catalog.check_simplifications(simplifications, kinds)
    if num_engines is None:
        num_engines = usable_cores()
    for name, value, least in (
        ("max_variations_per_task", max_variations_per_task, 1),
        ("num_engines", num_engines, 1),
        ("engine_memory_mb", engine_memory_mb, 256),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"sciworld.{name} must be an integer of at least {least}, got {value!r}; leave it out?")
    if cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsg" / "sciworld"
    else:
        cache = Path(cache_dir).expanduser()
    pool = Pool(num_engines, engine_memory_mb)
    experts = ExpertStore(cache, simplifications, engine_memory_mb)
    return SciWorldTaskSet(kinds, simplifications, max_variations_per_task, pool, experts)
