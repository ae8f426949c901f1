"""Slow twins of the math: plain loops over Python floats, written from the equations and sharing no code with hsg.

    (P, N, M, T) = (3, 2, 5, 7): no two axes are equal, so a swapped axis cannot pass.

Nested lists in, nested lists (or floats) out.
"""

from __future__ import annotations

import math

P, N, M, T = 3, 2, 5, 7


def top_fraction_mean(returns, fraction, valid):
    """One group."""
    members = sorted((r for r, v in zip(returns, valid, strict=True) if v), reverse=True)
    if not members:
        return math.nan
    k = max(1, math.floor(fraction * len(members) + 1e-9))
    return sum(members[:k]) / k


def mean_and_std(members, std):
    mean = sum(members) / len(members)
    if std == "none":
        return mean, None
    return mean, math.sqrt(sum((x - mean) ** 2 for x in members) / (len(members) - (1 if std == "sample" else 0)))


def normalise(value, mean, deviation, eps):
    return value - mean if deviation is None else (value - mean) / (deviation + eps)


def group_advantages(returns, valid, std="population", eps=1e-6):
    """One group."""
    members = [r for r, v in zip(returns, valid, strict=True) if v]
    if len(members) < 2 or max(members) == min(members):
        return [0.0] * len(returns)
    mean, deviation = mean_and_std(members, std)
    return [normalise(r, mean, deviation, eps) if v else 0.0 for r, v in zip(returns, valid, strict=True)]


def turn_advantages(returns, outcomes, turn_mask, baseline, std="population", eps=1e-6):
    """The rollouts of one strategy: returns and turn_mask [M][K], outcomes [M]."""
    cells = [(m, k) for m in range(len(returns)) for k in range(len(returns[m])) if turn_mask[m][k]]
    if baseline == "pooled":
        members = [returns[m][k] for m, k in cells]
    else:
        members = [outcomes[m] for m in range(len(outcomes)) if any(turn_mask[m])]
    advantages = [[0.0] * len(row) for row in returns]
    if len(members) < 2 or max(members) == min(members):
        return advantages
    mean, deviation = mean_and_std(members, std)
    for m, k in cells:
        advantages[m][k] = normalise(returns[m][k], mean, deviation, eps)
    return advantages


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    levels,
    ref_logprobs,
    clip_low,
    clip_high,
    kl_coef,
    kl_estimator,
    aggregation,
    level_reduction,
    level_weights,
    token_limit,
    sampled_logprobs=None,
    importance="none",
    importance_cap=2.0,
):
    """[B][T] lists -> float."""
    per_row = {}  # (level, row) -> token losses
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if not mask[b][t]:
                continue
            ratio = math.exp(logprobs[b][t] - old_logprobs[b][t])
            a = advantages[b][t]
            weight = 1.0
            if importance != "none":
                weight = math.exp(old_logprobs[b][t] - sampled_logprobs[b][t])
                if importance == "truncated":
                    weight = min(weight, importance_cap)
                elif not 1 / importance_cap <= weight <= importance_cap:
                    weight = 0.0
            loss = -weight * min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
            d = ref_logprobs[b][t] - logprobs[b][t]
            loss += kl_coef * (math.exp(d) - d - 1 if kl_estimator == "k3" else d * d / 2)
            level = levels[b][t] if level_reduction == "separate" else "joint"
            per_row.setdefault((level, b), []).append(loss)
    total = 0.0
    for level, weight in ((0, level_weights[0]), (1, level_weights[1]), ("joint", 1.0)):
        rows = [losses for (of, _), losses in per_row.items() if of == level]
        if not rows:
            continue
        if aggregation == "token-mean":
            total += weight * sum(map(sum, rows)) / sum(map(len, rows))
        elif aggregation == "seq-mean-token-mean":
            total += weight * sum(sum(row) / len(row) for row in rows) / len(rows)
        elif aggregation == "seq-mean-token-sum":
            total += weight * sum(map(sum, rows)) / len(rows)
        else:
            total += weight * sum(sum(row) / token_limit for row in rows) / len(rows)
    return total


def farthest_points(vectors, num_selected, first):
    """One group; first None = centroid."""

    def unit(v):
        norm = math.sqrt(sum(x * x for x in v))
        return [x / norm if norm > 1e-9 else 0.0 for x in v]

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    units = [unit(v) for v in vectors]
    if first is None:
        mean = unit([sum(column) / len(units) for column in zip(*units, strict=True)])
        first = max(range(len(units)), key=lambda c: (round(dot(units[c], mean), 9), -c))
    selected = [first]
    while len(selected) < num_selected:
        rest = [c for c in range(len(units)) if c not in selected]
        selected.append(min(rest, key=lambda c: (round(max(dot(units[c], units[s]) for s in selected), 9), c)))
    return selected


def returns_to_go(rewards, gamma):
    """One trajectory, from the definition: sum over j >= k of gamma^(j-k) r_j."""
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def gae(rewards, values, gamma, lam):
    """One trajectory, from the definition: sum over j >= k of (gamma lam)^(j-k) delta_j, no recursion."""
    after = [*values[1:], 0.0]
    deltas = [rewards[k] + gamma * after[k] - values[k] for k in range(len(rewards))]
    return [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]


def leave_one_out(outcomes, valid):
    """One group: the advantage of every outcome."""
    members = [r for r, v in zip(outcomes, valid, strict=True) if v]
    if len(members) < 2 or max(members) == min(members):
        return [0.0] * len(outcomes)
    return [
        r - sum(o for j, o in enumerate(outcomes) if valid[j] and j != i) / (len(members) - 1) if valid[i] else 0.0
        for i, r in enumerate(outcomes)
    ]


def state_advantages(returns, states, turn_mask, std="population", eps=1e-6):
    """One group, [M][K]: every turn looks for its likes."""
    cells = [(m, k) for m in range(len(returns)) for k in range(len(returns[m])) if turn_mask[m][k]]
    advantages = [[0.0] * len(row) for row in returns]
    for m, k in cells:
        likes = [returns[i][j] for i, j in cells if states[i][j] == states[m][k]]
        if len(likes) > 1 and max(likes) > min(likes):
            advantages[m][k] = normalise(returns[m][k], *mean_and_std(likes, std), eps)
    return advantages


def whiten(values, eps):
    """All values of a batch."""
    if max(values) == min(values):
        return [0.0] * len(values)
    mean, deviation = mean_and_std(values, "population")
    return [(v - mean) / (deviation + eps) for v in values]
