"""Evaluate a policy as a benchmark reports it: whole splits, many samples, intervals, pass@k, per kind of task, in pairs.

    hsg evaluate runs/a --split test --num-samples 16 --k 1,4,16
    python experiments/evaluate.py --config experiments/configs/alfworld_qwen2.5-7b.yaml --model FOLDER --split valid_seen
    hsg evaluate runs/a --compare runs/b                             the same tasks and worlds for both

Sample s is the episode that seed `seed + s` meets (`seed`: that of --config or --set, else 0, not the run's own); the tasks
are the same for all.  What was played is kept line by line beside the result, so the same command goes on where it stopped,
and more samples add to those there are.  The 95 % interval is Wilson's over tasks, +- the spread between samples.
Deliberately absent: training, choosing among checkpoints.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.samples import SampleFile, compare, row_of, summarise, unsolved
from hsg import stopping
from hsg.arguments import Parser, refuse
from hsg.build import make_policy
from hsg.checks import require
from hsg.config import Config
from hsg.configfile import load_config, to_dict
from hsg.distributed import Distributed
from hsg.evaluation import evaluation_tasks, given_strategies, play_once
from hsg.protocol import Task, TaskSet
from hsg.rollout import Policy
from hsg.taskfile import write_task_file

NOT_PLAYED = (
    "run", "train", "optimizer", "update", "loss", "log", "checkpoint", "warmstart", "advantage", "reward", "tasks",
    "reflection", "distributed", "reinforce", "gigpo", "critic", "rnd",
)  # fmt: skip
"""Sections that change nothing about an evaluation's episodes."""


def find_model(given: str) -> tuple[str, Path | None]:
    """The model behind MODEL_OR_RUN and the run's own configuration: a run's newest checkpoint, one checkpoint, a model."""
    folder = Path(given)
    if (folder / "model" / "config.json").is_file():  # one checkpoint
        config = folder.parent.parent / "config.yaml"
        return str(folder / "model"), config if config.is_file() else None
    if (folder / "config.yaml").is_file():
        saved = sorted(folder.glob("checkpoints/iteration_*/model/config.json"))
        if not saved:
            raise ValueError(f"MODEL must have a checkpoint, got the run {given!r} without one; train it on")
        return str(saved[-1].parent), folder / "config.yaml"
    if not folder.exists() and any(folder.parent.glob("*/config.yaml")):  # before the model hub is asked for it
        raise ValueError(f"MODEL_OR_RUN must exist, got {given!r}; {str(folder.parent)!r} holds other runs")
    return given, None


def evaluate_split(
    config: Config,
    policy: Policy,
    task_set: TaskSet,
    tasks: Sequence[Task],
    distributed: Distributed,
    num_samples: int,
    *,
    file: SampleFile | None = None,
    strategies: Any = "own",
    label: str = "",
) -> list[dict[str, Any]]:
    """Rows of every task and sample (see `row_of`), the same on all ranks; what `file` holds is not played again."""
    done = distributed.from_main(file.done if file is not None else set())
    rows = distributed.from_main(list(file.rows) if file is not None else [])
    for sample in range(num_samples):
        todo = [task for task in tasks if (task.id, sample) not in done]
        if not todo:
            continue
        seed = config.seed + sample
        texts = given_strategies(config, policy, task_set, tasks, distributed, strategies, seed=seed)
        gathered = None if texts is None else distributed.gather(texts)
        text_of = None if gathered is None else dict(zip([task.id for task in tasks], gathered, strict=True))
        width = config.evaluation.batch_size * distributed.world_size
        for begin in range(0, len(todo), width):
            mine = distributed.share(todo[begin : begin + width])
            given = None if text_of is None else [text_of[task.id] for task in mine]
            name = f"{label} sample {sample + 1}/{num_samples}".strip()
            played = (
                play_once(config, policy, task_set, mine, seed=seed, strategies=given, description=name) if mine else []
            )
            fresh = distributed.gather([row_of(trajectory, sample) for trajectory in played])
            rows += fresh
            if file is not None:
                file.add(fresh)
    wanted = {task.id for task in tasks}
    return [row for row in rows if row["task_id"] in wanted and row["sample"] < num_samples]


