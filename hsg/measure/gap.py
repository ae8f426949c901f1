"""How far the sampler's log-probs are from the training forward's, and from where on that is another distribution.

    gap     trainer's - sampler's log-prob of each sampled token, nats, before a weight of the iteration moves
    noise   the same between two training forwards of one probe, packed and padded: what rounding alone does to this model
    p99     of |gap| above  3 x noise's p99    one warning line      (more than rounding: routing that flips, say)
    mean    of |gap| above  4 x noise's mean   the run stops         (another mask, position, weight or temperature)

A gap is off-policy data and not an error: `loss.importance` weighs it.  Deliberately absent: a correction of sampled
log-probs, replay of a mixture of experts' routing (the sampler's choices are not kept; where rounding flips one, the
weights of the tokens behind it say so).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsg.batch import Row, collate, microbatches, row_layout
from hsg.config.options import Config
from hsg.engine.packing import packed_attention
from hsg.engine.precision import compute_weights, is_half
from hsg.losses import importance_weights
from hsg.model.fit import fit_of
from hsg.model.models import score
from hsg.ranks.distributed import Distributed
from hsg.types import ACTION, Tokens

WARN, STOP = 3.0, 4.0
"""Times the noise: of its p99, of its mean. Sound samplers are at 0.9 to 1.2 times its mean, in bfloat16 as in float32; a mask
that hides eight keys at 4.8, T = 1 for 0.7 or shifted positions at 10 and more (experiments/benchmarks/gap.py)."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def gap_of(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """(tokens,) float32 on the CPU: the training forward's log-probs of sampled tokens less the others'.

    Where the forward is not finite, skipping the step is the answer; where only the others are, the gap is infinite.
    """
    logprobs = logprobs.detach().float()
    gap = (logprobs - others.float())[mask & logprobs.isfinite()]
    return gap.nan_to_num(nan=math.inf).cpu()


@dataclass(frozen=True)
class Spread:
    """Mean, 99th percentile and largest of |gap|, nats."""

    mean: float = 0.0
    p99: float = 0.0
    largest: float = 0.0


FLOOR = {False: Spread(1e-4, 5e-4), True: Spread(2.5e-2, 1e-1)}
"""Nats by is_half: what no noise counts as less than; recurrences in float32 reach 4e-4 at p99."""
CEILING = {False: 1e-3, True: 1e-1}
"""Nats by is_half: a mean above it is no rounding. Two training forwards that differ by more are two distributions."""
UNMEASURED = Spread(6e-2, 1e-1)
"""In bfloat16, where both forwards of the probe were one computation: a sharded model has no other weights than its bfloat16
ones, and unless prefixes are shared its packed rows meet the same kernels. Twice what smollm2 has."""


def importance_of(config: Config, model: Any) -> str:
    """`loss.importance` as it is meant: auto is truncated in bfloat16, where the trainer's own log-probs are known."""
    if config.loss.importance != "auto":
        return config.loss.importance
    return "truncated" if is_half(model) and config.knows_trainer_logprobs else "none"


