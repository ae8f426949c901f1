"""The run folder: what a run did, as strict JSON that other programs can rely on.

    config.yaml                             the resolved configuration
    metrics.jsonl                           one object per iteration: "iteration" and flat "group/name" numbers
    eval.jsonl                              one object per evaluation
    trajectories/iteration_000000.jsonl     one object per line, "kind": candidates | strategy | trajectory
    checkpoints/iteration_000010/model      written by checkpoint.py

The files are the truth.  wandb only mirrors them (offline by default, no key needed), and a failure there never stops a
run.  Undefined numbers (NaN, infinity) are left out of metrics and written as null in records.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsg.config import Config
from hsg.configfile import dump_config, to_dict

_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line breaks that JSON lets stand in a text, where readers that use `str.splitlines` would cut the object in two."""


class RunFolder:
    """Writes one run. An existing folder is refused, so that no run ever overwrites another."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.path = Path(config.run.dir) / name
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(
                f"run.name must be new in {config.run.dir}, got {name!r}, which exists; choose another name or delete it"
            ) from None
        except OSError as error:
            raise ValueError(
                f"run.dir must be a folder that can be written, got {str(self.path)!r}: {error.strerror}"
            ) from None
        (self.path / "trajectories").mkdir()
        dump_config(config, self.path / "config.yaml")
        self._wandb = self._start_wandb(name)

    def _start_wandb(self, name: str) -> Any:
        if self.config.log.wandb == "disabled":
            return None
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb

            return wandb.init(
                project=self.config.log.project, name=name, dir=str(self.path), mode=self.config.log.wandb,
                config=to_dict(self.config), settings=wandb.Settings(console="off", x_disable_stats=True),
            )  # fmt: skip
        except Exception as error:
            print(f"wandb is not used: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            return None

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
        if self._wandb is None:
            return
        try:
            self._wandb.finish()
        except Exception as error:
            self._give_up_wandb(error)


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
