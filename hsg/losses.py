"""THE loss: ratio, clip, KL, entropy, aggregation, two levels -> (loss, metrics).

    r    = exp(logprobs - old_logprobs)
    l_t  = -v_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * kl_t - entropy_coef * entropy_t
    v_t  = 1, or of the gap g = old_logprobs - sampled_logprobs:  min(cap, e^g)   or   e^g in [1/cap, cap], else 0
    kl_t = exp(d) - d - 1  (k3)   or   d^2 / 2  (k2),              d = ref_logprobs - logprobs
    loss = w_s * reduce(l over strategy tokens) + w_a * reduce(l over action tokens)        StraTA (arXiv 2605.06642)

    reduce(l) = sum_t w_t l_t / denominator          w_t                         denominator
    token-mean                                       1                           number of tokens
    seq-mean-token-mean                              1 / (tokens of t's row)     number of rows
    seq-mean-token-sum                               1                           number of rows
    seq-mean-token-sum-norm (Dr.GRPO)                1 / token_limit             number of rows

A row is a training row; only its tokens of the level count, and a row without any does not.  A reduction is a sum over
a number known beforehand, so micro-batches and ranks add up to the one-batch loss: sum `count_denominators` over all of
them, hand the total to each `policy_loss`, add the losses (divide the total by the number of ranks where gradients are
averaged over them).  Only whole rows may be split off.  Deliberately absent:
  1. k1 as a KL in the loss: the gradient of -d is that of logprobs alone, zero in expectation, whatever the reference;
  2. dual clip, a clamp of log_ratio: an overflow stays non-finite, and the trainer skips the update;
  3. advantages, masks and temperatures: all three come in per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LEVEL_REDUCTIONS = ("separate", "joint")
KL_ESTIMATORS = ("k3", "k2")
IMPORTANCE = ("none", "truncated", "masked")
LEVEL_NAMES = ("strategy", "action")  # the position is the value in `levels`

Metrics = dict[str, Tensor]
"""name -> float64 (sum, count), to be added up; of a name that ends in `_max`, (maximum, count)."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    levels: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    aggregation: str = "token-mean",
    level_reduction: str = "separate",
    strategy_weight: float = 1.0,
    action_weight: float = 1.0,
    denominators: float | Sequence[float] | Tensor | None = None,
    token_limit: int | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    row_ids: Tensor | None = None,
    sampled_logprobs: Tensor | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """The clipped policy loss of one micro-batch, and its metrics.  Source: J(theta) of StraTA (arXiv 2605.06642).

    All tensors are (B, T-1); position t speaks of input_ids[:, t+1].  response_mask: non-zero = sampled by the policy
    and trained; elsewhere nothing is read, not even NaN.  levels: 0 strategy token, 1 action token, None one level.
    level_reduction "joint", and levels None: one reduction over all tokens, to which the two weights do not apply.
    denominators: one number per level (two for levels and "separate", else one) from `count_denominators`; None =
    counted here.  token_limit: the constant of seq-mean-token-sum-norm, default T-1.  row_ids: which training row a
    token belongs to, for packed rows; None = axis 0.  entropy: per token in nats, with gradient.
    old_logprobs: where ratios begin, those of this forward before its weights moved.  sampled_logprobs: the sampler's own,
    where it is another forward; `importance` weighs each token's surrogate by `importance_weights`, and nothing else.
    Returns a 0-d loss that can always be backpropagated (0 without tokens), and metrics: see `finish_metrics`.
    ValueError: unknown option, shapes differ, a coefficient without its tensor, a level that is neither 0 nor 1.
    """
    tensors = {"old_logprobs": old_logprobs, "advantages": advantages, "ref_logprobs": ref_logprobs, "entropy": entropy}
    tensors["sampled_logprobs"] = sampled_logprobs
    _check_shapes(logprobs, response_mask=response_mask, levels=levels, row_ids=row_ids, **tensors)
    _check_options(kl_estimator, clip_low, clip_high, aggregation, token_limit, row_ids)
    if kl_coef != 0 and ref_logprobs is None:
        raise ValueError(f"ref_logprobs must be given with kl_coef {kl_coef}, got None; pass them or set kl_coef to 0")
    if entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy must be given with entropy_coef {entropy_coef}, got None; pass it or set it to 0")
    if importance != "none" and sampled_logprobs is None:
        raise ValueError(f"sampled_logprobs must be given with importance {importance!r}, got None; pass them")
    mask = response_mask != 0
    level_masks = _level_masks(mask, levels, level_reduction)

    # Everything is selected before any arithmetic: a NaN times 0 is NaN, in the gradient too.
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    logprobs = torch.where(mask, logprobs.to(dtype), 0.0)
    log_ratio = logprobs - torch.where(mask, old_logprobs.detach().to(dtype), 0.0)
    advantages = torch.where(mask, advantages.detach().to(dtype), 0.0)

    # min(r A, clip(r) A) with the side chosen before exp: on the clipped side it is a constant, and exp(log_ratio) may
    # overflow there, which would turn its zero gradient into NaN.
    with torch.no_grad():
        ratio = log_ratio.exp()
        # Of two plain numbers torch.where makes float32, which would round the bounds of a float64 loss.
        bound = advantages.new_tensor(1.0 - clip_low).where(advantages < 0, advantages.new_tensor(1.0 + clip_high))
        clipped = torch.where(advantages >= 0, ratio > bound, ratio < bound)
    surrogate = torch.where(clipped, bound, torch.where(clipped, 0.0, log_ratio).exp()) * advantages
    metrics: Metrics = {}
    if sampled_logprobs is not None and importance != "none":
        gap = torch.where(mask, (old_logprobs - sampled_logprobs).detach().to(dtype), 0.0)
        weight = importance_weights(gap, importance, importance_cap)
        surrogate = surrogate * weight
        metrics["importance"] = _sum_and_count(weight, mask)
        metrics["importance_cut"] = _sum_and_count(weight != gap.exp(), mask)
    token_loss = -surrogate
    if ref_logprobs is not None:
        d = torch.where(mask, ref_logprobs.detach().to(dtype), 0.0) - logprobs
        kl = torch.expm1(d) - d if kl_estimator == "k3" else d.square() / 2
        if kl_coef != 0:
            token_loss = token_loss + kl_coef * kl
        metrics["kl"] = _sum_and_count(kl, mask)
    if entropy is not None:
        entropy = torch.where(mask, entropy.to(dtype), 0.0)
        if entropy_coef != 0:
            token_loss = token_loss - entropy_coef * entropy
        metrics["entropy"] = _sum_and_count(entropy, mask)

    weights = (strategy_weight, action_weight) if len(level_masks) == 2 else (1.0,)
    totals = _denominators(denominators, len(level_masks))
    loss = token_loss.new_zeros(())
    for i, (suffix, level_mask) in enumerate(level_masks.items()):
        token_weight, count = _token_weights(level_mask, aggregation, token_limit, row_ids)
        level_sum = (torch.where(level_mask, token_loss, 0.0) * token_weight.to(dtype)).sum()
        metrics["loss" + suffix] = torch.stack([level_sum.detach().double(), level_sum.new_tensor(count).double()])
        total = count if totals is None else totals[i]
        if total > 0:
            loss = loss + weights[i] * level_sum / total
        elif count > 0:
            raise ValueError(f"denominators must be > 0 for a level with tokens, got {total}; count the whole batch")
        else:
            loss = loss + 0.0 * level_sum  # An empty level: the sum is 0, and it keeps the graph.
    metrics |= _ratio_metrics(log_ratio.detach(), ratio, clipped & (advantages != 0), mask, levels)
    return loss, metrics


