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
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require
from hsg.config.loading import load_config
from hsg.config.options import Config
from hsg.experiments.evaluating.comparison import check_worlds, compare, other_settings, read_result, told
from hsg.experiments.evaluating.evaluated_model import Evaluation, asked_of
from hsg.experiments.evaluating.samples import SampleFile, row_of, sample_path, summarise, unsolved
from hsg.measure.evaluation import evaluation_tasks, given_strategies, play_once
from hsg.model.models import load_tokenizer
from hsg.model.policy import Policy
from hsg.protocol import Task, TaskSet
from hsg.ranks import stopping
from hsg.ranks.distributed import Distributed
from hsg.run.build import load_policy
from hsg.run.files import write_whole
from hsg.run.taskfile import write_task_file


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
    """Rows of every task and sample (see `row_of`), the same on all ranks; what `file` holds is not played again.

    Where it holds more samples than are asked for, they count too: nobody pays for a worse figure than there is.
    """
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
    return [row for row in rows if row["task_id"] in wanted]


def evaluate_model(
    asked: Evaluation, task_set: TaskSet, tasks: dict[str, list[Task]], options: Namespace, distributed: Distributed
) -> dict[str, dict[str, Any]]:
    """Split -> summary of one model; each is written as JSON, its samples beside it."""
    if distributed.is_main:
        print(f"model:   {asked.model}", flush=True)  # of a run: which of its checkpoints
    policy = load_policy(asked.config, asked.model, distributed.device)
    summaries = {}
    for split, settings in asked.settings.items():
        opened = distributed.from_main_or_fail(functools.partial(open_samples, asked, split))
        rows = evaluate_split(
            asked.config, policy, task_set, tasks[split], distributed, options.num_samples,
            file=opened if distributed.is_main else None,  # one rank writes
            strategies=options.strategies, label=split,
        )  # fmt: skip
        before = read_before(asked.outs[split], settings)
        ks = sorted({*options.k, *map(int, before.get("pass_at_k", ()))})
        summaries[split] = {
            "model": asked.model, "split": split, "strategies": options.strategies,
            "num_samples": 1 + max(row["sample"] for row in rows), "settings": settings,
            **summarise(rows, ks, getattr(task_set, "groups", None)),
            "comparisons": before.get("comparisons", {}),
        }  # fmt: skip
        if distributed.is_main:
            write_whole(asked.outs[split], json.dumps(summaries[split], indent=1))
    return summaries


