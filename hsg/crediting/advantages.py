"""From outcomes to returns to advantages, on both levels: strategies (N) and turns (M, K).

    outcomes (P, N, M) ──── mean of the best delta ────> returns (P, N) ───────── over N ────────> advantages (P, N)
                  └── - kappa * flagged + penalties ──> returns (P, N, M, K) ── over M and K ──> advantages (P, N, M, K)

    A = (R - mean) / (std + eps)        StraTA (arXiv 2605.06642), strategy group = axis N, rollout group = axis M

Everything but `entropy_advantages`, which the update calls, is computed and returned in float64, without gradient.  A
group is an axis; leading axes are free, so a flat baseline (GRPO) is the same call with N = 1 and its N*M rollouts on
the M axis.  `valid` and `turn_mask` are True (or non-zero) where a value counts; what stands elsewhere is never read,
NaN included.  Deliberately absent:
  1. groups found by text or id: structure is an axis until `batch.py` flattens it;
  2. a group of equal values told by its std: eight float32 rewards of 0.7 have std 6e-8, so we test max - min == 0;
  3. rewards: what an environment paid is in the record, untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

STD_KINDS = ("population", "sample", "none")


# ---------------------------------------------------------------------------------------------- one group, last axis


def group_advantages(
    returns: Tensor, *, std: str = "population", eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """Normalise each group (last axis): (R - mean) / (std + eps), or R - mean with std="none" (Dr.GRPO).

    returns (..., G), valid (..., G) -> (..., G) float64.  Exactly 0 where all valid members are equal, for a lone valid
    member, and for an invalid one.  ValueError: a valid member is not finite, shapes differ, unknown std, eps < 0.
    """
    valid = _mask("valid", valid, "returns", returns)
    returns = _finite("returns", returns, valid)
    mean, scale, live = _group_statistics(returns, valid, std, eps)
    return torch.where(live & valid, (returns - mean) / scale, 0.0)


def top_fraction_mean(returns: Tensor, fraction: float, *, valid: Tensor | None = None) -> Tensor:
    """Mean of the k largest valid members of the last axis, k = max(1, floor(fraction * number of valid)).

    returns (..., G), valid (..., G) -> (...) float64, NaN where no member is valid.  This is the strategy return of
    StraTA with fraction = delta; the rounding of k is ours.  ValueError: fraction outside (0, 1], a valid member is not
    finite, shapes differ.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}; 1 averages over all members")
    valid = _mask("valid", valid, "returns", returns)
    returns = _finite("returns", returns, valid)
    if returns.shape[-1] == 0:
        return returns.new_full(returns.shape[:-1], math.nan)
    # 1e-9 because 0.29 * 100 falls short of 29 in floating point.
    k = torch.floor(fraction * valid.sum(-1, keepdim=True).double() + 1e-9).clamp(min=1)  # (..., 1)
    ordered = torch.where(valid, returns, -math.inf).sort(dim=-1, descending=True).values
    chosen = torch.arange(returns.shape[-1], device=returns.device) < k
    # Averaging the distance to the largest member gives equal members their own value to the last bit, whatever k is:
    # strategies with equal outcomes must come out as an all-equal group.
    top = ordered[..., :1]
    mean = (top + torch.where(chosen, ordered - top, 0.0).sum(-1, keepdim=True) / k).squeeze(-1)
    return torch.where(valid.any(-1), mean, math.nan)


# ------------------------------------------------------------------------------------------------------------ returns


