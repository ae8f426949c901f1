"""A study: many runs that differ in a few options, one table. Finished cells are not run again, equal cells run once.

    python experiments/study.py experiments/studies/sge_toy.yaml --jobs 2 --seeds 0,1,2

    study file      base: a config    set: options of every cell    cells: name -> options that differ
    one cell, seed  train -> many samples of held-out tasks -> runs/studies/NAME/cells/KEY.json       a process of its own
    all of them     table.csv, table.md, plot.png

A cell's KEY is the hash of its resolved configuration, so a cell of another study with the same one is found there too.
Deliberately absent: a scheduler for clusters (`--dry-run` prints the commands), a search over options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.arguments import Parser, refuse
from experiments.curves import read_lines
from experiments.study_file import CONFIGS, Cell, Study, make_cells, read_study
from experiments.study_table import write_results
from hsg import stopping
from hsg.checks import require

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# ------------------------------------------------------------------------------------------------------------- one cell


def run_cell(study: Study, cell: Cell, out: Path) -> dict[str, Any]:
    """Train one cell and judge it by samples. Returns what its file holds."""
    import torch

    import environments
    from experiments.run import check_before_work, prepare_model
    from hsg.configfile import load_config
    from hsg.distributed import Distributed
    from hsg.evaluation import evaluation_tasks, play_samples
    from hsg.models import load_encoder
    from hsg.tracking import RunFolder
    from hsg.trainer import Trainer

    torch.set_num_threads(1)  # cells run side by side
    quiet = ["log.wandb=disabled", "log.quiet=true", f"run.dir={out / 'runs'}", f"run.name={cell.key}"]
    config = load_config(CONFIGS / study.base, [*cell.overrides, *quiet])
    task_set = environments.make(config.environment.name, **config.environment.options)
    run = trainer = None
    began = time.process_time()
    try:
        check_before_work(config, task_set, str(config.run.name))
        distributed = Distributed()
        model_path = prepare_model(config, task_set, distributed)
        trainer = Trainer(config, task_set, model_path, distributed, None)
        if config.train.iterations:
            trainer.run = run = RunFolder(config, str(config.run.name))
            if config.evaluation.initial:
                trainer.evaluate(0, "before training")
            iterations = trainer.train()
            if config.evaluation.final:
                trainer.evaluate(iterations, "after training")
        trained_seconds = time.process_time() - began
        tasks = evaluation_tasks(config, task_set, study.split)
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


def learning_curve(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()
) -> dict[str, list[float | None]]:
    """What a run had spent after every iteration, what its rollouts came to, and what its evaluations did.

    Rollouts that were dropped are paid for and not counted among those that succeeded, so methods that drop some are
    compared by evaluation/success. An evaluation before training is the first point, at no cost.
    """
    reached = {e["iteration"]: e for e in evaluations}
    curve: dict[str, list[float | None]] = defaultdict(list)
    spent = dict.fromkeys(("environment_turns", "sampled_tokens", "seconds"), 0.0)
    for line in [*([{}] if 0 in reached else []), *lines]:
        iteration = line["iteration"] + 1 if line else 0
        if line:
            spent["environment_turns"] += line["cost/environment_turns"]
            spent["sampled_tokens"] += line["cost/sampled_tokens"]
            spent["seconds"] += line["time/iteration_seconds"]
        held_out = reached.get(iteration, {})
        for name, value in (
            ("iteration", iteration), *spent.items(),
            *((n, line.get(n)) for n in ("reward/success", "reward/outcome", "reward/score")),
            *((f"evaluation/{n}", held_out.get(n)) for n in ("success", "score")),
        ):  # fmt: skip
            curve[name].append(value)
    return dict(curve)


# ------------------------------------------------------------------------------------------------------------ all cells


def run_study(study_path: Path, study: Study, cells: Sequence[Cell], out: Path, jobs: int) -> list[Cell]:
    """Run the cells that have no result yet, `jobs` at a time. Returns those that failed."""
    import shutil

    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be written, got {str(out)!r}: {error.strerror}") from None
    todo = list({cell.key: cell for cell in cells if not result_path(out, cell).is_file()}.values())
    print(f"{study.title}: {len(cells)} cells, {len(todo)} to run, {jobs} at a time -> {out}", flush=True)

    def one(cell: Cell) -> Cell | None:
        # What an interrupted cell left behind is not the run that its result will speak of.
        shutil.rmtree(out / "runs" / cell.key, ignore_errors=True)
        log = out / "cells" / f"{cell.key}.log"
        began = time.monotonic()
        arguments = [str(study_path), "--out", str(out), "--cell", json.dumps(dataclasses.asdict(cell))]
        with log.open("w", encoding="utf-8") as sink:
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments], stdout=sink, stderr=subprocess.STDOUT,
                env=environment_of_cells(jobs),
            )  # fmt: skip
        running.add(process)
        if passed_on:  # this one had not begun when the others were told
            process.send_signal(passed_on[0])
        status = process.wait()
        running.discard(process)
        good = status == 0 and result_path(out, cell).is_file()
        word = "done" if good else f"FAILED, see {log}"
        print(f"  {cell.name} seed {cell.seed}: {word} ({time.monotonic() - began:.0f} s)", flush=True)
        return None if good else cell

    running: set[subprocess.Popen[bytes]] = set()
    passed_on: list[int] = []  # the signal that ends the study
    pool = ThreadPoolExecutor(jobs)
    try:
        return [cell for cell in pool.map(one, todo) if cell is not None]
    except stopping.Stopped:
        passed_on.append(stopping.received())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.send_signal(passed_on[0])
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # until the cells that run have ended


def environment_of_cells(jobs: int) -> dict[str, str]:
    """One thread each; cells that run side by side would crowd a GPU, so only a lone one sees it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": ""} if jobs > 1 else {})}


