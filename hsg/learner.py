"""The update: rows in, changed weights out. Epochs x mini-batches x micro-batches of ONE loss, global denominators.

    optimizer step = count denominators over all micro-batches and ranks
                   -> score, policy_loss, backward for each micro-batch
                   -> add gradients over ranks, clip, step

so that neither the micro-batch split nor the number of ranks changes the gradient.  Every forward pass goes through
`Learner.score`, which packs the rows.  Deliberately absent: a scaler (master weights are float32), gradient accumulation
by averaging, replay of rows from older iterations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hsg.batch import Row, collate, microbatches, minibatches, row_layout, unit_keys
from hsg.config.options import Config
from hsg.crediting.advantages import entropy_advantages
from hsg.engine.packing import packed_attention
from hsg.engine.seeds import make_generator
from hsg.learning.underway import NonfiniteError, Underway
from hsg.losses import Metrics, count_denominators, finish_metrics, merge_metrics, policy_loss
from hsg.measure.gap import GapCheck, Spread, gap_of
from hsg.measure.speed import num_unique_tokens
from hsg.model.fit import fit_of
from hsg.model.lora import adapters_off
from hsg.model.models import score
from hsg.model.sharding import like
from hsg.ranks.distributed import Distributed
from hsg.types import ACTION, Batch, Tokens


@dataclass
class UpdateCosts:
    """Token positions of one iteration's update, all passes together, padding included.

    What gradient checkpointing forwards a second time is not counted.
    """

    update_positions: int = 0
    update_unique_tokens: int = 0  # what an update that forwards each prompt once needs, last tokens included
    head_positions: int = 0  # rows of the vocabulary head
    trained_tokens: int = 0
    score_positions: int = 0  # forwarded without a gradient: log-probs of the old policy and of the reference


class Learner:
    """Owns the optimizer of one model. `reference`: the model that a KL term holds on to, or None."""

    def __init__(
        self, config: Config, model: Any, distributed: Distributed, *, context_limit: int, reference: Any = None
    ) -> None:
        self.config, self.model, self.distributed = config, model, distributed
        self.reference, self.context_limit = reference, context_limit
        self.packing = fit_of(model, config).packing or "off"
        distributed.shard(model)  # before the optimizer takes its parameters
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        self.costs = UpdateCosts()  # since the trainer last took them
        self.gap = GapCheck(config, model, distributed)
        self._gaps: list[Tensor] | None = None  # collected in the first optimizer step of an iteration; None: done
        self._gap_values: dict[str, float] | None = None  # what recomputed log-probs said of this iteration
        self.optimizer_steps = 0
        self.progress = 0.0  # share of the run's mini-batches behind us, for the schedule
        self.nonfinite_in_a_row = 0
        self.underway: Underway | None = None  # the update that this iteration is in the middle of

    def state_dict(self) -> dict[str, Any]:
        """Counters, AdamW's moments by the name of the parameter, and the update under way, if there is one."""
        moments = {}
        for name, parameter in self.model.named_parameters():
            if parameter in self.optimizer.state:
                moments[name] = {k: self.distributed.whole(v) for k, v in self.optimizer.state[parameter].items()}
        state: dict[str, Any] = {"moments": moments, "learning_rate": self.optimizer.param_groups[0]["lr"]}
        state["noise"] = self.gap.noise and vars(self.gap.noise)
        state |= {name: getattr(self, name) for name in ("optimizer_steps", "progress", "nonfinite_in_a_row")}
        if self.underway is not None:
            mine = {**self.underway.state_dict(), "costs": vars(self.costs)}
            state["underway"] = self.distributed.gather([mine])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly, on any number of ranks."""
        for name, parameter in self.model.named_parameters():
            if name in state["moments"]:
                held = state["moments"][name]
                self.optimizer.state[parameter] = {k: like(v, parameter) for k, v in held.items()}
        for group in self.optimizer.param_groups:
            group["lr"] = state["learning_rate"]
        noise = state.get("noise")  # a run of an earlier version measures it anew
        self.gap.noise = noise and Spread(**noise)
        for name in ("optimizer_steps", "progress", "nonfinite_in_a_row"):
            setattr(self, name, state[name])
        if "underway" in state:
            mine = self.distributed.share(state["underway"])
            self.underway = Underway.join(mine, of=state["underway"][0])
            for part in mine:
                for name, count in part["costs"].items():
                    setattr(self.costs, name, getattr(self.costs, name) + count)

    def update(
        self, rows: list[Row] | None, iteration: int, on_rows: Callable[[int], object] = lambda count: None
    ) -> dict[str, float]:
        """Epochs x mini-batches of optimizer steps on this iteration's rows.

        `rows` None: the update that a stopped run was in the middle of goes on. `on_rows`: told after each micro-batch how
        many rows it had. `Stopped`, between two steps: it was asked to stop, and `state_dict` holds the rest.
        """
        config = self.config.update
        by_row = config.minibatch_turns is not None
        if rows is not None:
            self.underway = Underway(self._with_reference(rows))
            self.underway.values = {"update/skipped_nonfinite": 0.0, "update/skipped_dead": 0.0}
            self._gaps = [] if self._gap_values is None else None
            self.underway.values |= self._gap_values or {}
            self._gap_values = None
            unique = num_unique_tokens(self._live(self.underway.rows), self.config.group_shape)
            self.costs.update_unique_tokens += config.epochs * unique
        at = self.underway
        assert at is not None
        units = self.distributed.gather([len(set(unit_keys(at.rows, by_row=by_row)))])
        first, total = sum(units[: self.distributed.rank]), sum(units)
        size = config.minibatch_turns or config.minibatch_trajectories or max(total, 1)
        num_parts = max(1, math.ceil(total / size))
        self.model.train()
        for epoch in range(at.num_done // num_parts, config.epochs):
            generator = make_generator("minibatches", self.config.seed, iteration, epoch)
            parts = minibatches(at.rows, num_parts, generator, by_row=by_row, first=first, total=total)
            for place in range(at.num_done % num_parts, num_parts):
                behind = (epoch * num_parts + place) / (config.epochs * num_parts)
                self.progress = (iteration + behind) / max(1, self.config.train.iterations)
                step_metrics, norm = self.optimizer_step(parts[place], at.values, on_rows)
                # On the CPU: a gathered tensor would come back on the GPU of the rank that sent it, and what a checkpoint
                # brought back is here too.
                at.metrics.append({name: value.cpu() for name, value in step_metrics.items()})
                if at.num_done == 0:  # where ratios are 1, but for rounding
                    farthest = step_metrics.get("log_ratio_max", torch.zeros(2))[0].item()
                    at.values["update/first_log_ratio_max"] = self.distributed.max(farthest)
                if norm is not None:
                    at.norms.append(norm)
                at.num_done += 1
                if at.num_done < config.epochs * num_parts:
                    self.distributed.stop_together()
        self.optimizer.zero_grad(set_to_none=True)  # 4 bytes a weight that the next rollout has for its cache
        self.model.eval()
        self.underway = None
        merged = merge_metrics(self.distributed.gather([merge_metrics(at.metrics)]))
        values = at.values | {f"update/{name}": value for name, value in finish_metrics(merged).items()}
        if at.norms:
            values["update/grad_norm"] = sum(at.norms) / len(at.norms)
            values["update/learning_rate"] = self.optimizer.param_groups[0]["lr"]  # of the last step taken
        values["update/optimizer_steps"] = float(self.optimizer_steps)
        return values

    def optimizer_step(
        self, rows: list[Row], values: dict[str, float], on_rows: Callable[[int], object] = lambda count: None
    ) -> tuple[dict[str, Any], float | None]:
        """One step on one mini-batch: global denominators first, then every micro-batch of the one loss."""
        mine = self._denominators(rows)
        denominators = self.distributed.sum(mine.clone())
        live = self._live(rows)
        if self.distributed.max(float(len(live))) == 0:
            values["update/skipped_dead"] += 1
            return {}, None  # no gradient at all: weights and moments stay as they are
        self.optimizer.zero_grad(set_to_none=True)
        shares = self.distributed.equally_many(self.model, self._split(live), [self._filler()])
        done = []  # empty where this rank has nothing to train
        for part in shares:
            done.append(self._backward(part, denominators))
            on_rows(len(part))
        parts_metrics = [part_metrics for _, part_metrics in done]
        if self._gaps is not None:
            gaps, self._gaps = self._gaps, None
            values |= self.gap(gaps)
        norm = self.distributed.clip_gradients(self.model, self.config.optimizer.max_grad_norm)
        # The norm is that of the added gradients, but a loss can be infinite on one rank alone.
        finite = math.isfinite(norm) and all(math.isfinite(loss.item()) for loss, _ in done)
        if self.distributed.max(float(not finite)) > 0:
            values["update/skipped_nonfinite"] += 1
            self.nonfinite_in_a_row += 1
            self.optimizer.zero_grad(set_to_none=True)
            if self.nonfinite_in_a_row >= self.config.optimizer.max_nonfinite:
                raise NonfiniteError(self.nonfinite_in_a_row, rows)
            return self._merged(parts_metrics, mine), None
        self.nonfinite_in_a_row = 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer_steps += 1
        return self._merged(parts_metrics, mine), norm

    def _denominators(self, rows: Sequence[Row]) -> Tensor:
        """What this rank's rows add to the denominators: (1,) or (2,) float64, see `count_denominators`."""
        options = self._aggregation()
        batches = (collate([row]) for row in rows)  # counts add up: nothing has to be sorted or padded for them
        counts = [count_denominators(b.response_mask, levels=b.levels, **options) for b in batches]
        num_levels = 2 if self.config.loss.level_reduction == "separate" else 1
        mine = torch.stack(counts).sum(0) if counts else torch.zeros(num_levels, dtype=torch.float64)
        return mine.to(self.distributed.device)

    def _aggregation(self) -> dict[str, Any]:
        return {"aggregation": self.config.loss.aggregation, "level_reduction": self.config.loss.level_reduction}

    def _backward(self, rows: Sequence[Row], denominators: Tensor) -> tuple[Tensor, Metrics]:
        """Add one micro-batch's share of the gradient of the loss over all ranks' rows. Returns that share of the loss."""
        config, shaping = self.config.loss, self.config.advantage
        with self._attention(self.model):
            batch, logprobs, entropy = self.score(self.model, rows, with_entropy=True)  # (B, T-1)
            loss, loss_metrics = policy_loss(
                logprobs,
                self._first_logprobs(batch, logprobs),
                entropy_advantages(batch.advantages, entropy, shaping.entropy_bonus, shaping.entropy_cap),
                batch.response_mask,
                levels=batch.levels,
                ref_logprobs=batch.ref_logprobs,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                kl_coef=config.kl_coef,
                kl_estimator=config.kl_estimator,
                strategy_weight=config.strategy_weight,
                action_weight=config.action_weight,
                denominators=denominators,
                token_limit=config.token_limit or self.config.rollout.max_tokens or self.context_limit,
                entropy=None if entropy is None else entropy.detach(),
                sampled_logprobs=batch.old_logprobs,
                importance=self.gap.importance,
                importance_cap=config.importance_cap,
                **self._aggregation(),
            )
            loss.backward()
        if self._gaps is not None:
            self._gaps.append(gap_of(logprobs, batch.old_logprobs, batch.response_mask))
        num_trained = int(batch.response_mask.sum())
        self.costs.trained_tokens += num_trained
        self.costs.head_positions += num_trained  # `score` runs the head there and nowhere else
        return loss.detach().float(), loss_metrics

    def _merged(self, parts_metrics: Sequence[Metrics], counts: Tensor) -> Metrics:
        """This rank's metrics of one optimizer step. A row that was not forwarded has a loss of 0, and counts in it."""
        merged = merge_metrics(parts_metrics)
        names = ("loss_strategy", "loss_action") if len(counts) == 2 else ("loss",)
        for name, count in zip(names, counts, strict=True):
            total = merged[name][0] if name in merged else torch.zeros_like(count)
            merged[name] = torch.stack([total, count])
        return merged

    def learning_rate(self) -> float:
        """Linear warm-up by optimizer steps, then constant, or cosine to 0 at the end of the run's last mini-batch.

        The cosine goes by mini-batches passed, so that neither skipped steps nor the number of ranks or turns move it.
        """
        options = self.config.optimizer
        warm = min(1.0, (self.optimizer_steps + 1) / (options.warmup_steps + 1))
        if options.schedule == "constant":
            return options.lr * warm
        return options.lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))

    def _live(self, rows: list[Row]) -> list[Row]:
        """Rows to forward: those without any advantage pull nowhere unless a KL holds them, and count all the same."""
        if self.config.loss.kl_coef > 0:
            return rows
        return [row for row in rows if bool((row.advantages != 0).any())]

    def _split(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        return microbatches(rows, self.config.update.microbatch_tokens, packing=self.packing)

    def _filler(self) -> Row:
        """A row of which nothing is trained, for a rank that only takes part."""
        nothing = torch.zeros(1)
        tokens = Tokens(torch.zeros(2, dtype=torch.long), nothing.bool(), nothing, nothing + 1)
        return Row(tokens, nothing, ACTION, 0, nothing if self.config.loss.kl_coef > 0 else None)

    def _attention(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """What the forward and the backward pass of `score` have to run in."""
        return contextlib.nullcontext() if self.packing == "off" else packed_attention(model)

    def score(
        self, model: Any, rows: Sequence[Row], *, with_entropy: bool = False
    ) -> tuple[Batch, Tensor, Tensor | None]:
        """One micro-batch, its log-probs (B, T-1) and entropies, from a packed forward unless packing is off."""
        batch = collate(rows).to(self.distributed.device)
        layout = row_layout(rows, batch, self.packing)
        positions = batch.input_ids.numel() if layout is None else len(layout)
        if torch.is_grad_enabled():
            self.costs.update_positions += positions
        else:
            self.costs.score_positions += positions
        logprobs, entropy = score(model, batch, layout=layout, with_entropy=with_entropy)
        return batch, logprobs, entropy

    @torch.no_grad()
    def _scores(self, model: Any, rows: Sequence[Row]) -> list[Tensor]:
        """(T-1,) float32 log-probs of every row on the CPU, in the order of the rows."""
        found: dict[int, Tensor] = {}
        with self._attention(model):
            for part in self.distributed.equally_many(model, self._split(rows), [self._filler()]):
                _, logprobs, _ = self.score(model, part)
                for row, values in zip(part, logprobs.float().cpu(), strict=True):
                    found[id(row)] = values[: len(row) - 1].clone()  # a view would keep, and send, all rows
        return [found[id(row)] for row in rows]

    # ------------------------------------------------------------------------- log-probs of the old and reference policy

    def settle_logprobs(self, sampled: Sequence[Tokens]) -> list[Tokens]:
        """The rows with what is known of the training forward's log-probs before the update (`rollout.logprobs`).

        `recomputed` scores them, `sampled` does not, and `auto` does unless one optimizer step uses all of an iteration.
        Either way sampler and training forward are compared, here or in the first step (gap.py).
        """
        self.gap.probe(self.model, sampled)
        if not self.config.recomputes_logprobs:
            return list(sampled)
        rows = [Row(t, torch.zeros(len(t.response_mask)), ACTION, i) for i, t in enumerate(sampled) if t.num_sampled]
        scored = self._scores(self.model, rows)
        self._gap_values = self.gap(
            [gap_of(s, r.tokens.logprobs, r.tokens.response_mask) for r, s in zip(rows, scored, strict=True)]
        )
        new = {r.trajectory: replace(r.tokens, trainer_logprobs=s) for r, s in zip(rows, scored, strict=True)}
        return [new.get(i, replace(t, trainer_logprobs=t.logprobs)) for i, t in enumerate(sampled)]

    def _first_logprobs(self, batch: Batch, logprobs: Tensor) -> Tensor:
        """(B, T-1) where ratios begin: the training forward's, if they are known, or the sampler's."""
        if batch.trainer_logprobs is not None:
            return batch.trainer_logprobs
        # Weights that have not moved since the rollout: this forward is the one before the update too.
        return batch.old_logprobs if self.gap.importance == "none" else logprobs.detach()

    def _with_reference(self, rows: list[Row]) -> list[Row]:
        """Rows with the reference's log-probs, at the temperatures the tokens were sampled at, where a KL needs them."""
        if self.reference is None or self.config.loss.kl_coef == 0:
            return rows
        # The policy itself, where it is one with adapters: then without them.
        with adapters_off(self.model) if self.reference is self.model else contextlib.nullcontext():
            scored = self._scores(self.reference, rows)
        return [replace(row, ref_logprobs=values) for row, values in zip(rows, scored, strict=True)]
