"""Which tasks an iteration trains on and which episodes it plays: functions of the configuration and its number alone.

    iteration_tasks   P tasks, each pass over the training split a fresh shuffle
    spare_tasks       all others, for places whose first task is given up (refill.py)
    make_requests     N x M episodes of each place, or a part of them

So a resumed run meets the same ones, and every rank knows them without asking.  Deliberately absent: tasks chosen by how
well they went; that is state, and would have to be saved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hsg.config.options import Config
from hsg.engine.seeds import derive_seed
from hsg.play.episode import Request
from hsg.protocol import Task


def iteration_tasks(config: Config, tasks: Sequence[Task], iteration: int) -> list[Task]:
    """P tasks. Each pass over the training tasks is a fresh shuffle, cut into iterations; a short rest waits."""
    per_pass = len(tasks) // config.num_tasks
    number, place = divmod(iteration, per_pass)
    order = list(range(len(tasks)))
    random.Random(derive_seed("tasks", config.seed, number)).shuffle(order)
    begin = place * config.num_tasks
    return [tasks[i] for i in order[begin : begin + config.num_tasks]]


def spare_tasks(config: Config, tasks: Sequence[Task], iteration: int) -> list[Task]:
    """The other training tasks, in an order of this iteration's own."""
    taken = {task.id for task in iteration_tasks(config, tasks, iteration)}
    others = [task for task in tasks if task.id not in taken]
    random.Random(derive_seed("refill", config.seed, iteration)).shuffle(others)
    return others


def make_requests(
    config: Config, iteration: int, places: Sequence[tuple[int, Task]], begin: int = 0, end: int | None = None
) -> list[Request]:
    """Of the N*M episodes of each (place p, task), row-major, those from `begin` to `end`."""
    num_strategies, num_rollouts = config.group_shape
    grid = [(n, m) for n in range(num_strategies) for m in range(num_rollouts)][begin:end]
    return [
        Request(
            task,
            index,
            # All rollouts of a task start from the same world: only what the policy does may differ.
            derive_seed("environment", config.seed, iteration, task.id),
            n,
            m,
            ("rollout", config.seed, iteration, task.id, n, m),
        )
        for index, task in places
        for n, m in grid
    ]
