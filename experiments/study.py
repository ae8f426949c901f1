"""A study: many runs that differ in a few options, one table. Finished cells are not run again, equal cells run once.

    python experiments/study.py experiments/studies/ablate-delta.yaml --scale toy --jobs 2 --seeds 0,1,2

    study file      base, options of every cell, cells: name -> options that differ               (studies/file.py)
    one cell, seed  train -> many samples of held-out tasks -> runs/studies/cells/KEY.json        (studies/cell.py)
    all of them     runs/studies/NAME/table.csv, table.md, curves.csv, plot.png                   (studies/table.py)

A cell's KEY is the hash of its resolved configuration and its seed: studies share the cells that are equal in them.
Deliberately absent: a scheduler for clusters (`--dry-run` checks the cells and prints their commands, studies/plan.py;
`--collect` makes the table of what those left, studies/elsewhere.py), a search over options.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require
from hsg.experiments.reading.curves import REACHED, SPENT_SIDE_BY_SIDE, is_number
from hsg.experiments.studies.cell import result_path
from hsg.experiments.studies.elsewhere import collect
from hsg.experiments.studies.file import Cell, Study, make_cells, read_study
from hsg.experiments.studies.plan import check_splits, dry_run
from hsg.experiments.studies.table import write_results
from hsg.ranks import stopping
from hsg.run.locks import locked


def run_study(study: Study, cells: Sequence[Cell], out: Path, jobs: int) -> list[Cell]:
    """Run the cells that have no result yet, `jobs` at a time. Returns those that failed."""
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be written, got {str(out)!r}: {error.strerror}") from None
    todo = list({cell.key: cell for cell in cells if not result_path(out, cell).is_file()}.values())
    print(f"{study.title}: {len(cells)} cells, {len(todo)} to run, {jobs} at a time -> {out / study.name}", flush=True)

    def one(cell: Cell) -> Cell | None:
        began = time.monotonic()
        log = out / "cells" / f"{cell.key}.log"
        print(f"  {cell.name} seed {cell.seed}: begun, see {log}", flush=True)
        # The process of the cell inherits the lock: it lasts as long as the process, even where this one is killed.
        with locked(log) as sink:
            if not result_path(out, cell).is_file():  # another study may have run the very same cell meanwhile
                process = _start_cell(cell, out, jobs, sink)
                running.add(process)
                if passed_on:  # this one had not begun when the others were told
                    process.send_signal(passed_on[0])
                process.wait()
                running.discard(process)
        good = result_path(out, cell).is_file()
        word = "done" if good else "stopped" if passed_on else f"FAILED, see {log}"
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


def _start_cell(cell: Cell, out: Path, jobs: int, log: IO[str]) -> subprocess.Popen[bytes]:
    """Begin one cell in a process of its own; its result is there at the end where it went well."""
    # What an interrupted cell left behind is not the run that its result will speak of.
    shutil.rmtree(out / "runs" / cell.key, ignore_errors=True)
    log.truncate(0)
    return subprocess.Popen(
        [sys.executable, "-m", "hsg.experiments.studies.cell", str(out), json.dumps(dataclasses.asdict(cell))],
        stdout=log, stderr=subprocess.STDOUT, env=environment_of_cells(jobs),
    )  # fmt: skip


def environment_of_cells(jobs: int) -> dict[str, str]:
    """One thread each; cells that run side by side would crowd a GPU, so only a lone one sees it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": ""} if jobs > 1 else {})}


def _result(path: Path) -> dict[str, Any]:
    """What `result_of` returned. ValueError where the file holds something else."""
    try:
        result = json.loads(path.read_bytes())
        whole = isinstance(result["versions"], dict) and {"commit", "torch"} <= result["versions"].keys()
        whole = whole and isinstance(result["seed"], int) and isinstance(result["measures"], dict)
        whole = whole and all(is_number(share) for share in result["measures"].get("pass_at_k", []))
        whole = whole and all(len(counts) == 2 for counts in result["per_task"].values())
        drawn = {*SPENT_SIDE_BY_SIDE, *REACHED}
        whole = whole and (not result["curve"] or drawn <= result["curve"].keys())
        columns = list(result["curve"].values())
        whole = whole and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns)
        whole = whole and all(value is None or is_number(value) for column in columns for value in column)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    remedy = "delete that file, and the cell is run again"
    require(whole, "a cell's result", "what this command wrote", str(path), remedy)
    return result


def changed(study: Study, overrides: Sequence[str], base: str | None = None) -> Study:
    """The study under a name of its own where every cell is changed: its table must not pass for the study's."""
    words = [*([] if base is None else [f"base={base}"]), *overrides]
    if not words:
        return study
    whole = "+".join(words)
    word = re.sub(r"[^A-Za-z0-9_.=,+-]+", "_", whole)[:100]
    if word != whole:  # cut or rewritten, two lists could come to the same
        word += "+" + hashlib.sha256(whole.encode()).hexdigest()[:8]
    title = f"{study.title} ({', '.join(words)})"
    return dataclasses.replace(study, name=f"{study.name}+{word}", title=title, base=base or study.base)


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
    parser.add_argument("--scale", help="toy, cpu or paper, for a study of several sizes (default toy)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time (default 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of results (runs/studies)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="option of every cell, repeatable"
    )
    parser.add_argument("--base", metavar="FILE", help="of experiments/configs, in the place of the study's own base")
    parser.add_argument("--dry-run", action="store_true", help="check every cell and print its command, run none")
    parser.add_argument("--collect", action="store_true", help="run none, make the table of what those commands left")
    options = parser.parse_args(arguments)
    require(options.jobs >= 1, "--jobs", ">= 1", options.jobs)
    study = changed(read_study(options.study, options.scale), options.set, options.base)
    cells = make_cells(study, _seeds(options.seeds), options.set)
    if options.dry_run:
        dry_run(study, cells)
        return 0
    failed: list[Cell] = []
    if options.collect:
        missing = [cell for cell in cells if not collect(cell, options.out.parent, options.out)]
        for cell in missing:
            print(f"  {cell.name} seed {cell.seed}: not there yet")
        require(len(missing) < len(cells), "--out", "where a cell was run and evaluated", str(options.out))
    else:
        check_splits(cells)
        with stopping.handlers():
            failed = run_study(study, cells, options.out, options.jobs)
    # Equal cells share one result, under the name that each has in this study.
    there = [cell for cell in cells if result_path(options.out, cell).is_file()]
    results = [_result(result_path(options.out, cell)) | {"cell": cell.name, "key": cell.key} for cell in there]
    if results:
        print(write_results(study, results, options.out / study.name))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
