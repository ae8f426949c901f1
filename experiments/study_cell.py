"""One cell of a study, in a process of its own: train, then judge by many samples of held-out tasks.

    python experiments/study_cell.py runs/studies CELL_AS_JSON        what study.py starts

    runs/studies/runs/KEY           its run folder, as of any run
    runs/studies/cells/KEY.json     measures, measures by kind of task, learning curve, means of metrics, evaluations

Deliberately absent: resuming inside a cell (what was interrupted begins anew), more than one rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from experiments.curves import learning_curve, read_lines
from experiments.study_file import CONFIGS, Cell

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def result_path(out: Path, cell: Cell) -> Path:
    """Where a finished cell's result is, whichever study asked for it."""
    return out / "cells" / f"{cell.key}.json"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """The file, opened to append, and nobody else's as long as it is open here or in a process that inherited it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
    """Train one cell and judge it by samples. Returns what its file holds."""
    import torch

    import environments
    from experiments.demonstrations import digest
    from experiments.run import check_before_work, final_evaluations, prepare_model
    from experiments.warmstart import settings_that_matter
    from hsg.configfile import load_config, to_dict
    from hsg.distributed import Distributed
    from hsg.evaluation import evaluation_tasks, play_samples
    from hsg.models import load_encoder
    from hsg.tracking import RunFolder
    from hsg.trainer import Trainer

    torch.set_num_threads(1)  # cells run side by side
    quiet = ["log.wandb=disabled", "log.quiet=true", f"run.dir={out / 'runs'}", f"run.name={cell.key}"]
    config = load_config(CONFIGS / cell.base, [*cell.overrides, *quiet])
    task_set = environments.make(config.environment.name, **config.environment.options)
    run = trainer = None
    began = time.process_time()
    try:
        check_before_work(config, task_set, str(config.run.name))
        distributed = Distributed()
        start = digest({"environment": to_dict(config.environment), **settings_that_matter(config)})
        with locked(out / "cells" / f"warmstart-{start}.lock"):  # one cell makes it, the others find it
            model_path = prepare_model(config, task_set, distributed)
        trainer = Trainer(config, task_set, model_path, distributed, None)
        if config.train.iterations:
            trainer.run = run = RunFolder(config, str(config.run.name))
            if config.evaluation.initial:
                trainer.evaluate(0, "before training")
            final_evaluations(config, task_set, trainer, trainer.train(), model_path)
        trained_seconds = time.process_time() - began
        tasks = evaluation_tasks(config, task_set, cell.split)
        embed = trainer.collector.embed or load_encoder(config.model.encoder, distributed.device).embed
        samples = play_samples(config, trainer.policy, task_set, tasks, cell.samples)
        logged = [] if run is None else [read_lines(run.path, name) for name in ("metrics.jsonl", "eval.jsonl")]
    finally:
        if trainer is not None:
            trainer.close()
        if run is not None:
            run.close()
        task_set.close()
    return {
        "cell": cell.name, "seed": cell.seed, "overrides": list(cell.overrides),
        "train_cpu_seconds": trained_seconds, "cpu_seconds": time.process_time() - began,
        **judge_samples(samples, embed), "curve": learning_curve(*logged) if logged else {},
        "metrics": summarise_metrics(logged[0]) if logged else {},
        "evaluations": {e["label"]: e for e in logged[1]} if logged else {},
    }  # fmt: skip


def judge_samples(samples: Sequence[Sequence[Any]], embed: Any) -> dict[str, Any]:
    """Measures of all tasks and of every kind of task, and (whole samples, solved) of every task."""
    from hsg.measures import sample_measures

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
        "first": {name: value for name, value in lines[0].items()} if lines else {},
        "mean": {name: statistics.fmean(held) for name, held in values.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cell; its result is there, whole, or not at all."""
    folder, given = sys.argv[1:] if arguments is None else arguments
    fields = json.loads(given)
    cell = Cell(**{**fields, "overrides": tuple(fields["overrides"])})
    path = result_path(Path(folder), cell)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(run_cell(cell, Path(folder))), encoding="utf-8")
    os.replace(draft, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
