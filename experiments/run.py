"""Train one policy: python experiments/run.py [--config FILE] [--set section.key=value]...

    accelerate launch experiments/run.py --config experiments/configs/smoke.yaml --set log.tokens=true

It composes: config -> task set -> policy (the nano model is warm-started first) -> trainer -> evaluations -> a table.
Without --config it runs experiments/configs/quickstart.yaml.  Bad input is one line on stderr and exit status 2.
--resume auto goes on with a run that was stopped or killed.  SIGTERM and SIGINT: the optimizer step is finished and a
checkpoint written before the command ends with status 143 or 130.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsg.config.arguments import Parser

if TYPE_CHECKING:
    from hsg.config.options import Config
    from hsg.experiments.reading.resume import Resumed
    from hsg.protocol import TaskSet
    from hsg.ranks.distributed import Distributed
    from hsg.trainer import Trainer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # rollout threads and forked tokenizers do not mix
OURS = ("hsg", "__main__")
CONFIGS = Path(__file__).resolve().parent / "configs"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Train a language-model agent with strategies.",
        epilog="examples: hsg train --set seed=1; accelerate launch experiments/run.py --config my.yaml --set seed=1",
    )
    parser.add_argument("--config", help="YAML with the differences from defaults (quickstart.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    parser.add_argument(
        "--resume",
        default="none",
        metavar="auto|FOLDER|none",
        help="go on with a run: run.dir/run.name, or that folder",
    )
    quiet = "plain lines and no bars, as in logs (--set log.quiet=true)"
    parser.add_argument("--quiet", action="append_const", dest="set", const="log.quiet=true", help=quiet)
    return parser.parse_args(arguments)


def train(config_path: str | Path | None = None, overrides: Sequence[str] = (), resume: str = "none") -> Path | None:
    """The whole run, as `hsg train` makes it: warm start, evaluations, iterations, a table. Returns its folder.

    config_path  a YAML file with the differences from the defaults; None: experiments/configs/quickstart.yaml
    overrides    `section.key=value`, as behind --set
    resume       none, auto, or the folder of the run to go on with

    None on all processes but the main one. ValueError says in one line what is wrong with an option.
    """
    from hsg.experiments.reading.resume import find_run, read_config

    config = read_config(config_path, CONFIGS / "quickstart.yaml", overrides, resume)
    import torch  # only now: what is wrong with the configuration is said at once

    from hsg.ranks.distributed import Distributed

    distributed = Distributed(config.distributed)
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the environments use the other cores; two threads on busy ones are far slower
        resumed = distributed.from_main_or_fail(lambda: find_run(config, resume))
        if resumed is not None and resumed.finished:
            if distributed.is_main:
                print(f"{resumed.folder} is finished; nothing is left to do")
            return resumed.folder
        name = config.run.name or f"{config.environment.name}-{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
        name = resumed.folder.name if resumed else distributed.from_main(name)
        with opened(config, distributed, name, resumed) as (task_set, trainer), unfinished(trainer):
            if config.evaluation.initial and not (resumed and resumed.checkpoint):
                trainer.evaluate(0, "warm start" if config.model.path == "nano" else "before training")
            iterations = trainer.train()
            final_evaluations(config, task_set, trainer, iterations)
            if trainer.checkpoints.lost:
                trainer.save()  # there may be room by now
            if trainer.checkpoints.lost:
                raise RuntimeError(
                    f"the last checkpoint must be written before the run is finished, got none of iteration {iterations}; "
                    "make room on the disk and run the same command with --resume auto"
                )
            return report(config, trainer.run) if trainer.run is not None else None
    finally:
        distributed.close()


@contextmanager
def opened(
    config: Config, distributed: Distributed, name: str, resumed: Resumed | None = None, *, logged: bool = True
) -> Iterator[tuple[TaskSet, Trainer]]:
    """Task set and trainer of the run `name`, which writes its folder where it is `logged`; all are closed together."""
    from hsg import environments
    from hsg.config.loading import unused_options
    from hsg.experiments.reading.resume import same_date
    from hsg.model.fit import asked_again, fit_of
    from hsg.model.lora import frozen_line
    from hsg.run.tracking import RunFolder
    from hsg.trainer import Trainer

    with ExitStack() as stack:
        task_set = environments.make(config.environment.name, **config.environment.options)
        stack.callback(task_set.close)
        check_before_work(config, task_set, None if resumed else name)
        unused = unused_options(config)
        if unused and distributed.is_main and not config.log.quiet:
            print(f"not used by this run ({config.algorithm}): {', '.join(unused)}")
        checkpoint = resumed.checkpoint if resumed else None
        if resumed and checkpoint:
            model_path = resumed.state["trainer"]["model_path"]
            if distributed.is_main:
                print(f"resuming {resumed.folder} from {checkpoint.name}")
        else:
            model_path = prepare_model(config, task_set, distributed)
        if resumed:
            config = distributed.from_main_or_fail(lambda: same_date(config, resumed.folder))
        # A template may write the date into every prompt: one for all ranks, however long the run lasts.
        date = config.prompts.date or distributed.from_main(datetime.date.today().isoformat())
        told = replace(config, prompts=replace(config.prompts, date=date))
        # A run keeps the attention, cache and packing that it found right at its start.
        kept = resumed.state["trainer"].get("fit") if resumed and checkpoint else None
        trainer = Trainer(asked_again(told, kept), task_set, model_path, distributed, None, resume=checkpoint)
        stack.callback(trainer.close)
        if distributed.is_main:
            print(fit_of(trainer.model).line(config.model.path), flush=True)
        if config.model.lora.rank and distributed.is_main and (frozen := frozen_line(trainer.model)):
            print(frozen, flush=True)
        if distributed.is_main and logged:  # only now: a model that cannot be loaded leaves no empty run behind
            logs = resumed.state.get("run", {}) if resumed else None
            judge = trainer.collector.judge
            chats = [trainer.policy.chat, *([judge.chat] if judge else [])]
            trainer.run = RunFolder(told if any(c.asks_the_clock for c in chats) else config, name, resume=logs)
            stack.callback(trainer.run.close)
        yield task_set, trainer


@contextmanager
def unfinished(trainer: Trainer) -> Iterator[None]:
    """Whatever ends a run early comes with the command that goes on with it, but for bad input, which would end it again."""
    try:
        yield
    except ValueError:
        raise
    except BaseException:
        if trainer.run is not None:
            print(go_on(trainer.run.path), file=sys.stderr)
        raise


def go_on(folder: Path) -> str:
    """`go on with: hsg train --resume runs/a`; what a launcher was told beside it, only whoever typed it knows."""
    option = f"--resume {shlex.quote(str(folder))}"
    if sys.argv[0].endswith("hsg train"):
        return f"go on with: hsg train {option}"
    return f"go on with: the same command and {option} (make: RESUME={shlex.quote(str(folder))})"


def report(config: Any, run: Any) -> Path:
    """Curves and a table of the evaluations; then nothing is left to do, and the run folder says so."""
    from hsg.config.loading import to_dict
    from hsg.experiments.reading.curves import read_lines, write_curves

    curves = write_curves([run.path], run.path / "curves.png")
    print_table(read_lines(run.path, "eval.jsonl"), run.path, curves)
    run.finish({"asked": to_dict(config.train)})
    return run.path


def check_before_work(config: Any, task_set: Any, name: str | None) -> None:
    """Whatever can be refused is refused before the warm start spends its minutes. `name`: that of a new run."""
    from hsg.measure.evaluation import evaluation_tasks
    from hsg.model.lora import check_peft
    from hsg.model.models import load_tokenizer
    from hsg.run.build import training_tasks
    from hsg.text.prompts import Prompts

    training_tasks(config, task_set)
    check_peft(config.model.lora)
    Prompts.of(config)
    evaluation_tasks(config, task_set)
    if config.evaluation.test_split is not None:
        evaluation_tasks(config, task_set, config.evaluation.test_split, "evaluation.test_split")
    if config.model.path != "nano":
        load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if config.strategy.per == "episode":
        load_tokenizer(config.model.encoder, key="model.encoder")
    if config.judge.enabled and config.judge.model not in ("self", "reference"):
        load_tokenizer(config.judge.model, trust_remote_code=config.model.trust_remote_code, key="judge.model")
    check_writable("run.dir", config.run.dir)
    if config.model.path == "nano":
        check_writable("warmstart.cache_dir", config.warmstart.cache_dir)
    if name is not None and (Path(config.run.dir) / name).exists():
        raise ValueError(
            f"run.name must be new in {config.run.dir}, got {name!r}, which exists; choose another name or delete it"
        )


def check_writable(key: str, folder: str) -> None:
    """ValueError unless `folder` can be made and written; nothing is left behind."""
    path = Path(folder)
    try:
        there = next(p for p in (path, *path.parents) if p.exists())
        with tempfile.TemporaryDirectory(dir=there):  # asked by doing: permission bits say little to root
            pass
    except OSError as error:
        raise ValueError(f"{key} must be a folder that can be written, got {folder!r}: {error.strerror}") from None


def prepare_model(config: Any, task_set: Any, distributed: Any) -> str:
    """The folder or id the policy starts from; `nano` is built and warm-started by the main process."""
    from hsg.config.loading import to_dict
    from hsg.experiments.imitation.demonstrations import digest
    from hsg.experiments.imitation.report import cached_report, print_report
    from hsg.experiments.warmstart import describe, settings_that_matter, warm_start, warning
    from hsg.run.locks import locked

    if config.model.path != "nano":
        return config.model.path
    made = None
    if distributed.is_main:
        start = digest({"environment": to_dict(config.environment), **settings_that_matter(config)})
        # Of several runs one makes it, the others wait and find it.
        with locked(Path(config.warmstart.cache_dir) / f"{start}.lock"):
            folder = warm_start(config, task_set)
        if config.evaluation.initial and not config.log.quiet:
            print(describe(folder))
            print_report(cached_report(config, task_set, folder))
        if doubt := warning(folder):
            print(doubt, file=sys.stderr)
        made = str(folder)
    return str(distributed.from_main(made))


def final_evaluations(config: Any, task_set: Any, trainer: Any, iterations: int) -> None:
    """What the config asks to be measured after the last iteration."""
    from hsg.experiments.warmstart import continue_training
    from hsg.measure.evaluation import evaluate, evaluation_tasks
    from hsg.run.build import load_policy

    if config.evaluation.final:
        trainer.evaluate(iterations, "after training")
    if config.evaluation.without_strategy and config.strategy.per == "episode":
        trainer.evaluate(iterations, "strategy blanked", strategies="blank")
        trainer.evaluate(iterations, "strategies exchanged", strategies="shuffled")
    if config.evaluation.test_split is not None:
        tasks = evaluation_tasks(config, task_set, config.evaluation.test_split)
        trainer.evaluate(iterations, "test split", tasks=tasks)
    if config.evaluation.control and config.model.path == "nano":
        distributed, made = trainer.distributed, None
        if distributed.is_main:
            made = str(continue_training(config, task_set, Path(trainer.model_path), trainer.seconds))
        policy = load_policy(config, str(distributed.from_main(made)), distributed.device)
        tasks = trainer.evaluation_tasks
        record = evaluate(
            config, policy, task_set, tasks, distributed, label="supervised control", iteration=iterations
        )
        if trainer.run is not None:
            trainer.run.evaluation(record)


def print_table(records: list[dict[str, Any]], folder: Path, curves: Path | None) -> None:
    """The run folder, its curves, and one line per evaluation."""
    print(f"\nrun folder: {folder}")
    missing = "nothing to draw yet" if find_spec("matplotlib") else "pip install hsg[notebooks] brings matplotlib"
    print(f"curves:     {curves or 'not drawn; ' + missing}")
    print(f"look at it: hsg view {shlex.quote(str(folder))}")
    if records:
        print(f"{'':<22}{'split':<8}{'score':>8}{'success':>9}{'turns':>7}{'tasks':>7}")
    for r in records:
        label = f"iteration {r['iteration']}" if r["label"] == "training" else r["label"]
        if "score" not in r:
            print(f"{label:<22}{r['split']:<8} every episode failed")
            continue
        print(f"{label:<22}{r['split']:<8}{r['score']:>8.3f}{r['success']:>9.3f}{r['turns']:>7.1f}{r['num_tasks']:>7}")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 1 the run itself failed, 143 or 130 stopped by SIGTERM or SIGINT."""
    from hsg.ranks import stopping

    with stopping.handlers():
        try:
            given = parse_arguments(arguments)
            train(given.config, given.set, given.resume)
        except ValueError as error:
            if not _is_ours(error):  # a library's complaint in the middle of the work is a bug of ours: show where
                raise
            return _say(error, 2)
        except (RuntimeError, OSError) as error:  # OSError: a full disk, say
            if stopping.received():  # another rank left first, and took the connection with it
                return stopping.STATUS[stopping.received()]
            return _say(error, 1)
        except stopping.Stopped as stopped:
            if os.environ.get("RANK", "0") == "0":
                print(stopped, file=sys.stderr)
            return stopped.status
    return 0


def _is_ours(error: BaseException) -> bool:
    """Whether this project raised it, in words for a user, rather than a library it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").split(".")[0] in OURS


def _say(error: Exception, status: int) -> int:
    """One line, from the main process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    if os.environ.get("HSG_TRACEBACK"):  # for developers
        raise error
    return status


if __name__ == "__main__":
    sys.exit(main())