class GapCheck:
    """Says what the gap of an iteration is, and stops a run whose sampler plays another distribution.

    importance  none | truncated | masked: what the loss does about a gap
    noise       None until it is measured; then floors alone count
    """

    def __init__(self, config: Config, model: Any, distributed: Distributed) -> None:
        self.config, self.distributed = config, distributed
        self.importance = importance_of(config, model)
        self.noise: Spread | None = None
        self._half = is_half(model)
        sizes = vars(model.config.get_text_config())
        self._has_experts = any((sizes.get(name) or 0) > 1 for name in EXPERTS)
        self._warned = False

    @torch.no_grad()
    def probe(self, model: Any, sampled: Sequence[Tokens]) -> None:
        """Measure the noise, once in a run, on some rows of the main rank; its positions are in no cost. Collective.

        One forward as the update's, packed and in its weights, and one padded in the sampler's.
        """
        if self.noise is not None:
            return
        rows = [Row(t, torch.zeros(len(t.response_mask)), ACTION, 0) for t in sampled if t.num_sampled]
        rows = self.distributed.from_main(next(microbatches(rows, self.config.update.microbatch_tokens), []))
        if not rows:
            return
        batch, packing = collate(rows).to(self.distributed.device), fit_of(model, self.config).packing or "off"
        with contextlib.nullcontext() if packing == "off" else packed_attention(model):
            packed, _ = score(model, batch, layout=row_layout(rows, batch, packing))
        with compute_weights(model):
            padded, _ = score(model, batch)
        self.noise = self.spread([gap_of(packed, padded, batch.response_mask)])

    def __call__(self, gaps: Sequence[Tensor]) -> dict[str, float]:
        """Metrics of an iteration's gap on this rank's tokens. RuntimeError where it is too wide. Collective."""
        spread = self.spread(gaps)
        self._judge(spread)
        values = {"logprob_gap_mean": spread.mean, "logprob_gap_p99": spread.p99, "logprob_gap_max": spread.largest}
        return {f"rollout/{name}": value for name, value in (values | self._shares(gaps)).items()}

    def spread(self, gaps: Sequence[Tensor]) -> Spread:
        """Over all ranks, and the same on each, so that they stop together: percentile and largest of the worst one."""
        gap = torch.cat([*gaps, torch.zeros(0)]).abs()
        ordered = torch.cat([gap, torch.zeros(1)]).sort().values
        place = max(0, math.ceil(0.99 * len(ordered)) - 1)
        p99, largest = (self.distributed.max(float(x)) for x in (ordered[place], ordered[-1]))
        total, count = self._sums(gap.double().sum(), torch.tensor(len(gap)))
        return Spread(total / max(count, 1.0), p99, largest)

    def _shares(self, gaps: Sequence[Tensor]) -> dict[str, float]:
        """Of the tokens: whose gap alone would be past the ratio's clip; how many they are worth once they are weighed."""
        gap, loss = torch.cat([*gaps, torch.zeros(0)]).double(), self.config.loss
        ratio = gap.exp()
        clipped = (ratio < 1 - loss.clip_low) | (ratio > 1 + loss.clip_high)
        kind = "truncated" if self.importance == "none" else self.importance
        weight = importance_weights(gap, kind, loss.importance_cap)
        count, past, total, squares = self._sums(
            torch.tensor(len(gap)), clipped.sum(), weight.sum(), weight.square().sum()
        )
        if not count:
            return {}
        ess = total**2 / (squares * count) if squares else 0.0
        return {"logprob_gap_clipped": past / count, "logprob_gap_ess": ess}

    def _sums(self, *values: Tensor) -> list[float]:
        return self.distributed.sum(torch.stack([value.double() for value in values])).tolist()

    def _judge(self, spread: Spread) -> None:
        noise, floor = self.noise or Spread(), FLOOR[self._half]
        if self._half and noise.mean < floor.mean / 10:
            floor = UNMEASURED
        usual_mean = min(max(noise.mean, floor.mean), CEILING[self._half])
        limit = self.config.rollout.max_logprob_gap or STOP * usual_mean
        if spread.mean > limit:
            raise RuntimeError(
                "log-probs of the sampler and of the training forward must agree within rollout.max_logprob_gap = "
                f"{limit:.3g} nats in the mean, got {spread.mean:.3g} (99th percentile {spread.p99:.3g}, largest "
                f"{spread.largest:.3g}), where rounding makes {noise.mean:.3g}: one of them is another distribution; the "
                "model may not handle the rollout's cache or packed rows: try rollout.cache=off, update.packing=off, "
                "model.attention=eager"
            )
        usual = max(noise.p99, floor.p99)
        if spread.p99 > WARN * usual and not self._warned and self.distributed.is_main:
            print(f"warning: {self._warning(spread, usual)}", file=sys.stderr)
        self._warned |= spread.p99 > WARN * usual

    def _warning(self, spread: Spread, usual: float) -> str:
        told = (
            f"log-probs of the sampler and of the training forward differ by {spread.p99:.3g} nats at the 99th percentile "
            f"(mean {spread.mean:.3g}), more than {WARN:g} times what rounding makes ({usual:.3g}); "
        )
        told += (
            f"loss.importance={self.importance} weighs it (rollout/logprob_gap_*)"
            if self.importance != "none"
            else "the update leaves it out of account; loss.importance=truncated would weigh it"
            if self.config.recomputes_logprobs
            else "ratios begin with it; rollout.logprobs=auto and loss.importance=truncated would weigh it instead"
        )
        if self._has_experts:
            told += "; experts are chosen anew in the update, without routing replay, and rounding flips some choices"
        return told
