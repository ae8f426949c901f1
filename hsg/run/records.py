"""The lines of trajectories/iteration_*.jsonl: everything from which an advantage can be recomputed by hand.

    candidates   all texts of a task and which were kept
    strategy     a kept strategy with its return, advantage and penalties
    trajectory   turns with return, advantage, flag and penalties; outcome, stop reason, judgment

`outcome`, and a turn's `reward`, are the environment's, untouched.  With R = `reward.scale` * outcome a turn has

    x          = - kappa * flagged + format_penalty + length_penalty + invalid_action_penalty (+ bonus)
    credited   = its share of R (`reward.turns`: all at the last turn | scaled gains) + x
    return     = R + x (group, rloo) | return-to-go of `credited` (reinforce++, gigpo) | unwhitened advantage + value (gae)

The penalties stand as numbers <= 0; that of length follows from `num_tokens` sampled of `token_limit`.  Only a run with a
critic has `value` (before the turn's first token), only one with RND has `bonus`.  With `log.tokens` the last two kinds also
carry ids, mask, old log-probs, temperatures and advantages, and the critic's `values`, all but the ids aligned with
input_ids[1:].  With `advantage.unit: token` a turn's return and advantage are means over its tokens.  What is undefined is
null (a return) or 0.0 (an advantage), never NaN.  Deliberately absent: the advantages after EntropyAdv's bonus, which are
another in each optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hsg.batch import spread_tokens, strategy_token_advantages, trajectory_advantages
from hsg.config.options import Config
from hsg.credit import Credit
from hsg.types import Candidates, Judgment, Reflection, Strategy, Tokens, Trajectory


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
    """The lines of trajectories/iteration_*.jsonl for the given tasks, from which every advantage can be recomputed."""
    records: list[dict[str, Any]] = []
    for p, groups in enumerate(trajectories):
        task_index = first_task_index + p
        task = groups[0][0].task
        head = {"task_id": task.id, "task_kind": task.kind, "task_index": task_index}
        if candidates is not None:
            drawn = candidates[p].strategies
            records.append(
                {
                    "kind": "candidates",
                    **head,
                    "texts": [s.text for s in drawn],
                    "parsed": [s.parsed for s in drawn],  # without it the selection could not be recomputed
                    "selected": list(candidates[p].selected),
                }
            )
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
        "parsed": strategy.parsed, "prompt": strategy.prompt, "reflection": _reflection(strategy.reflection),
        "num_tokens": strategy.num_tokens, "token_limit": strategy.token_limit,
        "return": _number(credit.strategy_returns[p, n].item()),
        "advantage": credit.strategy_advantages[p, n].item(),
        "format_penalty": credit.strategy_format_penalties[p, n].item(),
        "length_penalty": credit.strategy_length_penalties[p, n].item(),
    }  # fmt: skip
    if config.log.tokens:
        valid = not bool(credit.strategy_returns[p, n].isnan())
        record |= _token_record(strategy.tokens, strategy_token_advantages(strategy.tokens, credit, p, n), valid)
    return record


def _reflection(shown: Reflection | None) -> dict[str, Any] | None:
    """The earlier attempt that a prompt showed."""
    return None if shown is None else {"success": shown.success, **asdict(shown.attempt)}


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
    per_turn = config.strategy.per == "turn"
    signals = {"bonus": credit.turn_bonuses, "value": credit.turn_values}
    for k, turn in enumerate(trajectory.turns):
        turns.append(
            {
                "observation": turn.observation,
                "response": turn.response,
                **({"strategy": turn.strategy} if per_turn else {}),
                "action": turn.action,
                "reward": turn.reward,
                "valid": turn.valid,
                "num_tokens": turn.num_sampled,
                "token_limit": turn.token_limit,
                "flagged": k in judgment.flagged,
                "credited": credit.turn_rewards[place][k].item() if valid else 0.0,
                "return": _number(credit.turn_returns[place][k].item()) if valid else None,
                "advantage": credit.turn_advantages[place][k].item() if valid else 0.0,
                "format_penalty": credit.turn_format_penalties[place][k].item(),
                "length_penalty": credit.turn_length_penalties[place][k].item(),
                "invalid_action_penalty": credit.turn_invalid_action_penalties[place][k].item(),
                **{name: x[place][k].item() for name, x in signals.items() if x is not None},
            }
        )
    record = {
        "kind": "trajectory", **head, "split": trajectory.task.split, "seed": trajectory.seed,
        "strategy_index": trajectory.strategy_index, "rollout_index": trajectory.rollout_index,
        "strategy": trajectory.strategy, "prompt": trajectory.prompt, "reflection": _reflection(trajectory.reflection),
        "turns": turns, "final_observation": trajectory.final_observation,
        "outcome": trajectory.outcome, "score": trajectory.score, "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value, "judgment": judgment.text, "error": trajectory.error,
    }  # fmt: skip
    if config.log.tokens:
        spread = trajectory_advantages(trajectory, credit, place)
        tokens = [_token_record(row, values, valid) for row, values in zip(trajectory.rows, spread, strict=True)]
        empty: dict[str, Any] = {name: [] for name in TOKEN_FIELDS}
        if credit.token_values is not None:
            of_rows = spread_tokens(trajectory, credit.token_values[place])
            tokens = [fields | {"values": x.tolist()} for fields, x in zip(tokens, of_rows, strict=True)]
            empty["values"] = []
        if config.rollout.context == "window":
            for turn_record, fields in zip(turns, tokens, strict=True):
                turn_record |= fields
        else:
            record |= tokens[0] if tokens else empty
    return record


TOKEN_FIELDS = ("input_ids", "response_mask", "old_logprobs", "temperatures", "advantages")
"""What `log.tokens` adds; empty lists for a trajectory that broke before its first turn."""


def _token_record(tokens: Tokens, advantages: Tensor, trained: bool) -> dict[str, Any]:
    """The row's tokens; of a row that is not trained (a broken environment's) the mask is 0 everywhere."""
    mask = tokens.response_mask & trained
    record = {
        "input_ids": tokens.input_ids.tolist(),
        "response_mask": mask.long().tolist(),
        "old_logprobs": torch.where(mask, tokens.logprobs, 0.0).tolist(),
        "temperatures": torch.where(mask, tokens.temperatures, 1.0).tolist(),
        "advantages": advantages.tolist(),
    }
    if tokens.trainer_logprobs is not None:
        record["trainer_logprobs"] = torch.where(mask, tokens.trainer_logprobs, 0.0).tolist()
    return record