def strategy_returns(
    outcomes: Tensor, delta: float, *, valid: Tensor | None = None, penalties: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """R(z_i) = mean of the largest max(1, floor(delta * M)) outcomes under strategy i, plus the strategy's penalties.

    outcomes (..., N, M), valid (..., N, M) of rollouts, penalties (..., N) of numbers <= 0 -> returns (..., N) float64
    and valid (..., N) bool.  A strategy without a valid rollout is invalid, its return NaN.  Penalties of turns have no
    part in it.  ValueError: as `top_fraction_mean`, a positive penalty.
    """
    returns = top_fraction_mean(outcomes, delta, valid=valid)  # (..., N)
    valid = ~returns.isnan()
    if penalties is not None:
        returns = returns + _penalties(penalties, valid)
    return torch.where(valid, returns, math.nan), valid


def turn_returns(
    outcomes: Tensor,
    flagged: Tensor,
    kappa: float,
    *,
    turn_mask: Tensor | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """R(a_t^ij) = R(tau_ij) - kappa * [turn t was flagged by the self-judgment] + the turn's penalties.

    outcomes (..., M), flagged (..., M, K) bool, penalties (..., M, K) of numbers <= 0 -> (..., M, K) float64, NaN where
    turn_mask (..., M, K) is False (the turn does not exist or its trajectory is invalid); None = every turn counts.
    ValueError: kappa < 0, a positive penalty, shapes differ, an outcome that counts is not finite.
    """
    if not 0 <= kappa < math.inf:
        raise ValueError(f"kappa must be a finite number >= 0, got {kappa}; it is subtracted from flagged turns")
    if outcomes.shape != flagged.shape[:-1]:
        raise ValueError(
            f"outcomes must be (..., M) for flagged (..., M, K), got {tuple(outcomes.shape)} and "
            f"{tuple(flagged.shape)}; give one outcome per trajectory"
        )
    turn_mask = _mask("turn_mask", turn_mask, "flagged", flagged)
    returns = _finite("outcomes", outcomes.unsqueeze(-1).expand(flagged.shape), turn_mask)  # (..., M, K)
    returns = torch.where(flagged.bool(), returns - kappa, returns)
    if penalties is not None:
        returns = returns + _penalties(penalties, turn_mask)
    return torch.where(turn_mask, returns, math.nan)


# --------------------------------------------------------------------------------------------------- turn advantages


def turn_advantages(
    returns: Tensor,
    outcomes: Tensor,
    *,
    turn_mask: Tensor | None = None,
    valid: Tensor | None = None,
    baseline: str = "pooled",
    std: str = "population",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of every turn within the M rollouts of its strategy (StraTA); baselines in `TURN_BASELINES`.

    returns (..., M, K), outcomes (..., M), turn_mask (..., M, K): the turn exists and its trajectory is valid; valid
    (..., M): the trajectory has a say in the trajectory baseline, by default where it has a turn -> (..., M, K)
    float64, exactly 0 where turn_mask is False.  ValueError: unknown baseline or std, shapes differ, a return or an
    outcome that counts is not finite.
    """
    if baseline not in TURN_BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(TURN_BASELINES)}, got {baseline!r}; choose one of them")
    if returns.ndim < 2 or outcomes.shape != returns.shape[:-1]:
        raise ValueError(
            f"outcomes must be (..., M) for returns (..., M, K), got {tuple(outcomes.shape)} and "
            f"{tuple(returns.shape)}; give one outcome per trajectory"
        )
    turn_mask = _mask("turn_mask", turn_mask, "returns", returns)
    if valid is None:
        valid = turn_mask.any(-1)
    else:
        valid = _mask("valid", valid, "outcomes", outcomes)
        turn_mask = turn_mask & valid.unsqueeze(-1)
    returns, outcomes = _finite("returns", returns, turn_mask), _finite("outcomes", outcomes, valid)
    return TURN_BASELINES[baseline](returns, outcomes, turn_mask, valid, std, eps)


def _pooled(returns: Tensor, outcomes: Tensor, turn_mask: Tensor, valid: Tensor, std: str, eps: float) -> Tensor:
    """Mean and std over all turns of the M rollouts, so long trajectories weigh more in the baseline.

    A group with equal outcomes and a few flags takes its whole scale from the penalty, whatever kappa is: intended,
    and counted by `count_penalty_only_groups`.
    """
    pooled = group_advantages(returns.flatten(-2), std=std, eps=eps, valid=turn_mask.flatten(-2))  # (..., M*K)
    return pooled.reshape(returns.shape)


def _trajectory(returns: Tensor, outcomes: Tensor, turn_mask: Tensor, valid: Tensor, std: str, eps: float) -> Tensor:
    """Mean and std over the M outcomes: a penalty keeps its size in reward units, and equal outcomes teach nothing."""
    mean, scale, live = (x.unsqueeze(-1) for x in _group_statistics(outcomes, valid, std, eps))  # (..., 1, 1)
    return torch.where(live & turn_mask, (returns - mean) / scale, 0.0)


TURN_BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, str, float], Tensor]] = {
    "pooled": _pooled,
    "trajectory": _trajectory,
}
"""`advantage.turn_baseline`: (returns, outcomes, turn_mask, valid, std, eps) -> advantages (..., M, K)."""


# ------------------------------------------------------------------------------------------------------------ metrics


def group_metrics(advantages: Tensor, *, group_axes: int = 1) -> dict[str, float]:
    """Share of groups that teach (`frac_mixed`: some advantage is not 0) and that do not (`dead_groups`).

    advantages (..., G), or (..., M, K) with group_axes=2, as this module returns them: an invalid member is 0, so a
    group without a valid member is dead.  No group at all: both are undefined, and left out.
    """
    groups = advantages.flatten(-group_axes)  # (..., G)
    mixed = (groups != 0).any(-1).double()
    if mixed.numel() == 0:
        return {}
    share = mixed.mean().item()
    return {"dead_groups": 1.0 - share, "frac_mixed": share}


def count_penalty_only_groups(returns: Tensor, outcomes: Tensor, *, turn_mask: Tensor | None = None) -> int:
    """Number of rollout groups whose outcomes are all equal while their turns' returns are not.

    returns (..., M, K), outcomes (..., M), turn_mask (..., M, K) as in `turn_advantages`.
    """
    turn_mask = _mask("turn_mask", turn_mask, "returns", returns)
    outcomes_differ = _differ(_finite("outcomes", outcomes, turn_mask.any(-1)), turn_mask.any(-1))
    returns = _finite("returns", returns, turn_mask)
    returns_differ = _differ(returns.flatten(-2), turn_mask.flatten(-2))
    return int((returns_differ & ~outcomes_differ).sum())


# ------------------------------------------------------------------------------------------------------------ helpers


def _group_statistics(values: Tensor, valid: Tensor, std: str, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, divisor, and whether any two valid members differ: (..., G) -> three times (..., 1)."""
    if std not in STD_KINDS:
        raise ValueError(f"std must be one of {', '.join(STD_KINDS)}, got {std!r}; choose one of them")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps}; it is added to the standard deviation")
    count = valid.sum(-1, keepdim=True)
    mean = values.sum(-1, keepdim=True) / count.clamp(min=1)
    live = _differ(values, valid).unsqueeze(-1)
    if std == "none":
        return mean, torch.ones_like(mean), live
    squares = torch.where(valid, values - mean, 0.0).square().sum(-1, keepdim=True)
    scale = (squares / (count - int(std == "sample")).clamp(min=1)).sqrt() + eps
    return mean, scale, live


def _differ(values: Tensor, valid: Tensor) -> Tensor:
    """True where max - min over the valid members of the last axis is above 0; False for fewer than two of them."""
    if values.shape[-1] == 0:
        return valid.any(-1)
    highest = torch.where(valid, values, -math.inf).amax(-1)
    return highest > torch.where(valid, values, math.inf).amin(-1)


def _mask(name: str, mask: Tensor | None, of: str, values: Tensor) -> Tensor:
    """The mask as bool, all True for None.  A mask that would broadcast is refused: it may be on the wrong axis."""
    if values.ndim == 0:
        raise ValueError(f"{of} must have a group axis, got a 0-d tensor; give shape (..., group)")
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(
            f"{name} must have the shape of {of} {tuple(values.shape)}, got {tuple(mask.shape)}; expand it first"
        )
    return mask.bool()


def _finite(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """The values in float64 with 0 where the mask is False; a value that counts must be finite."""
    values = torch.where(mask, values.detach().double(), 0.0)
    if not values.isfinite().all():
        raise ValueError(
            f"{name} must be finite where they are valid, got {values[~values.isfinite()][0].item()}; "
            "mark a member without a value as invalid"
        )
    return values


def _penalties(penalties: Tensor, mask: Tensor) -> Tensor:
    if penalties.shape != mask.shape:
        raise ValueError(
            f"penalties must have the shape of the returns {tuple(mask.shape)}, got {tuple(penalties.shape)}; "
            "give one number per return"
        )
    penalties = _finite("penalties", penalties, mask)
    if (penalties > 0).any():
        raise ValueError(f"penalties must be <= 0, got {penalties.max().item()}; they are added to the return")
    return penalties


def entropy_advantages(advantages: Tensor, entropy: Tensor | None, bonus: float, cap: float) -> Tensor:
    """EntropyAdv (arXiv 2506.14758): A + min(bonus * H, cap * |A|), H without gradient.

    advantages, entropy (B, T-1), entropy in nats at the sampled temperature -> (B, T-1); an advantage of 0 stays 0.
    """
    if bonus == 0:
        return advantages
    if entropy is None:
        raise ValueError(f"entropy must be given with an entropy bonus of {bonus}, got None; pass it or set it to 0")
    return advantages + torch.minimum(bonus * entropy.detach().to(advantages.dtype), cap * advantages.abs())