def read_before(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result that an earlier command left of the same settings: what it measured stays in the new one."""
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # none, or half of one: all but comparisons follows from the samples
        return {}
    return found if isinstance(found, dict) and found.get("settings") == settings else {}


def open_samples(asked: Evaluation, split: str) -> SampleFile:
    """The samples there are of a split. ValueError where neither they nor the result beside them could be written."""
    out = asked.outs[split]
    require(out.is_file() or not out.exists(), "--out", "a file", str(out), "name another one")
    return SampleFile(sample_path(out), asked.settings[split])


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
        "distinct_outcomes": "different outcomes per task", "action_entropy": "nats per action token",
        "strategy_entropy": "nats per strategy token", "tokens_per_turn": "tokens per turn",
        "strategy_tokens_per_turn": "of them in strategies",
    }  # fmt: skip
    in_turns = bool(summary.get("strategy_tokens_per_turn"))  # else an episode has its one, or none
    shown = {k: v for k, v in names.items() if k in summary and (in_turns or k != "strategy_tokens_per_turn")}
    print("  ".join(f"{label} {summary[name]:.3g}" for name, label in shown.items()))


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
    """Mean differences in points with their p-values, and what else than the weights they may come from."""
    print(f"\n{split}, against {other} on the same {found['num_tasks']} tasks:")
    for name in ("success", "score"):
        row = found[name]
        print(
            f"  {name:<8}{100 * row['difference']:>+7.1f} points, p = {row['p_value']:.3g} (sign flips over tasks; "
            f"better on {row['better']}, worse on {row['worse']})"
        )
    if found["other_settings"] != {}:
        print(f"  settings that differ: {told(found['other_settings'])}")


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
    rule = f"in 1..{options.num_samples} (--num-samples)"
    require(options.k[0] >= 1, "--k", rule, options.k[0], "pass@1 is the share that one sample solves")
    require(options.k[-1] <= options.num_samples, "--k", rule, options.k[-1], "draw more samples")
    for name in ("out", "save_unsolved"):  # before anything is played
        path = getattr(options, name)
        if path is not None and (not path.name or path.is_dir()):
            raise ValueError(f"--{name.replace('_', '-')} must be a file, got {str(path)!r}; name a file in it")
    if options.save_unsolved is not None:
        try:
            with tempfile.TemporaryFile(dir=options.save_unsolved.absolute().parent):
                pass
        except OSError as error:
            reason = f"got {str(options.save_unsolved)!r}: {error.strerror}"
            raise ValueError(f"--save-unsolved must be in a folder that can be written to, {reason}") from None
    if options.num_tasks is not None and options.num_tasks != "all" and not options.num_tasks.isdecimal():
        raise ValueError(f"--num-tasks must be a whole number or all, got {options.num_tasks!r}")
    if options.given is None:
        if options.config is None:
            raise ValueError("MODEL_OR_RUN must be given, got none; for example hsg evaluate runs/a")
        options.given = load_config(options.config, options.set).model.path
    return options


def ask(options: Namespace) -> tuple[Evaluation, Evaluation | None, dict[str, dict[str, Any]]]:
    """What is played, for MODEL_OR_RUN and for the other model (None: its result is there), and split -> the other's
    settings and, of a result, tasks. ValueError where the two cannot be compared.
    """
    mine, theirs = asked_of(options.given, options, options.out), None
    others: dict[str, dict[str, Any]] = {}
    if options.compare is None:
        return mine, None, others
    if options.compare.endswith(".json") and not Path(options.compare).is_dir():
        others = read_result(Path(options.compare))
    else:
        theirs = asked_of(options.compare, options, None)
        # A hub id that is none is noticed now, and not when the first model has played for hours.
        load_tokenizer(theirs.model, trust_remote_code=theirs.config.model.trust_remote_code, key="--compare")
        others = {split: {"settings": settings} for split, settings in theirs.settings.items()}
    for split, settings in mine.settings.items():
        require(
            split in others, "--compare", f"played on the split {split!r}", ", ".join(others), "choose it by --split"
        )
        check_worlds(settings, others[split]["settings"])
    return mine, theirs, others


def run(options: Namespace) -> None:
    """Evaluate, compare, print, write."""
    from hsg import environments

    distributed = Distributed()
    try:
        mine, theirs, others = distributed.from_main_or_fail(functools.partial(ask, options))
        models = [mine] if theirs is None else [mine, theirs]
        # One environment for both: they meet the same worlds.
        task_set = environments.make(mine.config.environment.name, **mine.config.environment.options)
        try:
            key = "--split" if options.split else "evaluation.split"
            tasks = [
                {split: evaluation_tasks(asked.config, task_set, split, key) for split in asked.settings}
                for asked in models
            ]
            for asked in models:  # those of the second model too, before the first one plays
                for split in asked.settings:
                    distributed.from_main_or_fail(functools.partial(open_samples, asked, split))
            summaries = evaluate_model(mine, task_set, tasks[0], options, distributed)
            if theirs is not None:
                others = evaluate_model(theirs, task_set, tasks[1], options, distributed)
        finally:
            task_set.close()
        if distributed.is_main:
            report(mine, summaries, others, options)
    finally:
        distributed.close()


def report(
    asked: Evaluation, summaries: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]], options: Namespace
) -> None:
    """Print the tables, add the comparison to the results, list what nothing solved."""
    for split, summary in summaries.items():
        print_summary(summary)
        print_exploration(summary)
        if options.compare is not None:
            differing = other_settings(summary["settings"], others[split]["settings"])
            found = {**compare(summary, others[split]), "other_settings": differing}
            summary["comparisons"][options.compare] = {"num_samples": summary["num_samples"], **found}
            print_comparison(split, found, options.compare)
            write_whole(asked.outs[split], json.dumps(summary, indent=1))
        print(f"\nresult:  {asked.outs[split]}")
    if options.save_unsolved is not None:
        tasks = [task for summary in summaries.values() for task in summary["tasks"]]
        hard = unsolved({task["task_id"]: (task["num_samples"], task["num_solved"]) for task in tasks})
        most = max(summary["num_samples"] for summary in summaries.values())
        write_task_file(options.save_unsolved, hard, f"not solved in {most} samples by {options.given}")
        print(f"unsolved: {len(hard)} tasks in {options.save_unsolved}")


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
