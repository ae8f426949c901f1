"""The run folder: what a run did, as strict JSON that other programs can rely on.

    config.yaml                             the resolved configuration
    metrics.jsonl                           one object per iteration: "iteration" and flat "group/name" numbers
    eval.jsonl                              one object per evaluation
    trajectories/iteration_000000.jsonl     one object per line, "kind": candidates | strategy | trajectory
    checkpoints/iteration_000010/model      written by checkpoint.py
    run.json                                where it comes from: an entry for each start (origin.py)
    finished.json                           there once nothing is left to do

The files are the truth.  wandb only mirrors them (offline by default, no key needed), and a failure there never stops a
run.  Undefined numbers (NaN, infinity) are left out of metrics and written as null in records.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsg.config.loading import dump_config, to_dict
from hsg.config.options import Config
from hsg.run.files import write_whole
from hsg.run.locks import lock
from hsg.run.origin import origin

_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line breaks that JSON lets stand in a text, where readers that use `str.splitlines` would cut the object in two."""

LOGS = ("metrics.jsonl", "eval.jsonl")
FINISHED = "finished.json"
ORIGIN = "run.json"
RECORD = re.compile(r"iteration_(\d{6,})\.jsonl")
"""The file of one iteration's trajectories; others beside it are somebody else's."""


def find_records(run: Path) -> dict[int, Path]:
    """The files of records by their iteration, in its order; what somebody else has put beside them is no record."""
    found = ((RECORD.fullmatch(path.name), path) for path in sorted((run / "trajectories").glob("iteration_*")))
    return {int(match[1]): path for match, path in found if match and path.is_file()}


class RunFolder:
    """Writes one run. An existing folder is refused, so that no run ever overwrites another, unless it is resumed.

    `resume`: what `state_dict` was when the checkpoint was written that the run goes on from ({}: it begins anew). All
    that was written later goes, so that the files come out as if nothing had happened.
    """

    def __init__(self, config: Config, name: str, *, resume: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.path = Path(config.run.dir) / name
        try:
            self.path.mkdir(parents=True, exist_ok=resume is not None)
        except FileExistsError:
            raise ValueError(
                f"run.name must be new in {config.run.dir}, got {name!r}, which exists; choose another name or delete it"
            ) from None
        except OSError as error:
            raise ValueError(
                f"run.dir must be a folder that can be written, got {str(self.path)!r}: {error.strerror}"
            ) from None
        self._lock = lock(self.path)
        (self.path / "trajectories").mkdir(exist_ok=True)
        dump_config(config, self.path / "config.tmp")
        (self.path / "config.tmp").replace(self.path / "config.yaml")
        write_whole(self.path / ORIGIN, json.dumps({"starts": [*_starts(self.path), origin()]}, indent=1) + "\n")
        resume = resume or {}
        self._cut(resume)
        self._logger_id: str = resume.get("logger_id") or f"{time.time_ns():x}"
        self._wandb = self._start_wandb(name)

    def _start_wandb(self, name: str) -> Any:
        if self.config.log.wandb == "disabled":
            return None
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb

            return wandb.init(
                project=self.config.log.project, name=name, dir=str(self.path), mode=self.config.log.wandb,
                id=self._logger_id, resume="allow",
                config=to_dict(self.config), settings=wandb.Settings(console="off", x_disable_stats=True),
            )  # fmt: skip
        except Exception as error:
            print(f"wandb is not used: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            return None

    def state_dict(self) -> dict[str, Any]:
        """How long the logs are (bytes, safe on the disk), how many iterations have records, the logger's run."""
        sizes = {}
        for path in (self.path / name for name in LOGS):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[path.name] = file.seek(0, os.SEEK_END)
        return {
            "sizes": sizes,
            "num_iterations": 1 + max(find_records(self.path), default=-1),
            "logger_id": self._logger_id,
        }

    def _cut(self, state: Mapping[str, Any]) -> None:
        """Forget what was written after `state_dict` returned `state`, and that the run was finished."""
        for path in (self.path / name for name in LOGS):
            if path.exists() and path.stat().st_size > (size := state.get("sizes", {}).get(path.name, 0)):
                os.truncate(path, size)
                if size == 0:
                    path.unlink()
        for iteration, path in find_records(self.path).items():
            if iteration >= state.get("num_iterations", 0):
                path.unlink()
        (self.path / FINISHED).unlink(missing_ok=True)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Say that the run is over, with everything that was asked for after its iterations."""
        (self.path / FINISHED).write_text(_to_json(record) + "\n", encoding="utf-8")

    def metrics(self, iteration: int, values: Mapping[str, float]) -> None:
        """Append one iteration's numbers."""
        kept = {k: v for k, v in sorted(values.items()) if math.isfinite(v)}
        self._append("metrics.jsonl", {"iteration": iteration, **kept})
        self._mirror({"iteration": iteration, **kept})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Append one evaluation."""
        self._append("eval.jsonl", record)
        label = record.get("label", "evaluation")
        numbers = {f"evaluation/{label}/{k}": v for k, v in record.items() if isinstance(v, (int, float))}
        self._mirror({"iteration": record.get("iteration", 0), **numbers})

    def trajectories(self, iteration: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one iteration's records, whole or not at all."""
        if not self.config.log.trajectories:
            return
        path = self.path / "trajectories" / f"iteration_{iteration:06d}.jsonl"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(_to_json(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(_to_json(record) + "\n")

    def _mirror(self, values: Mapping[str, Any]) -> None:
        if self._wandb is None:
            return
        try:
            # No step argument: wandb drops values whose step goes backwards, and evaluation comes after training.
            self._wandb.log(dict(values))
        except Exception as error:
            self._give_up_wandb(error)

    def _give_up_wandb(self, error: Exception) -> None:
        print(f"wandb is not used any more: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        self._wandb = None

    def close(self) -> None:
        self._lock.close()
        if self._wandb is None:
            return
        try:
            self._wandb.finish()
        except Exception as error:
            self._give_up_wandb(error)


def _starts(run: Path) -> list[Any]:
    """The starts of a run that is resumed; what cannot be read is no reason not to go on."""
    try:
        found = json.loads((run / ORIGIN).read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