def importance_weights(gap: Tensor, kind: str, cap: float) -> Tensor:
    """The weight of a token that another forward sampled; gap: log-prob where ratios begin - the sampler's, nats.

    truncated  min(cap, e^gap)                              TIS, truncated importance sampling
    masked     e^gap where 1/cap <= e^gap <= cap, else 0    IcePop's mask on both sides
    """
    if kind not in IMPORTANCE[1:]:
        raise ValueError(f"importance must be one of {', '.join(IMPORTANCE)}, got {kind!r}; choose one")
    if not cap > 1:
        raise ValueError(f"importance_cap must be > 1, got {cap}; 2 is usual")
    bound = math.log(cap)
    weight = gap.clamp(max=bound).exp()  # before exp: a wide gap would overflow
    return weight if kind == "truncated" else torch.where(gap.abs() <= bound, weight, 0.0)


def count_denominators(
    response_mask: Tensor,
    *,
    levels: Tensor | None = None,
    aggregation: str = "token-mean",
    level_reduction: str = "separate",
    row_ids: Tensor | None = None,
) -> Tensor:
    """The denominators of one micro-batch, to be summed over all micro-batches and ranks of an optimizer step.

    response_mask, levels, row_ids (B, T-1) as in `policy_loss` -> (2,) float64 for levels and "separate", else (1,):
    the number of tokens (token-mean) or of rows with a token (all others) of each level.
    """
    _check_shapes(response_mask, levels=levels, row_ids=row_ids)
    masks = _level_masks(response_mask != 0, levels, level_reduction)
    counts = [_token_weights(mask, aggregation, None, row_ids)[1] for mask in masks.values()]
    return torch.tensor(counts, dtype=torch.float64, device=response_mask.device)


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of several micro-batches, or ranks, as one: sums and counts are added, maxima compared."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            seen = merged.get(name, torch.zeros_like(value))
            total = seen + value
            merged[name] = torch.stack([torch.maximum(seen[0], value[0]), total[1]]) if name.endswith("_max") else total
    return merged


