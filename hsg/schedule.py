"""Which tasks an iteration has and which rollouts they get: a function of the seed and the iteration, so nothing is stored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hsg.config import Config
from hsg.episode import Request
from hsg.generation import derive_seed
from hsg.protocol import Task


def scheduled_tasks(config: Config, tasks: Sequence[Task], iteration: int) -> list[Task]:
    """P tasks. Each pass over the training tasks is a fresh shuffle, cut into iterations; a short rest waits."""
    per_pass = len(tasks) // config.num_tasks
    number, place = divmod(iteration, per_pass)
    order = list(range(len(tasks)))
    random.Random(derive_seed("tasks", config.seed, number)).shuffle(order)
    begin = place * config.num_tasks
    return [tasks[i] for i in order[begin : begin + config.num_tasks]]


def scheduled_requests(config: Config, iteration: int, places: Sequence[tuple[int, Task]]) -> list[Request]:
    """N*M rollouts for the task of each place, row-major."""
    num_strategies, num_rollouts = config.group_shape
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
        for n in range(num_strategies)
        for m in range(num_rollouts)
    ]


def nest(flat: Sequence[Any], num_strategies: int, num_rollouts: int) -> list[list[list[Any]]]:
    """A row-major list of P*N*M records as nested lists (P, N, M)."""
    groups = [list(flat[i : i + num_rollouts]) for i in range(0, len(flat), num_rollouts)]
    return [groups[i : i + num_strategies] for i in range(0, len(groups), num_strategies)]
