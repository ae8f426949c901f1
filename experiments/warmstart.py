"""Supervised warm start: teach a model every prompt form on played demonstrations, before reinforcement learning.

    python experiments/warmstart.py --config experiments/configs/smoke.yaml --set warmstart.seconds=20

The result is a Hugging Face folder in `warmstart.cache_dir`, named by the hash of all that decides it.  Deliberately
absent: rewards, several devices, resuming (a stopped warm start begins again; the played demonstrations are kept).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hsg.config.arguments import Parser, refuse
from hsg.config.loading import load_config
from hsg.config.options import Config
from hsg.experiments.imitation.demonstrations import VERSION, Played, collect, digest, make_rows
from hsg.experiments.imitation.report import print_report, report
from hsg.experiments.imitation.supervised import train
from hsg.model.models import load_model, stop_ids
from hsg.model.nano import build_nano
from hsg.protocol import TaskSet
from hsg.text.chat import ChatFormat
from hsg.text.prompts import Prompts, action_response, strategy_response


def warm_start(config: Config, task_set: TaskSet) -> Path:
    """The folder of the warm-started model; made now unless the same settings were used before."""
    started = time.monotonic()
    played, data_key = collect(config, task_set)
    key = digest({"data": data_key, **settings_that_matter(config)})
    folder = Path(config.warmstart.cache_dir) / key
    if (folder / "warmstart.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        path: str | Path = config.model.path
        if path == "nano":
            path = build_nano(_texts(config, played), config.warmstart.nano, scratch, seed=config.warmstart.seed)
        model, tokenizer = load_model(config.model, path, _device())
    rows = make_rows(config, played, _chat(config, model, tokenizer), _max_length(model))
    if not config.log.quiet:
        limit = f"at most {config.warmstart.seconds:.0f} s"
        print(f"warm start: supervised training on {len(played)} demonstrations, {limit}, kept in {folder}", flush=True)
    record = train(model, rows, config.warmstart, tokenizer.pad_token_id, quiet=config.log.quiet)
    record = {"key": key, "total_seconds": time.monotonic() - started, **record, **settings_that_matter(config)}
    return _save(model, tokenizer, record, folder)


def describe(folder: Path) -> str:
    """One line: what the supervised training of a folder came to, and what ended it."""
    record = json.loads((folder / "warmstart.json").read_text(encoding="utf-8"))
    first = record["history"][0]["validation"]
    return (
        f"warm start: {record['optimizer_steps']} steps, {record['epochs']:.1f} epochs, {record['seconds']:.0f} s, validation "
        f"loss {first:.3f} -> {record['validation_loss']:.3f}, ended by {record['ended_by']} ({folder})"
    )


def warning(folder: Path) -> str | None:
    """One line where the clock ended the training before it had seen its data once: what follows would be wasted."""
    record = json.loads((folder / "warmstart.json").read_text(encoding="utf-8"))
    if record["ended_by"] != "warmstart.seconds" or record["epochs"] >= 1:
        return None
    return (
        f"warning: the warm start had time for {record['epochs']:.1f} of a pass over its demonstrations, so this model can "
        f"hardly play and its runs learn little; stop, delete {folder}, and raise warmstart.seconds or quiet the machine"
    )


def continue_training(config: Config, task_set: TaskSet, folder: str | Path, seconds: float) -> Path:
    """The supervised control: the same training, from `folder`, on the same data, for `seconds` of wall time.

    Its last weights count, as the trainer's do; the best ones on validation would be the start itself where it had learned
    all that the data has to teach.
    """
    record_path = Path(folder) / "warmstart.json"
    start = json.loads(record_path.read_text(encoding="utf-8"))["key"] if record_path.is_file() else str(folder)
    played, data_key = collect(config, task_set)
    key = digest(
        {"start": start, "keep": "last", "seconds": round(seconds), "data": data_key, **settings_that_matter(config)}
    )
    target = Path(config.warmstart.cache_dir) / f"control-{key}"
    if (target / "warmstart.json").is_file():
        return target
    model, tokenizer = load_model(config.model, folder, _device())
    rows = make_rows(config, played, _chat(config, model, tokenizer), _max_length(model))
    # The whole time is used: a plateau must not end it early.
    settings = dataclasses.replace(config.warmstart, seconds=seconds, epochs=1e9, patience=10**9)
    record = train(model, rows, settings, tokenizer.pad_token_id, keep="last", quiet=config.log.quiet)
    return _save(model, tokenizer, {"key": key, "continued_from": start, **record}, target)


def settings_that_matter(config: Config) -> dict[str, Any]:
    """What decides the weights of a warm start, beside its demonstrations."""
    settings = dataclasses.asdict(config.warmstart)
    del settings["cache_dir"]
    return {
        "version": VERSION,
        "model": dataclasses.asdict(config.model) | {"encoder": None},
        "prompts": dict(Prompts.of(config).templates),
        "markers": vars(Prompts.of(config).markers),
        "context": [config.rollout.context, config.rollout.window_turns],
        "warmstart": settings,
        **({} if config.model.path == "nano" or config.prompts.date is None else {"date": config.prompts.date}),
    }


def _chat(config: Config, model: Any, tokenizer: Any) -> ChatFormat:
    return ChatFormat(tokenizer, stop_ids(model, tokenizer), config.prompts.date)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _max_length(model: Any) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048


def _texts(config: Config, played: Sequence[Played]) -> list[str]:
    """What the nano tokenizer learns from: the prompts and answers of every demonstration."""
    prompts = Prompts.of(config)
    texts = []
    for item in played:
        first, strategy = item.observations[0], item.strategy
        texts += [prompts.strategy(first), strategy_response(strategy), prompts.first_action(first, strategy)]
        for turn, action in enumerate(item.actions):
            listed = item.admissible[turn] if item.admissible else None
            texts += [action_response(action), prompts.next_action(turn + 2, item.observations[turn + 1], listed)]
        texts.append(prompts.judgment(item.observations[-1], len(item.actions)))
    return texts


def _save(model: Any, tokenizer: Any, record: dict[str, Any], folder: Path) -> Path:
    """Write the folder under another name and rename it: whoever comes second keeps what the first one left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    (draft / "warmstart.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    draft.chmod(0o755)
    try:
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft)
        if not (folder / "warmstart.json").is_file():
            raise
    return folder


# ----------------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; prints what was learned and the folder. Exit status 2 and one line where the input is wrong."""
    parser = Parser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: hsg warmstart --config experiments/configs/smoke.yaml",
    )
    parser.add_argument("--config", help="YAML file with what differs from the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one option, repeatable")
    from hsg import environments

    try:
        options = parser.parse_args(arguments)
        config = load_config(options.config, options.set)
        task_set = environments.make(config.environment.name, **config.environment.options)
        try:
            folder = warm_start(config, task_set)
            found = report(config, task_set, folder)
        finally:
            task_set.close()
    except ValueError as error:
        return refuse(error)
    except RuntimeError as error:  # every engine died, say
        return refuse(error, 1)
    record = json.loads((folder / "warmstart.json").read_text(encoding="utf-8"))
    for name in ("total_seconds", "seconds", "epochs", "optimizer_steps", "tokens_per_second", "rows", "taught_tokens",
                 "validation_loss", "validation_loss_by_form"):  # fmt: skip
        print(f"{name:<24}{record[name]}")
    print_report(found)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
