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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsg.batch import strategy_token_advantages, turn_token_advantages
from hsg.config import Config
from hsg.configfile import dump_config, to_dict
from hsg.credit import Credit
from hsg.types import Candidates, Judgment, Strategy, Tokens, Trajectory


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
        if self._wandb is not None:
            # No step argument: wandb drops values whose step goes backwards, and evaluation comes after training.
            self._wandb.log({"iteration": iteration, **kept})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Append one evaluation."""
        self._append("eval.jsonl", record)
        if self._wandb is not None:
            label = record.get("label", "evaluation")
            numbers = {f"evaluation/{label}/{k}": v for k, v in record.items() if isinstance(v, (int, float))}
            self._wandb.log({"iteration": record.get("iteration", 0), **numbers})

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

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish(quiet=True)


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def iteration_records(
    config: Config,
    first_task_index: int,
    candidates: Sequence[Candidates] | None,
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
    judgments: Sequence[Sequence[Sequence[Judgment]]],
    credit: Credit,
) -> list[dict[str, Any]]:
    """The lines of trajectories/iteration_*.jsonl for this rank's tasks, from which every advantage can be recomputed."""
    records: list[dict[str, Any]] = []
    for p, groups in enumerate(trajectories):
        task_index = first_task_index + p
        head = {"task_id": groups[0][0].task.id, "task_index": task_index}
        if candidates is not None:
            texts = [s.text for s in candidates[p].strategies]
            records.append({"kind": "candidates", **head, "texts": texts, "selected": list(candidates[p].selected)})
            for n, strategy in enumerate(candidates[p].kept):
                records.append(_strategy_record(config, head, p, n, candidates[p].selected[n], strategy, credit))
        for n, group in enumerate(groups):
            for m, trajectory in enumerate(group):
                records.append(_trajectory_record(config, head, (p, n, m), trajectory, judgments[p][n][m], credit))
    return records


def _strategy_record(
    config: Config, head: dict[str, Any], p: int, n: int, candidate: int, strategy: Strategy, credit: Credit
) -> dict[str, Any]:
    assert credit.strategy_returns is not None and credit.strategy_advantages is not None
    assert credit.strategy_format_penalties is not None and credit.strategy_length_penalties is not None
    record = {
        "kind": "strategy", **head, "strategy_index": n, "candidate_index": candidate, "text": strategy.text,
        "parsed": strategy.parsed,
        "return": _number(credit.strategy_returns[p, n].item()),
        "advantage": credit.strategy_advantages[p, n].item(),
        "format_penalty": credit.strategy_format_penalties[p, n].item(),
        "length_penalty": credit.strategy_length_penalties[p, n].item(),
    }  # fmt: skip
    if config.log.tokens:
        record |= _token_record(strategy.tokens, strategy_token_advantages(strategy.tokens, credit, p, n))
    return record


def _trajectory_record(
    config: Config,
    head: dict[str, Any],
    place: tuple[int, int, int],
    trajectory: Trajectory,
    judgment: Judgment,
    credit: Credit,
) -> dict[str, Any]:
    valid = bool(credit.valid[place])
    turns: list[dict[str, Any]] = []
    for k, turn in enumerate(trajectory.turns):
        turns.append(
            {
                "observation": turn.observation,
                "response": turn.response,
                "action": turn.action,
                "reward": turn.reward,
                "valid": turn.valid,
                "flagged": k in judgment.flagged,
                "return": _number(credit.turn_returns[place][k].item()) if valid else None,
                "advantage": credit.turn_advantages[place][k].item() if valid else 0.0,
                "format_penalty": credit.turn_format_penalties[place][k].item(),
                "length_penalty": credit.turn_length_penalties[place][k].item(),
            }  # fmt: skip
        )
    record = {
        "kind": "trajectory", **head, "split": trajectory.task.split, "seed": trajectory.seed,
        "strategy_index": trajectory.strategy_index, "rollout_index": trajectory.rollout_index,
        "strategy": trajectory.strategy, "turns": turns, "final_observation": trajectory.final_observation,
        "outcome": trajectory.outcome, "score": trajectory.score, "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value, "judgment": judgment.text, "error": trajectory.error,
    }  # fmt: skip
    if config.log.tokens:
        spread = turn_token_advantages(trajectory, credit.turn_advantages[place])
        tokens = [_token_record(row, values) for row, values in zip(trajectory.rows, spread, strict=True)]
        if config.rollout.context == "window":
            for turn_record, fields in zip(turns, tokens, strict=True):
                turn_record |= fields
        else:
            record |= tokens[0] if tokens else dict.fromkeys(TOKEN_FIELDS, [])
    return record


TOKEN_FIELDS = ("input_ids", "response_mask", "old_logprobs", "temperatures", "advantages")
"""What `log.tokens` adds; empty lists for a trajectory that broke before its first turn."""


def _token_record(tokens: Tokens, advantages: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens.input_ids.tolist(),
        "response_mask": tokens.response_mask.long().tolist(),
        "old_logprobs": tokens.logprobs.tolist(),
        "temperatures": tokens.temperatures.tolist(),
        "advantages": advantages.tolist(),
    }
