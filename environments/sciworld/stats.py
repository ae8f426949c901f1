"""What each kind of task costs, to choose a mix for fast training.

    python -m hsg.environments.sciworld.stats [--tasks Find Lifespan] [--variations 4]

CPU milliseconds of the JVM for a load and for a step (after a warm-up round), words of the first observation and of
an average later one, and the mean length of the expert actions (packaged ones, else gold paths where --gold is given).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hsg.environments.sciworld import catalog, make_task_set
from hsg.environments.sciworld.gold import packaged_experts
from hsg.protocol import Task

EXPLORE = ["look around", "teleport to kitchen", "look around", "inventory", "teleport to outside", "wait1"]


def cpu_ms(pids: list[int]) -> float:
    """CPU time that processes have used so far (Linux)."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in fields) * 1000 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["all"])
    parser.add_argument("--variations", type=int, default=4)
    parser.add_argument("--gold", action="store_true", help="lengths of gold paths where no list is packaged")
    options = parser.parse_args()

    task_set = make_task_set(tasks=options.tasks, num_engines=1)
    print(f"{'task':50} {'train':>5} {'dev':>4} {'load':>5} {'step':>5} {'first':>5} {'later':>5} {'expert':>6}")
    for warm, kind in [(False, "boil"), *((True, kind) for kind in catalog.select_tasks(options.tasks))]:
        train = catalog.variations(kind, "train")
        load, step, first, later, lengths = 0.0, 0.0, [], [], []
        for variation in catalog.spread(train, options.variations):
            task = Task(f"{kind}/{variation}", "train")
            known = packaged_experts().get(task.id)
            actions = task_set.expert_actions(task) if options.gold or known else None
            lengths += [len(actions)] if actions else []
            episode = task_set.create(task, seed=0)
            before = cpu_ms(task_set.engine_pids)
            first.append(len(episode.start().split()))
            loaded = cpu_ms(task_set.engine_pids)
            later += [len(episode.step(action).observation.split()) for action in EXPLORE]
            load, step = load + loaded - before, step + cpu_ms(task_set.engine_pids) - loaded
            episode.close()
        if warm:
            number = len(first)
            print(
                f"{kind:50} {len(train):5} {len(catalog.variations(kind, 'dev')):4} {load / number:5.0f} "
                f"{step / len(later):5.1f} {sum(first) / number:5.0f} {sum(later) / len(later):5.0f} "
                + (f"{sum(lengths) / len(lengths):6.1f}" if lengths else "     -"),
                flush=True,
            )
    task_set.close()


if __name__ == "__main__":
    main()