def settings_of(config: Config, model: str, split: str, strategies: str) -> dict[str, Any]:
    """All that the episodes depend on. The number of samples is not among it: more of them add to those there are."""
    sections = {name: value for name, value in to_dict(config).items() if name not in NOT_PLAYED}
    sections["evaluation"] = {name: sections["evaluation"][name] for name in ("num_tasks", "temperature")}
    sections["model"] = {**sections["model"], "path": model}
    return {**sections, "split": split, "strategies": strategies}


def default_out(given: str, settings: dict[str, Any]) -> Path:
    """evaluations/<environment>-<split>-<hash of the settings>.json in the run folder, or here for other models."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(given) if (Path(given) / "config.yaml").is_file() else Path()
    return folder / "evaluations" / f"{settings['environment']['name']}-{settings['split']}-{digest}.json"


def evaluate_model(given: str, options: Namespace, distributed: Distributed) -> dict[str, dict[str, Any]]:
    """Split -> summary of one model; each is written as JSON, its samples beside it."""
    import environments

    model, own_config = find_model(given)
    if model == "nano":
        raise ValueError("MODEL must name a trained model, got nano, which has learned nothing; give a folder or a run")
    config = load_config(options.config or own_config, overrides_of(options, options.config or own_config))
    task_set = environments.make(config.environment.name, **config.environment.options)
    try:
        splits = options.split or [config.evaluation.split]
        key = "--split" if options.split else "evaluation.split"
        tasks = {split: evaluation_tasks(config, task_set, split, key) for split in splits}
        policy = make_policy(config, model, distributed.device)
        summaries = {}
        for split in splits:
            settings = settings_of(config, model, split, options.strategies)
            out = default_out(given, settings) if options.out is None else _numbered(options.out, split, len(splits))
            path = out.with_suffix(".samples.jsonl")
            opened = distributed.from_main_or_fail(functools.partial(SampleFile, path, settings))
            file = opened if distributed.is_main else None  # one rank writes
            rows = evaluate_split(
                config, policy, task_set, tasks[split], distributed, options.num_samples,
                file=file, strategies=options.strategies, label=split,
            )  # fmt: skip
            summaries[split] = {
                "model": model, "split": split, "strategies": options.strategies, "num_samples": options.num_samples,
                "worlds": {name: settings[name] for name in ("environment", "seed")},
                **summarise(rows, options.k, getattr(task_set, "groups", None)),
            }  # fmt: skip
            if distributed.is_main:
                out.write_text(json.dumps(summaries[split], indent=1), encoding="utf-8")
                summaries[split]["file"] = str(out)
        return summaries
    finally:
        task_set.close()


def overrides_of(options: Namespace, config_path: Any) -> list[str]:
    """--env, --num-tasks and --temperature as keys of the configuration, before --set."""
    # A run's seed is that of its training; two runs that are compared meet the same worlds.
    given = ["seed=0"] if options.config is None else []
    if options.env is not None:
        given.append(f"environment.name={options.env}")
        if config_path is not None and load_config(config_path).environment.name != options.env:
            given.append("environment.options={}")  # those of another environment
    if options.num_tasks is not None:
        given.append(f"evaluation.num_tasks={'null' if options.num_tasks == 'all' else options.num_tasks}")
    if options.temperature is not None:
        given.append(f"evaluation.temperature={options.temperature}")
    return given + options.set


def _numbered(out: Path, split: str, num_splits: int) -> Path:
    return out if num_splits == 1 else out.with_name(f"{out.stem}-{split}{out.suffix or '.json'}")


# ---------------------------------------------------------------------------------------------------------- tables


def print_summary(summary: dict[str, Any]) -> None:
    """A table: one line per kind of task, one per group, and one for all."""
    spread = summary["success_spread"]
    print(
        f"\n{summary['split']}: {summary['num_samples']} samples of each task, {summary['num_failed']} broken episodes"
        + ("" if spread is None else f", success +- {100 * spread:.1f} between samples")
    )
    ks = list(summary.get("pass_at_k", {}))
    print(
        f"{'':<46}{'tasks':>6}{'success %':>10}{'95 %':>13}{'score %':>9}{'turns':>7}"
        + "".join(f"{'pass@' + k:>9}" for k in ks)
    )
    for name, row in [*summary["by_kind"].items(), *summary["by_group"].items(), ("all", summary)]:
        _print_row(name or "(no kind)", row, ks)


def print_exploration(summary: dict[str, Any]) -> None:
    """How the samples differ: ends reached per task, entropy of the two kinds of tokens, what strategies cost."""
    names = {
        "distinct_outcomes": "different ends a task", "action_entropy": "nats a token of actions",
        "strategy_entropy": "of strategies", "tokens_per_turn": "tokens a turn",
        "strategy_tokens_per_turn": "of them strategy",
    }  # fmt: skip
    print("  ".join(f"{label} {summary[name]:.3g}" for name, label in names.items() if name in summary))


def _print_row(name: str, row: dict[str, Any], ks: Sequence[str]) -> None:
    if not row["num_tasks"]:
        print(f"{name:<46}{0:>6}   every episode failed")
        return
    low, high = row["success_interval"]
    shares = row.get("pass_at_k", {})
    print(
        f"{name:<46}{row['num_tasks']:>6}{100 * row['success']:>10.1f}{f'{100 * low:.1f}-{100 * high:.1f}':>13}"
        f"{100 * row['score']:>9.1f}{row['turns']:>7.1f}"
        + "".join(f"{100 * shares[k]:>9.1f}" if k in shares else f"{'-':>9}" for k in ks)
    )


def print_comparison(split: str, found: dict[str, Any], other: str) -> None:
    """Mean differences in points with their p-values."""
    print(f"\n{split}, against {other} on the same {found['num_tasks']} tasks:")
    for name in ("success", "score"):
        row = found[name]
        print(
            f"  {name:<8}{100 * row['difference']:>+7.1f} points, p = {row['p_value']:.3g} (sign flips over tasks; "
            f"better on {row['better']}, worse on {row['worse']})"
        )


# --------------------------------------------------------------------------------------------------------- command


def _whole_numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--k must be whole numbers with commas, got {text!r}; for example --k 1,4,16") from None
    return numbers


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: hsg evaluate runs/a --env sciworld --split test --num-samples 16 --k 1,4,16 --out a.json",
    )
    parser.add_argument(
        "given",
        nargs="?",
        metavar="MODEL_OR_RUN",
        help="run folder (newest checkpoint), checkpoint, model folder or hub id",
    )
    parser.add_argument("--model", help="the same; default: model.path of the configuration")
    parser.add_argument("--config", help="YAML with the differences from the defaults; default: the run's own")
    parser.add_argument("--env", help="environment.name")
    parser.add_argument("--split", "--splits", nargs="+", help="default: evaluation.split")
    parser.add_argument("--num-samples", type=int, default=3, metavar="N", help="samples of each task (3)")
    parser.add_argument("--k", default="1", help="pass@k for these k, at most N: 1,4,16")
    parser.add_argument(
        "--num-tasks", metavar="P|all", help="evaluation.num_tasks: tasks of a fixed shuffle of the split"
    )
    parser.add_argument("--temperature", type=float, help="evaluation.temperature; 0: greedy")
    parser.add_argument(
        "--strategies", choices=("own", "blank", "shuffled"), default="own", help="whose strategies are followed"
    )
    parser.add_argument("--compare", metavar="OTHER", help="another model or run, or a result of this command (.json)")
    parser.add_argument(
        "--save-unsolved",
        type=Path,
        metavar="FILE",
        help="tasks that no sample solved; of --split train: for tasks.file",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="result as JSON; default: evaluations/ in the run folder or here"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    options = parser.parse_args(arguments)
    if options.given and options.model:
        raise ValueError(f"MODEL must be given once, got {options.given!r} and --model {options.model!r}")
    options.given = options.given or options.model
    if options.num_samples < 1:
        raise ValueError(f"--num-samples must be >= 1, got {options.num_samples}")
    options.k = _whole_numbers(options.k)
    if options.k[0] < 1 or options.k[-1] > options.num_samples:
        raise ValueError(
            f"--k must be in 1..{options.num_samples} (--num-samples), got {options.k[-1]}; draw more samples"
        )
    for name in ("out", "save_unsolved"):  # before anything is played
        path = getattr(options, name)
        if path is not None and (not path.name or path.is_dir()):
            raise ValueError(f"--{name.replace('_', '-')} must be a file, got {str(path)!r}; name a file in it")
    if options.save_unsolved is not None and not options.save_unsolved.absolute().parent.is_dir():
        raise ValueError(f"--save-unsolved must be in a folder that is there, got {str(options.save_unsolved)!r}")
    if options.num_tasks is not None and options.num_tasks != "all" and not options.num_tasks.isdecimal():
        raise ValueError(f"--num-tasks must be a whole number or all, got {options.num_tasks!r}")
    if options.given is None:
        if options.config is None:
            raise ValueError("MODEL_OR_RUN must be given, got none; for example hsg evaluate runs/a")
        options.given = load_config(options.config, options.set).model.path
    return options


def run(options: Namespace) -> None:
    """Evaluate, compare, print, write."""
    distributed = Distributed()
    try:
        summaries = evaluate_model(options.given, options, distributed)
        others: dict[str, dict[str, Any]] = {}
        if options.compare is not None and options.compare.endswith(".json"):
            others = read_result(Path(options.compare))
        elif options.compare is not None:
            theirs = Namespace(**{**vars(options), "out": None})
            others = evaluate_model(options.compare, theirs, distributed)
        if not distributed.is_main:
            return
        for split, summary in summaries.items():
            print_summary(summary)
            print_exploration(summary)
            if options.compare is not None:
                if split not in others:
                    raise ValueError(f"--compare must have played split {split!r}, got {', '.join(others)}")
                check_worlds(summary["worlds"], others[split]["worlds"])
                summary["comparison"] = {"with": options.compare, **compare(summary, others[split])}
                print_comparison(split, summary["comparison"], options.compare)
            file = Path(summary.pop("file"))
            file.write_text(json.dumps(summary, indent=1), encoding="utf-8")
            print(f"\nresult:  {file}")
        if options.save_unsolved is not None:
            tasks = [task for summary in summaries.values() for task in summary["tasks"]]
            hard = unsolved({task["task_id"]: (task["num_samples"], task["num_solved"]) for task in tasks})
            write_task_file(
                options.save_unsolved, hard, f"not solved in {options.num_samples} samples by {options.given}"
            )
            print(f"unsolved: {len(hard)} tasks in {options.save_unsolved}")
    finally:
        distributed.close()


def read_result(path: Path) -> dict[str, dict[str, Any]]:
    """Split -> summary of a file that this command wrote."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        for task in summary["tasks"]:
            [task[name] for name in ("task_id", "num_samples", "success", "score")]  # what `compare` reads
        return {summary["split"]: {name: summary[name] for name in ("tasks", "worlds")}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--compare must be a result of hsg evaluate, got {str(path)!r}: {error}") from None


def check_worlds(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """ValueError where samples of two results did not meet the same episodes: their differences would not be the models'."""
    for name, value in mine.items():
        require(
            theirs.get(name) == value,
            "--compare",
            f"played with {name} {value!r}",
            theirs.get(name),
            "evaluate it with that, by --set",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 1 the evaluation itself failed, 130 or 143 stopped (the same command goes on)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with stopping.handlers():
            run(parse(arguments))
    except ValueError as error:
        return refuse(error)
    except (RuntimeError, OSError) as error:
        return refuse(error, 1)
    except stopping.Stopped as stopped:
        print(f"{stopped}; the same command goes on where it was", file=sys.stderr)
        return stopped.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
