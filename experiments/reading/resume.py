"""--resume auto | RUN_FOLDER | none: which run goes on, and from which of its checkpoints.

    none        a new run; an existing run folder is refused
    auto        run.dir/run.name, without run.name the newest run in run.dir; a new run where there is no checkpoint yet
    RUN_FOLDER  that run, with the configuration that it was started with unless --config says another

Deliberately absent: a resumed run that learns by other rules than it began with (the options that may change are listed).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsg.config.checks import require_folder_there
from hsg.config.loading import load_config, to_dict
from hsg.config.options import Config, RunConfig
from hsg.experiments.reading.curves import read_objects
from hsg.run.locks import lock
from hsg.run.tracking import FINISHED

MAY_CHANGE = (
    "run.", "train.", "evaluation.", "checkpoint.", "log.", "distributed.", "model.gradient_checkpointing",
    "rollout.env_threads", "rollout.env_timeout_seconds", "rollout.max_error_fraction", "rollout.max_cache_tokens",
    "rollout.streams", "rollout.weights", "rollout.max_logprob_gap", "update.microbatch_tokens", "optimizer.max_nonfinite",
    "model.attention", "rollout.cache", "update.packing",
)  # fmt: skip
"""Options (or beginnings of their names) that change how a run is done and not what it learns from."""

NEEDS = ("iteration", "run", "trainer", "learner")
"""Parts of a checkpoint without which no run goes on."""


@dataclass(frozen=True)
class Resumed:
    """A run that goes on. `checkpoint` None: it begins anew in its folder. `state`: plain values of the checkpoint."""

    folder: Path
    checkpoint: Path | None
    state: Mapping[str, Any]
    finished: bool


def read_config(path: str | Path | None, default: Path, overrides: Sequence[str], resume: str) -> Config:
    """The configuration of a run that may be resumed."""
    if resume in ("auto", "none"):
        return load_config(path or default, overrides)
    folder = Path(resume)
    require_folder_there(resume, "--resume")
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"--resume must be auto, none or a run folder, got {resume!r}; a run folder holds config.yaml")
    config = load_config(path or folder / "config.yaml", overrides)
    folder = folder.resolve()
    return replace(config, run=RunConfig(dir=str(folder.parent), name=folder.name))


def find_run(config: Config, resume: str) -> Resumed | None:
    """The run to go on with, or None for a new one. ValueError where that would not be the same run any more."""
    if resume == "none":
        return None
    folder = Path(config.run.dir) / config.run.name if config.run.name else _newest(Path(config.run.dir))
    if folder is None or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / "config.yaml").is_file():
        if not (folder / "trajectories").is_dir():
            raise ValueError(
                f"run.name must be that of a run where it is resumed, got {str(folder)!r} without config.yaml; name another"
            )
        return Resumed(folder, None, {}, False)  # killed before its first word
    config = same_date(config, folder)
    changed = list(_changes(to_dict(load_config(folder / "config.yaml")), to_dict(config)))
    if refused := [line for key, line in changed if not key.startswith(MAY_CHANGE)]:
        raise ValueError(
            f"the configuration must be that of {folder} to resume it, got {'; '.join(refused[:3])}; "
            "start another run under another run.name"
        )
    from hsg.run.checkpoint import (  # torch: not before a configuration is known to be right
        newest_checkpoint,
        read_state,
    )

    lock(folder).close()  # asked on behalf of all ranks; the run folder takes it for good
    checkpoint = newest_checkpoint(folder, NEEDS)
    if checkpoint is None and any((folder / "checkpoints").glob("iteration_*")):
        raise ValueError(
            f"checkpoints must hold one that is whole to go on with {folder}, got none; mend the disk, or begin another run "
            "under another run.name"
        )
    state = read_state(checkpoint, tensors=False) if checkpoint else {}
    _check_logs(folder, state)
    # A run that was to last longer by now is not finished.
    finished = _asked(folder / FINISHED) == to_dict(config.train)
    return Resumed(folder, checkpoint, state, finished)


def same_date(config: Config, folder: Path) -> Config:
    """The configuration with the date that the run's prompts have shown so far, unless it says one itself."""
    if config.prompts.date is not None or not (folder / "config.yaml").is_file():
        return config
    date = load_config(folder / "config.yaml").prompts.date
    return replace(config, prompts=replace(config.prompts, date=date))


def _check_logs(folder: Path, state: Mapping[str, Any]) -> None:
    """Lines that the checkpoint knows of and the disk has lost: refused; a file that is gone was taken away on purpose."""
    for name, size in state.get("run", {}).get("sizes", {}).items():
        path = folder / name
        if not path.exists():
            print(
                f"{path} is gone, with {size:,} bytes that the checkpoint knows of; a new one is begun", file=sys.stderr
            )
        elif (there := path.stat().st_size) < size:
            raise ValueError(
                f"{path} must have the {size:,} bytes it had at the checkpoint, got {there:,}; put the file back, or delete "
                "it to go on without the lines that are lost"
            )
        else:
            # What the run's curves and table will be made of; the part behind `size` is cut off anyway.
            for _ in read_objects(
                path, until=size, remedy="put the file back, or delete it to go on without its lines"
            ):
                pass


def _asked(path: Path) -> Any:
    """What a finished run had been asked for; None where the file is missing, or empty since the disk was full."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))).get("asked")
    except (OSError, ValueError, TypeError):
        return None


def _newest(runs: Path) -> Path | None:
    """The run whose configuration was written last."""
    found = [path for path in runs.glob("*/config.yaml") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent if found else None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, what it was and is) of every option that differs."""
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _changes(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", f"{prefix}{key} = {now!r} (it was {was!r})"
