"""One cell of a study, in a process of its own: train, then judge by many samples of held-out tasks.

    python experiments/studies/cell.py runs/studies CELL_AS_JSON        what study.py starts

    runs/studies/runs/KEY           its run folder, as of any run
    runs/studies/cells/KEY.json     measures, measures by kind of task, learning curve, means of metrics, evaluations

Deliberately absent: resuming inside a cell (what was interrupted begins anew), more than one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.config.checks import require
from hsg.experiments.reading.curves import learning_curve, read_evaluations, read_metrics
from hsg.experiments.studies.file import CONFIGS, Cell
from hsg.run.files import write_whole
from hsg.run.origin import commit

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def result_path(out: Path, cell: Cell) -> Path:
    """Where a finished cell's result is, whichever study asked for it."""
    return out / "cells" / f"{cell.key}.json"


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
    """Train one cell and judge it by samples. Returns what its file holds."""
    import torch

    from hsg.config.loading import load_config
    from hsg.experiments.run import final_evaluations, opened
    from hsg.measure.evaluation import evaluation_tasks, play_samples
    from hsg.model.models import load_encoder
    from hsg.ranks.distributed import Distributed

    torch.set_num_threads(1)  # cells run side by side
    quiet = ["log.wandb=disabled", "log.quiet=true", f"run.dir={json.dumps(str(out / 'runs'))}", f"run.name={cell.key}"]
    config = load_config(CONFIGS / cell.base, [*cell.overrides, *quiet])
    trains = config.train.iterations > 0
    began = time.process_time()
    versions = {"commit": commit(), "torch": torch.__version__}  # now: the files may change while it runs
    print(f"{cell.name}, seed {cell.seed}: begun; where no warm start is cached, it comes first: minutes", flush=True)
    with opened(config, Distributed(), cell.key, logged=trains) as (task_set, trainer):
        if trains:
            if config.evaluation.initial:
                trainer.evaluate(0, "before training")
            final_evaluations(config, task_set, trainer, trainer.train())
        tasks = evaluation_tasks(config, task_set, cell.split, "split")
        embed = trainer.collector.embed or load_encoder(config.model.encoder, trainer.distributed.device).embed
        samples = play_samples(config, trainer.policy, task_set, tasks, cell.samples)
    run = out / "runs" / cell.key
    require(not trains or (run / "metrics.jsonl").is_file(), "the run of a cell", "with metrics.jsonl", str(run))
    judged = {"versions": versions, "cpu_seconds": time.process_time() - began, **judge_samples(samples, embed)}
    return result_of(cell, judged, (read_metrics(run), read_evaluations(run)) if trains else None)


def result_of(
    cell: Cell, judged: Mapping[str, Any], logged: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None
) -> dict[str, Any]:
    """What a cell's file holds, from the samples that judge it and from (metrics, evaluations) of its run, if it had one."""
    return {
        "cell": cell.name, "seed": cell.seed, "overrides": list(cell.overrides), **judged,
        "curve": learning_curve(*logged) if logged else {},
        "metrics": summarise_metrics(logged[0]) if logged else {},
        "evaluations": {e["label"]: e for e in logged[1]} if logged else {},
    }  # fmt: skip


def judge_samples(samples: Sequence[Sequence[Any]], embed: Any) -> dict[str, Any]:
    """Measures of all tasks and of every kind of task, and (whole samples, solved) of every task."""
    from hsg.measure.measures import sample_measures

    by_kind: dict[str, list[Sequence[Any]]] = defaultdict(list)
    for row in samples:
        by_kind[row[0].task.kind].append(row)
    return {
        "measures": sample_measures(samples, embed),
        "by_kind": {kind: sample_measures(rows, None) for kind, rows in sorted(by_kind.items())},
        "per_task": {row[0].task.id: [sum(t.valid for t in row), sum(t.success for t in row)] for row in samples},
    }


def summarise_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Every metric of training: at the first iteration, where equal models are compared, and its mean over all."""
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in line.items():
            values[name].append(value)
    return {
        "first": dict(lines[0]) if lines else {},
        "mean": {name: statistics.fmean(held) for name, held in values.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cell; its result is there, whole, or not at all."""
    folder, given = sys.argv[1:] if arguments is None else arguments
    fields = json.loads(given)
    cell = Cell(**{**fields, "overrides": tuple(fields["overrides"])})
    write_whole(result_path(Path(folder), cell), json.dumps(run_cell(cell, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
