"""Cells that are run on another machine: the commands of each, and its result from what they left behind.

    commands   train into runs/KEY; play the samples that judge it, into runs/studies/evaluations/KEY.json
    collect    both -> runs/studies/cells/KEY.json, which the table reads as if the study had run the cell itself

Deliberately absent: copying files between machines, distances between strategies (an evaluation keeps no texts).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hsg.config.checks import require
from hsg.config.loading import load_config
from hsg.experiments.reading.curves import read_evaluations, read_metrics
from hsg.experiments.studies.cell import result_of, result_path
from hsg.experiments.studies.file import CONFIGS, Cell, Study
from hsg.run.files import write_whole

RUNS, OUT = Path("runs"), Path("runs/studies")


def is_trained(cell: Cell) -> bool:
    return load_config(CONFIGS / cell.base, cell.overrides).train.iterations > 0


def commands(study: Study, cell: Cell) -> list[str]:
    """The shell commands of one cell; equal cells of several studies are one run, named by their key."""
    launch = "accelerate launch" + (
        "" if study.launch is None else f" --config_file experiments/accelerate/{study.launch}"
    )
    options = " ".join(f"--set '{option}'" for option in cell.overrides)
    config = f"--config experiments/configs/{cell.base} {options}"
    samples = f"--split {cell.split} --num-samples {cell.samples} --k {','.join(map(str, range(1, cell.samples + 1)))}"
    samples += f" --out {evaluation_path(OUT, cell)}"
    if not is_trained(cell):
        return [f"{launch} experiments/evaluate.py {config} {samples}"]
    return [
        f"{launch} experiments/run.py --resume auto {config} --set 'run.name={cell.key}'",
        f"{launch} experiments/evaluate.py {RUNS / cell.key} {samples}",
    ]


def evaluation_path(out: Path, cell: Cell) -> Path:
    return out / "evaluations" / f"{cell.key}.json"


def collect(cell: Cell, runs: Path, out: Path) -> bool:
    """Write the cell's result from its run and its evaluation. Whether there is one, now or from before."""
    path, run = evaluation_path(out, cell), runs / cell.key
    trained = is_trained(cell)
    if not path.is_file() or (trained and not (run / "metrics.jsonl").is_file()):
        return result_path(out, cell).is_file()
    logged = (read_metrics(run), read_evaluations(run)) if trained else None
    result_path(out, cell).parent.mkdir(parents=True, exist_ok=True)
    write_whole(result_path(out, cell), json.dumps(result_of(cell, judged(path, cell), logged)))
    return True


def judged(path: Path, cell: Cell) -> dict[str, Any]:
    """What `cell.judge_samples` says, from a file of `hsg evaluate`. ValueError where it says something else."""
    try:
        found = json.loads(path.read_bytes())
        shares = [found["pass_at_k"][str(k)] for k in range(1, cell.samples + 1)]
        tasks = {task["task_id"]: [task["num_samples"], task["num_solved"]] for task in found["tasks"]}
    except (ValueError, KeyError, TypeError):
        require(False, "an evaluation", "what the printed command writes", str(path), "run that command again")
        raise
    names = (
        "score", "distinct_outcomes", "tokens_per_turn", "strategy_tokens_per_turn", "strategy_entropy", "action_entropy",
    )  # fmt: skip
    measures = {"pass_at_k": shares, **{name: found[name] for name in names if name in found}}
    unknown = {"commit": "unknown", "torch": "unknown"}
    return {"versions": unknown, "measures": measures, "by_kind": {}, "per_task": tasks}