def finish_metrics(metrics: Metrics) -> dict[str, float]:
    """Plain numbers; what has no token behind it is undefined and left out.

    loss: reduced over its level, unweighted (loss_strategy and loss_action where each is reduced on its own).  Per
    token: ratio · clip_fraction (also _strategy, _action), where the clip holds the gradient back · approx_kl, k3 of
    old_logprobs against logprobs in nats · kl to the reference, nats · entropy, nats · importance, the weight, and
    importance_cut, where it is not e^gap.  log_ratio_max: largest |log r|.
    """
    pairs = {name: value.tolist() for name, value in metrics.items()}
    return {k: (v if k.endswith("_max") else v / count) for k, (v, count) in pairs.items() if count > 0}


def _check_shapes(logprobs: Tensor, **others: Tensor | None) -> None:
    if logprobs.ndim != 2:
        raise ValueError(
            f"logprobs must be (B, T-1), got shape {tuple(logprobs.shape)}; pad or pack rows into two axes"
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs {tuple(logprobs.shape)}, got {tuple(tensor.shape)}; "
                "every per-token tensor speaks of input_ids[:, t+1]"
            )


def _check_options(
    kl_estimator: str,
    clip_low: float,
    clip_high: float,
    aggregation: str,
    token_limit: int | None,
    row_ids: Tensor | None,
) -> None:
    if kl_estimator == "k1":
        raise ValueError(
            "kl_estimator must be k3 or k2 in the loss, got 'k1'; its gradient there does not depend on the reference "
            "and is zero on average, so use k1 as a term of the reward"
        )
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {', '.join(KL_ESTIMATORS)}, got {kl_estimator!r}; choose one")
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}; 0.2 is usual")
    if token_limit is not None and not token_limit > 0:
        raise ValueError(f"token_limit must be > 0, got {token_limit}; give the longest row, in tokens")
    if aggregation == "seq-mean-token-sum-norm" and token_limit is None and row_ids is not None:
        raise ValueError("token_limit must be given for packed rows, got None; the packed width says nothing of a row")


def _level_masks(mask: Tensor, levels: Tensor | None, level_reduction: str) -> dict[str, Tensor]:
    """What is reduced on its own: metric suffix -> mask (B, T-1)."""
    if level_reduction not in LEVEL_REDUCTIONS:
        raise ValueError(
            f"level_reduction must be one of {', '.join(LEVEL_REDUCTIONS)}, got {level_reduction!r}; choose one of them"
        )
    if levels is None:
        return {"": mask}
    by_level = {f"_{name}": mask & (levels == level) for level, name in enumerate(LEVEL_NAMES)}
    stray = mask & (levels != 0) & (levels != 1)
    if stray.any():
        raise ValueError(
            f"levels must be 0 (strategy) or 1 (action) where response_mask is set, got {levels[stray][0].item()}; "
            "mask tokens of neither level out"
        )
    return by_level if level_reduction == "separate" else {"": mask}


def _token_weights(
    mask: Tensor, aggregation: str, token_limit: int | None, row_ids: Tensor | None
) -> tuple[Tensor, float]:
    """The weight w_t of every token (B, T-1), float64, and the denominator counted from this mask."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}; choose one")
    ones = torch.ones_like(mask, dtype=torch.float64)
    if aggregation == "token-mean":
        return ones, float(mask.sum())
    if row_ids is None:
        row_ids = torch.arange(len(mask), device=mask.device).unsqueeze(1).expand(mask.shape)
    rows, row_of, lengths = row_ids[mask].unique(return_inverse=True, return_counts=True)
    num_rows = float(len(rows))
    if aggregation == "seq-mean-token-mean":
        return ones.masked_scatter(mask, 1.0 / lengths[row_of].double()), num_rows
    if aggregation == "seq-mean-token-sum":
        return ones, num_rows
    return ones / (token_limit or max(mask.shape[1], 1)), num_rows


def _denominators(given: float | Sequence[float] | Tensor | None, num_levels: int) -> list[float] | None:
    if given is None:
        return None
    numbers = torch.as_tensor(given, dtype=torch.float64).flatten().tolist()
    if len(numbers) != num_levels or not all(0 <= x < math.inf for x in numbers):
        raise ValueError(
            f"denominators must be {num_levels} finite number(s) >= 0, one per reduction, got {numbers}; "
            "use count_denominators with the same options"
        )
    return numbers


def _ratio_metrics(log_ratio: Tensor, ratio: Tensor, held: Tensor, mask: Tensor, levels: Tensor | None) -> Metrics:
    largest = log_ratio.abs().amax() if log_ratio.numel() else log_ratio.new_zeros(())
    metrics = {
        "ratio": _sum_and_count(ratio, mask),
        "clip_fraction": _sum_and_count(held, mask),
        "approx_kl": _sum_and_count(ratio - 1 - log_ratio, mask),
        "log_ratio_max": torch.stack([largest.double(), mask.sum().double()]),
    }
    for level, name in enumerate(LEVEL_NAMES if levels is not None else ()):
        metrics[f"clip_fraction_{name}"] = _sum_and_count(held, mask & (levels == level))
    return metrics


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([torch.where(mask, values.detach().double(), 0.0).sum(), mask.sum().double()])
