"""What learns beside the policy: the critic of PPO and the novelty predictor of RND.  Read before credit, trained after it.

    trajectories ── Companions.read ──> Signals ──> assign_credit ──> Companions.learn ──> the policy's own update

    critic    V_t = w h_t          h_t: last hidden state of the critic's own copy of the policy, before token t is sampled
    novelty   e_k = |f(h) - g(h)|^2 / std of all e so far,   f frozen and random, g trained, h the policy's last hidden
              state of turn k's action: the one that predicts its last token

Both are None unless an option asks for them.  Deliberately absent: a value head on the policy's own body (its gradient
would train the policy), sharding of the critic over GPUs (each rank holds a whole one).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hsg.batch import Row, collate, microbatches, minibatches, row_layout, unit_keys
from hsg.config.options import Config
from hsg.credit import Credit, Signals
from hsg.crediting.estimators import Moments, merge_moments, moments
from hsg.crediting.names import ESTIMATOR_NAMES
from hsg.engine.packing import packed_attention
from hsg.engine.precision import autocast
from hsg.engine.seeds import derive_seed, make_generator
from hsg.model.fit import find_fit, fit_of, use_fit
from hsg.model.models import load_model, sampled_hidden
from hsg.ranks.distributed import Distributed
from hsg.types import ACTION, Trajectory

Sums = dict[str, tuple[float, float]]
"""As in metrics.py: name -> (sum, count)."""


class Companions:
    """The critic and the novelty predictor of one run, where there are any."""

    def __init__(self, config: Config, policy_model: Any, model_path: str | Path, distributed: Distributed) -> None:
        self.policy_model = policy_model
        needs_values = ESTIMATOR_NAMES[config.advantage.estimator]
        self.critic = Critic(config, model_path, distributed) if needs_values else None
        self.novelty = Novelty(config, policy_model, distributed) if config.rnd.weight > 0 else None

    def read(self, trajectories: Sequence[Trajectory]) -> Signals:
        """What credit wants to know of this rank's trajectories (P*N*M); every rank calls, one without any too."""
        values = None if self.critic is None else self.critic.values(trajectories)
        bonuses = None if self.novelty is None else self.novelty.bonuses(self.policy_model, trajectories)
        return Signals(values, bonuses)

    def learn(self, trajectories: Sequence[Trajectory], credit: Credit, iteration: int, first: int = 0) -> Sums:
        """Train both on one iteration, on the trajectories read last, of which credit's number `first` is the first one.

        Returns their metrics.
        """
        sums: Sums = {}
        if self.critic is not None:
            sums |= self.critic.learn(trajectories, credit, iteration, first)
        if self.novelty is not None:
            sums |= self.novelty.learn()
        return sums

    def state_dict(self) -> dict[str, Any]:
        held = {"critic": self.critic, "novelty": self.novelty}
        return {name: part.state_dict() for name, part in held.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.novelty is not None:
            self.novelty.load_state_dict(state["novelty"])


# --------------------------------------------------------------------------------------------------- the forward pass


def forward_rows(
    model: Any, rows: Sequence[Row], config: Config, device: torch.device
) -> Iterator[tuple[list[Row], Tensor, int]]:
    """(rows, (n, D) hidden states before each sampled token, positions forwarded) of one micro-batch after the other.

    Backward passes belong between two of them: the packed attention is only set in here. A sharded model has to be gathered.
    """
    packing = fit_of(model, config).packing or "off"
    with contextlib.nullcontext() if packing == "off" else packed_attention(model):
        for part in microbatches(rows, config.update.microbatch_tokens, packing=packing):
            batch = collate(part).to(device)
            layout = row_layout(part, batch, packing)
            with autocast(model):
                hidden = sampled_hidden(model, batch, layout)
            yield part, hidden, batch.input_ids.numel() if layout is None else len(layout)


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """The rows of the valid trajectories, without advantages."""
    return [
        Row(tokens, torch.zeros(len(tokens.response_mask)), ACTION, i)
        for i, trajectory in enumerate(trajectories)
        if trajectory.valid
        for tokens in trajectory.rows
        if tokens.num_sampled
    ]


# ---------------------------------------------------------------------------------------------------------- the critic


@dataclass(frozen=True, eq=False)
class _Target:
    """What one row's values are trained towards, at its sampled tokens: (n,) each."""

    returns: Tensor
    old_values: Tensor
    counts: Tensor  # bool: the token is a unit, or the first of a turn that is one


class Critic:
    """The value model of PPO: its own copy of the policy, a linear head that begins at 0, its own optimizer."""

    def __init__(self, config: Config, path: str | Path, distributed: Distributed) -> None:
        self.config, self.distributed = config, distributed
        self.body, _ = load_model(config.model, path, distributed.device)
        use_fit(self.body, find_fit(self.body, config))
        width = self.body.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1).to(distributed.device, next(self.body.parameters()).dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trained = nn.ModuleList([self.body.base_model, self.head])
        self.parameters = list(self.trained.parameters())
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.critic.lr, betas=(options.beta1, options.beta2), weight_decay=0.0
        )
        self._values: list[Tensor] = []  # of the trajectories that were read last
        self._seconds, self._positions = 0.0, 0

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """V before each sampled token of each trajectory in order, (tokens,) float64 on the CPU; 0 where invalid."""
        began = time.monotonic()
        rows = rows_of(trajectories)
        found: dict[int, Tensor] = {}
        for part, hidden, positions in forward_rows(self.body, rows, self.config, self.distributed.device):
            self._positions += positions
            values = self._head(hidden).double().cpu()
            for row, of_row in zip(part, values.split([row.tokens.num_sampled for row in part]), strict=True):
                found[id(row.tokens)] = of_row
        self._values = [
            torch.cat([found[id(row)] for row in t.rows if id(row) in found] or [torch.zeros(0, dtype=torch.float64)])
            for t in trajectories
        ]
        self._seconds += time.monotonic() - began
        return self._values

    def _head(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.head.weight.dtype))[:, 0]

    def learn(
        self, trajectories: Sequence[Trajectory], credit: Credit, iteration: int, first_trajectory: int = 0
    ) -> Sums:
        """Epochs of optimizer steps towards the returns that GAE used, over mini-batches as large as the policy's."""
        began, config = time.monotonic(), self.config
        rows = rows_of(trajectories)
        targets = self._targets(trajectories, credit, first_trajectory)
        by_row = config.update.minibatch_turns is not None
        units = self.distributed.gather([len(set(unit_keys(rows, by_row=by_row)))])
        first, total = sum(units[: self.distributed.rank]), sum(units)
        size = config.update.minibatch_turns or config.update.minibatch_trajectories or max(total, 1)
        num_parts = max(1, math.ceil(total / size))
        totals = torch.zeros(4, dtype=torch.float64)  # loss, clipped, steps skipped, values
        self.body.train()
        for epoch in range(config.critic.epochs):
            generator = make_generator("critic", config.seed, iteration, epoch)
            for part in minibatches(rows, num_parts, generator, by_row=by_row, first=first, total=total):
                totals += self._step(part, targets)
        self.body.eval()
        self._seconds += time.monotonic() - began
        return self._metrics(totals, targets)

    def _targets(self, trajectories: Sequence[Trajectory], credit: Credit, first: int) -> dict[int, _Target]:
        """By the id of a row's tokens."""
        shape, targets = credit.valid.shape, {}
        for i, (trajectory, old) in enumerate(zip(trajectories, self._values, strict=True), start=first):
            if not trajectory.valid:
                continue
            place = tuple(int(x) for x in torch.unravel_index(torch.tensor(i), shape))
            if credit.token_returns is not None:
                returns = credit.token_returns[place][: len(old)]
                counts = torch.ones(len(old), dtype=torch.bool)
            else:
                sizes = torch.tensor([turn.num_tokens for turn in trajectory.turns], dtype=torch.long)
                returns = credit.turn_returns[place][: len(sizes)].repeat_interleave(sizes)
                counts = torch.zeros(len(old), dtype=torch.bool)
                counts[(sizes.cumsum(0) - sizes)[sizes > 0]] = True
            begin = 0
            for row in trajectory.rows:
                end = begin + row.num_sampled
                targets[id(row)] = _Target(returns[begin:end], old[begin:end], counts[begin:end])
                begin = end
        return targets

    def _step(self, rows: Sequence[Row], targets: dict[int, _Target]) -> Tensor:
        """One optimizer step; loss, clipped units, 0, units of this rank. Skipped where it is not finite: 0, 0, 1, 0."""
        device = self.distributed.device
        mine = float(sum(int(targets[id(row.tokens)].counts.sum()) for row in rows))
        count = self.distributed.sum(torch.tensor(mine, dtype=torch.float64)).item()
        if count == 0:
            return torch.zeros(4, dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.tensor([0.0, 0.0, 0.0, mine], dtype=torch.float64)
        for part, hidden, positions in forward_rows(self.body, rows, self.config, device):
            self._positions += positions
            held = [targets[id(row.tokens)] for row in part]
            counts = torch.cat([t.counts for t in held]).to(device)
            values = self._head(hidden)[counts]
            returns, old = (
                torch.cat(x).to(device, values.dtype)[counts]
                for x in ([t.returns for t in held], [t.old_values for t in held])
            )
            losses, clipped = value_losses(values, returns, old, self.config.critic.value_clip)
            (losses.sum() / count).backward()
            total[:2] += torch.stack([losses.detach().sum().double().cpu(), clipped.sum().double().cpu()])
        norm = self.distributed.clip_gradients(self.trained, self.config.critic.max_grad_norm)
        if not math.isfinite(norm):  # of the added gradients: all ranks skip alike
            return torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
        self.optimizer.step()
        return total

    def _metrics(self, totals: Tensor, targets: dict[int, _Target]) -> Sums:
        returns = torch.cat([t.returns[t.counts] for t in targets.values()] or [torch.zeros(0)]).double()
        values = torch.cat([t.old_values[t.counts] for t in targets.values()] or [torch.zeros(0)]).double()
        held: list[Moments] = [
            merge_moments(self.distributed.gather([moments(x)])) for x in (returns, returns - values)
        ]
        loss, clipped, skipped, num_values = totals.tolist()
        sums: Sums = {
            "critic/skipped_nonfinite": (skipped, 1.0),  # optimizer steps; every rank says the same
            "critic/loss": (loss, num_values),
            "critic/clip_fraction": (clipped, num_values),
            "critic/value": (values.sum().item(), float(len(values))),
            "cost/critic_positions": (float(self._positions), 0.0),
            "time/critic_seconds": (self._seconds, 1.0),
            "memory/critic_mb": (self.num_bytes() / 2**20, 1.0),
        }
        if held[0][2] > 0:
            sums["critic/explained_variance"] = (1.0 - held[1][2] / held[0][2], 1.0)
        self._seconds, self._positions = 0.0, 0
        return sums

    def num_bytes(self) -> int:
        """Weights, gradients and optimizer state of the critic alone, in bytes."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return sum(x.numel() * x.element_size() for x in [*self.parameters, *gradients, *state])

    def state_dict(self) -> dict[str, Any]:
        parts = {"body": self.body.base_model, "head": self.head}
        weights = {name: _on_cpu(part.state_dict()) for name, part in parts.items()}
        return {**weights, "moments": _moments_of(self.optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.body.base_model.load_state_dict(state["body"])
        self.head.load_state_dict(state["head"])
        _take_moments(self.optimizer, state["moments"])


def value_losses(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_clipped - R)^2) / 2 per unit and where the clip decides; PPO's reference code. All (n,).

    V_clipped stays within `clip` of the value that the advantages came from; None: no clip.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, held) / 2, held > plain


# --------------------------------------------------------------------------------------------------------- the novelty


class Novelty:
    """Random network distillation (arXiv 1810.12894) over the policy's hidden states."""

    def __init__(self, config: Config, policy_model: Any, distributed: Distributed) -> None:
        self.config, self.distributed = config, distributed
        width = policy_model.get_output_embeddings().weight.shape[1]
        options = config.rnd
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("rnd", config.seed) % 2**63)
            self.target, self.predictor = (
                nn.Sequential(
                    nn.Linear(width, options.hidden_size),
                    nn.ReLU(),
                    nn.Linear(options.hidden_size, options.output_size),
                ).double()
                for _ in range(2)
            )
        self.target.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=options.lr)
        self.errors: Moments = moments(torch.zeros(0))  # of all turns so far, on all ranks
        self.features: list[Moments] = []  # of each of the D numbers of a hidden state
        self._held = torch.zeros(0, width, dtype=torch.float64)

    @torch.no_grad()
    def bonuses(self, model: Any, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """The error of each turn over the running std of all errors, (K,) float64 per trajectory; 0 where invalid."""
        last = self._last_hidden(model, trajectories)  # per trajectory (K, D)
        hidden = torch.cat([torch.zeros(0, self._held.shape[1], dtype=torch.float64), *last])
        parts = self.distributed.gather([[moments(column) for column in hidden.T]])
        before = [self.features] if self.features else []
        self.features = [merge_moments(list(columns)) for columns in zip(*before, *parts, strict=True)]
        mean = torch.tensor([m[1] for m in self.features], dtype=torch.float64)
        std = torch.tensor([math.sqrt(m[2] / max(m[0], 1.0)) for m in self.features], dtype=torch.float64)
        # RND, section 2.4: inputs are normalised by running statistics and clipped, or a frozen network may see nothing.
        self._held = ((hidden - mean) / std.clamp(min=1e-8)).clamp(-5, 5)
        errors = (self.predictor(self._held) - self.target(self._held)).square().mean(-1)  # (turns,)
        self.errors = merge_moments([self.errors, *self.distributed.gather([moments(errors)])])
        scale = math.sqrt(self.errors[2] / max(self.errors[0], 1.0))
        scaled = errors / scale if scale > 0 else torch.zeros_like(errors)
        return [x.clone() for x in scaled.split([len(x) for x in last])]  # a view would be sent with all the others

    def _last_hidden(self, model: Any, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for part, hidden, _ in forward_rows(model, rows_of(trajectories), self.config, self.distributed.device):
            for row, of_row in zip(part, hidden.split([row.tokens.num_sampled for row in part]), strict=True):
                found[id(row.tokens)] = of_row.double().cpu()
        result = []
        for trajectory in trajectories:
            states = torch.zeros(len(trajectory.turns), self._held.shape[1], dtype=torch.float64)
            if trajectory.valid and trajectory.turns:
                of_tokens = torch.cat([found[id(row)] for row in trajectory.rows if id(row) in found])
                ends = torch.tensor([turn.num_tokens for turn in trajectory.turns]).cumsum(0)
                states = of_tokens[ends - 1]
            result.append(states)
        return result

    def learn(self) -> Sums:
        """Train the predictor on the turns that were read last."""
        count = self.distributed.sum(torch.tensor(float(len(self._held)), dtype=torch.float64)).item()
        if count == 0:
            return {}
        loss, skipped = 0.0, 0
        for _ in range(self.config.rnd.epochs):
            self.optimizer.zero_grad()
            errors = (self.predictor(self._held) - self.target(self._held)).square().mean(-1)
            (errors.sum() / count).backward()
            norm = self.distributed.clip_gradients(self.predictor, math.inf)  # added over ranks, and not clipped
            if not math.isfinite(norm):
                skipped += 1
                continue
            self.optimizer.step()
            loss = errors.detach().sum().item()
        return {"rnd/error": (loss, float(len(self._held))), "rnd/skipped_nonfinite": (float(skipped), 1.0)}

    def state_dict(self) -> dict[str, Any]:
        weights = {name: _on_cpu(getattr(self, name).state_dict()) for name in ("target", "predictor")}
        statistics = {"errors": list(self.errors), "features": [list(m) for m in self.features]}
        return {**weights, **statistics, "moments": _moments_of(self.optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("target", "predictor"):
            getattr(self, name).load_state_dict(state[name])
        _take_moments(self.optimizer, state["moments"])
        self.errors = tuple(state["errors"])
        self.features = [tuple(m) for m in state["features"]]


# ----------------------------------------------------------------------------------------- state, as checkpoints want it


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _moments_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """By the place of the parameter, as text; those that had no gradient yet have none."""
    parameters = optimizer.param_groups[0]["params"]
    return {str(i): _on_cpu(optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state}


def _take_moments(optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Tensor]]) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for place, held in state.items():
        parameter = parameters[int(place)]
        moved = {k: v.clone() if v.ndim == 0 else v.to(parameter.device, copy=True) for k, v in held.items()}
        optimizer.state[parameter] = moved
