"""Numbers of one iteration as sums and counts, so that ranks can be added before anything is divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hsg.credit import Credit
from hsg.engine.generation import Cost
from hsg.engine.layout import common_prefix
from hsg.measure.speed import Arithmetic
from hsg.protocol import StopReason
from hsg.strategy.reflection import Draw
from hsg.types import Candidates, Judgment, Trajectory

Sums = dict[str, tuple[float, float]]
"""Name -> (sum, count); the metric is their quotient. A count of 0 leaves it undefined; a `TOTALS` is the sum itself."""

TOTALS = (
    "cost/", "fault/", "advantage/penalty_only_groups", "rollout/dropped_groups", "time/processor", "time/sampled",
    "time/trained",
)  # fmt: skip
"""Names, or beginnings of names, of what is added up over ranks and not averaged."""


def merge(parts: Iterable[Sums]) -> Sums:
    """Add the sums and counts of several ranks."""
    merged: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            seen = merged.get(name, (0.0, 0.0))
            merged[name] = (seen[0] + total, seen[1] + count)
    return merged


def finish(sums: Sums) -> dict[str, float]:
    """Plain numbers; what was never counted is left out."""
    totals = {name: total for name, (total, _) in sums.items() if name.startswith(TOTALS)}
    return totals | {name: total / count for name, (total, count) in sums.items() if name not in totals and count > 0}


def mean(values: Iterable[float]) -> tuple[float, float]:
    """(sum, count) of some values."""
    held = [float(v) for v in values]
    return sum(held), float(len(held))


def cost_metrics(costs: Mapping[str, Cost], trajectories: Sequence[Sequence[Sequence[Trajectory]]]) -> Sums:
    """Positions really forwarded, by purpose; what a rollout without any waste needs; tokens sampled in all."""
    sums: Sums = {f"cost/{purpose}_positions": (float(cost.positions), 0.0) for purpose, cost in costs.items()}
    sums["cost/unique_tokens"] = (float(sum(map(unique_tokens, trajectories))), 0.0)
    sums["cost/sampled_tokens"] = (float(sum(cost.sampled for cost in costs.values())), 0.0)
    return sums


def update_costs(update: Mapping[str, int]) -> Sums:
    """The same of an update (see `learner.UpdateCosts`)."""
    return {f"cost/{name}": (float(count), 0.0) for name, count in update.items()}


def speed_metrics(
    drawn: Sequence[Cost], update: Mapping[str, int], arithmetic: Arithmetic, matmul_rate: float, seconds: float
) -> Sums:
    """Tokens per second, and the share of the matrix products that this machine could have done in the time.

    `drawn`: what the trained model sampled; `matmul_rate`: FLOPs per second.
    """
    sampled = sum(cost.sampled for cost in drawn)
    flops = arithmetic.flops(
        forwarded=sum(cost.positions for cost in drawn) + update["score_positions"],
        sampled=sampled,
        trained=update["update_positions"],
        headed=update["head_positions"],
    )
    return {
        "time/sampled_tokens_per_second": (sampled / seconds, 0.0),
        "time/trained_tokens_per_second": (update["trained_tokens"] / seconds, 0.0),
        "time/matmul_share": (flops / seconds / matmul_rate, 1.0),
    }


def played_metrics(
    trajectories: Sequence[Sequence[Sequence[Trajectory]]], dropped: Mapping[str, int], turn_cap: int
) -> Sums:
    """Turns that the policy took, those of dropped groups too; what refills did; how long episodes may be.

    A turn without a readable action counts and no environment saw it; those of an attempt that broke and was played anew
    (`rollout.env_retries`) do not count.
    """
    turns = sum(len(t.turns) for task in trajectories for group in task for t in group)
    return {
        "cost/environment_turns": (float(turns + dropped["turns"]), 0.0),
        "rollout/dropped_groups": (float(dropped["groups"]), 0.0),
        "rollout/refills": (float(dropped["rounds"]), 1.0),
        "rollout/turn_cap": (float(turn_cap), 1.0),
    }


def reflection_metrics(draws: Sequence[Draw], trajectories: Sequence[Sequence[Sequence[Trajectory]]]) -> Sums:
    """How often a reflection was asked for, shown, or missing from its buffer, and what became of those that saw one.

    draws  one per rollout, or one per task, whose rollouts all follow strategies that saw the same
    """
    flat = [t for task in trajectories for group in task for t in group]
    each = [draw for draw in draws for _ in range(len(flat) // len(draws))] if draws else []
    played = [(draw, t) for draw, t in zip(each, flat, strict=True) if t.valid]
    asked = [draw for draw in draws if draw.asked != "plain"]
    return {
        "reflection/bad_share": mean(d.shown is not None and not d.shown.success for d in draws),
        "reflection/good_share": mean(d.shown is not None and d.shown.success for d in draws),
        "reflection/empty_share": mean(d.shown is None for d in asked),
        "reflection/success_with": mean(t.success for d, t in played if d.shown is not None),
        "reflection/success_with_bad": mean(t.success for d, t in played if d.shown and not d.shown.success),
        "reflection/success_with_good": mean(t.success for d, t in played if d.shown and d.shown.success),
        "reflection/success_without": mean(t.success for d, t in played if d.shown is None),
    }


def unique_tokens(groups: Sequence[Sequence[Trajectory]]) -> int:
    """Tokens that the rollouts of one task need: what all its prompts share once, the rest of a strategy's prompt once, and
    every later token once per trajectory, even where two sampled the same. In window context each prompt is new.
    """
    prompts: set[tuple[int, ...]] = set()
    others = 0
    for trajectory in (t for group in groups for t in group):
        for number, (row, turn) in enumerate(zip(trajectory.rows, trajectory.turns, strict=False)):
            prompt = tuple(row.input_ids[: turn.start + 1].tolist())
            others += len(row.input_ids) - (len(prompt) if number == 0 else 0)
            if number == 0:
                prompts.add(prompt)
    shared = common_prefix(min(prompts), max(prompts)) if prompts else 0
    return others + shared + sum(len(prompt) - shared for prompt in prompts)


def rollout_metrics(
    candidates: Sequence[Candidates] | None,
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
    judgments: Sequence[Sequence[Sequence[Judgment]]],
    credit: Credit,
) -> Sums:
    """What the episodes, strategies and judgments of one rank came to."""
    flat = [t for task in trajectories for group in task for t in group]
    asked = [j for task in judgments for group in task for j in group if j.text is not None or j.skipped]
    read = [j for j in asked if not j.skipped]
    counted = [t for t in flat if t.valid]
    turns = [turn for t in flat for turn in t.turns]
    sums: Sums = {
        "reward/outcome": mean(t.outcome or 0.0 for t in counted),
        "reward/score": mean(t.score for t in counted),
        "reward/success": mean(t.success for t in counted),
        "rollout/turns": mean(len(t.turns) for t in counted),
        "rollout/response_tokens": mean(turn.num_sampled for turn in turns),
        "rollout/parse_error_rate": mean(not turn.parsed for turn in turns),
        "rollout/invalid_action_rate": mean(not turn.valid for turn in turns if turn.parsed),
        "rollout/truncated_rate": mean(turn.truncated for turn in turns),
        "rollout/several_actions_rate": mean(turn.several_actions for turn in turns),
        "judge/parse_error_rate": mean(not j.parsed for j in read),
        "judge/skipped_rate": mean(j.skipped for j in asked),
        "judge/flagged_share": (
            float(sum(len(j.flagged) for j in read)),
            float(sum(len(t.turns) for t, j in _pairs(trajectories, judgments) if j.text is not None)),
        ),
    }
    for reason in StopReason:
        sums[f"stop/{reason.value}"] = mean(t.stop_reason is reason for t in flat)
    given = [turn for turn in turns if turn.num_strategy_tokens or turn.strategy_missing]
    if given:
        sums |= {
            "strategy/parse_error_rate": mean(turn.strategy_missing for turn in given),
            "strategy/tokens_per_turn": mean(turn.num_strategy_tokens for turn in given),
        }
    if candidates is not None:
        every = [s for c in candidates for s in c.strategies]
        kept = [s for c in candidates for s in c.kept]
        sums |= {
            "strategy/parse_error_rate": mean(not s.parsed for s in kept),
            "strategy/candidate_parse_error_rate": mean(not s.parsed for s in every),
            "strategy/truncated_rate": mean(s.truncated for s in every),
            "strategy/response_tokens": mean(s.num_tokens for s in every),
            "strategy/distance_candidates": mean(c.distance_before for c in candidates),
            "strategy/distance_selected": mean(c.distance_after for c in candidates),
        }
    # Shares of groups are means over this rank's groups; ranks weigh by how many they have.
    num_groups = len(trajectories) * len(trajectories[0]) if trajectories else 0
    for name, value in credit.metrics.items():
        groups = len(trajectories) if name.startswith("advantage/strategy_") else num_groups
        sums[name] = (value, 1.0) if name in TOTALS else (value * groups, float(groups))
    return sums


def _pairs(
    trajectories: Sequence[Sequence[Sequence[Trajectory]]], judgments: Sequence[Sequence[Sequence[Judgment]]]
) -> list[tuple[Trajectory, Judgment]]:
    return [
        (t, j)
        for tasks, said in zip(trajectories, judgments, strict=True)
        for group, answers in zip(tasks, said, strict=True)
        for t, j in zip(group, answers, strict=True)
    ]