def result_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.key}.json"


def _result(path: Path) -> dict[str, Any]:
    """What `run_cell` returned. ValueError where the file holds something else."""
    try:
        result = json.loads(path.read_bytes())
    except ValueError:
        result = None
    whole = isinstance(result, dict) and {"seed", "measures", "per_task", "curve"} <= result.keys()
    require(
        whole, "a cell's result", "what this command wrote", str(path), "delete that file, and the cell is run again"
    )
    return result


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--seeds must be whole numbers with commas, got {text!r}; for example --seeds 0,1,2"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a cell failed, 2 bad input, 130 or 143 stopped by a signal (the same command goes on)."""
    try:
        return _main(arguments)
    except stopping.Stopped as stopped:
        print(f"{stopped}; the same command goes on with the cells that have no result", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the cells that have no result", file=sys.stderr)
        return 130
    except ValueError as error:
        return refuse(error)
    except OSError as error:  # a full disk, say
        return refuse(error, 1)


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="a file of experiments/studies")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time (default 1)")
    parser.add_argument("--out", type=Path, help="folder of results (default runs/studies/NAME)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="option of every cell, repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command of every cell instead of running it")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    study = read_study(options.study)
    out = options.out or Path("runs/studies") / study.name
    if options.cell:
        given = json.loads(options.cell)
        cell = Cell(**{**given, "overrides": tuple(given["overrides"])})
        path = result_path(out, cell)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(run_cell(study, cell, out)), encoding="utf-8")
        os.replace(draft, path)
        return 0
    cells = make_cells(study, _seeds(options.seeds), options.set)
    if options.dry_run:
        for cell in cells:
            config = Path("experiments/configs") / study.base
            print(f"accelerate launch experiments/run.py --config {config}", *(f"--set '{o}'" for o in cell.overrides))
        return 0
    with stopping.handlers():
        failed = run_study(options.study, study, cells, out, max(1, options.jobs))
    # Equal cells share one result, under the name that each has in this study.
    there = [cell for cell in cells if result_path(out, cell).is_file()]
    results = [_result(result_path(out, cell)) | {"cell": cell.name} for cell in there]
    if results:
        print(write_results(study, results, out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
