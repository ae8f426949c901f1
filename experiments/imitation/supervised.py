"""Supervised training on rows of every prompt form: what the warm start and its control run.

    loss = sum over taught tokens of w_form * nll / sum of w_form,   w_form = share_form / (taught tokens of the form)

so the shares of `warmstart` are shares of the loss, whatever the lengths of the rows.  The learning rate is constant
until the validation loss stops falling or 60 % of the budget (seconds or epochs) is used, then falls to 0 over two
thirds of what was used till then.  The weights with the lowest validation loss are kept, or the last ones (`keep`);
tasks, not rows, are held out.

Deliberately absent: rewards, several devices, resuming.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hsg.config.options import WarmstartConfig
from hsg.experiments.imitation.demonstrations import CONTEXT, FORMS, Row
from hsg.measure.progress import progress
from hsg.model.models import score
from hsg.types import ACTION, Batch

HELD_OUT = 10  # one task in so many is for validation
CONSTANT = 0.6  # share of the budget before the learning rate falls
CHECKS = 25  # validation losses in a whole budget
WARMUP_STEPS = 20
PADDING = 100  # filler tokens that one forward pass may hold: about what another forward pass costs


def train(
    model: Any,
    rows: Sequence[Row],
    settings: WarmstartConfig,
    pad_id: int | None,
    *,
    keep: Literal["best", "last"] = "best",
    quiet: bool = False,
) -> dict[str, Any]:
    """Train in place on most tasks' rows; returns losses, counts and seconds. Ends with the weights `keep` names."""
    started = time.monotonic()
    training, held_out = _split(rows)
    weights, counts = _form_weights(training, settings)
    checked = next(_groups(held_out or training, 4 * settings.batch_tokens, random.Random(settings.seed)))
    optimizer = _optimizer(model, settings)
    schedule = _Schedule(settings, started)
    best_loss, best_forms = _validate(model, checked, weights, settings.batch_tokens, pad_id)
    best = _copy(model)
    history = [{"seconds": 0.0, "optimizer_step": 0, "validation": best_loss}]
    num_tokens = sum(len(row.ids) for row in training)
    tokens_seen, running = 0, 0.0
    with progress(100, "warm start", "%", quiet=quiet, delay=2) as bar:
        for step, group in enumerate(_groups(training, settings.batch_tokens, random.Random(settings.seed))):
            used = schedule.used(tokens_seen / num_tokens)
            last = used >= schedule.end
            if last or schedule.check_due(used):
                loss, forms = _validate(model, checked, weights, settings.batch_tokens, pad_id)
                history.append({"seconds": time.monotonic() - started, "optimizer_step": step, "training": running,
                                "validation": loss})  # fmt: skip
                if loss < best_loss or (last and keep == "last"):
                    best_loss, best_forms, best = loss, forms, _copy(model)
                schedule.saw(loss, used)
                bar.set_postfix(loss=f"{running:.3f}", validation=f"{loss:.3f}")
            if last:
                break
            for parameters in optimizer.param_groups:
                parameters["lr"] = settings.lr * schedule.factor(used, step)
            model.train()
            optimizer.zero_grad(set_to_none=True)
            loss = float(_loss_by_form(model, group, weights, settings.batch_tokens, pad_id, backward=True).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens_seen += sum(len(row.ids) for row in group)
            running = loss if step == 0 else 0.95 * running + 0.05 * loss
            bar.update(min(100, int(100 * used / schedule.end)) - bar.n)
    model.load_state_dict(best)
    model.eval()
    seconds = time.monotonic() - started
    return {
        "validation_loss": best_loss,
        "validation_loss_by_form": best_forms,
        "training_loss": running,
        "seconds": seconds,
        "epochs": tokens_seen / num_tokens,
        "optimizer_steps": step,
        "ended_by": schedule.ended_by(tokens_seen / num_tokens),
        "tokens_per_second": tokens_seen / seconds,
        "rows": {name: sum(i in row.forms for row in training) for i, name in enumerate(FORMS)},
        "taught_tokens": dict(zip(FORMS, counts, strict=True)),
        "tasks": len({row.task_id for row in training}),
        "tasks_held_out": len({row.task_id for row in held_out}),
        "history": history,
    }


def _loss_by_form(
    model: Any, group: Sequence[Row], weights: Sequence[float], batch_tokens: int, pad_id: int | None, *, backward: bool
) -> Tensor:
    """What each form adds to the mean loss of a group of rows, (forms,); their sum is that loss."""
    total = sum(weights[form] for row in group for form in row.forms if form != CONTEXT)
    sums = torch.zeros(len(FORMS))
    device = next(model.parameters()).device
    for part in _by_length(group, batch_tokens):
        batch, forms = _batch(part, weights, pad_id or 0)
        logprobs, _ = score(model, batch.to(device))
        losses = -logprobs * batch.advantages.to(device) / total  # (B, T-1)
        if backward:
            losses.sum().backward()
        taught = batch.response_mask
        sums.index_add_(0, forms[taught], losses.detach().float().cpu()[taught])
    return sums


@torch.no_grad()
def _validate(
    model: Any, rows: Sequence[Row], weights: Sequence[float], batch_tokens: int, pad_id: int | None
) -> tuple[float, dict[str, float]]:
    """The loss on `rows`, and the mean nll (nats per token) of every form among them."""
    model.eval()
    sums = _loss_by_form(model, rows, weights, batch_tokens, pad_id, backward=False)
    counts = [sum(row.forms.count(i) for row in rows) for i in range(len(FORMS))]
    parts = [weight * count for weight, count in zip(weights, counts, strict=True)]
    means = {name: float(sums[i]) * sum(parts) / parts[i] for i, name in enumerate(FORMS) if parts[i]}
    return float(sums.sum()), means


def nll_by_form(model: Any, rows: Sequence[Row], settings: WarmstartConfig) -> dict[str, float]:
    """Mean nll (nats per token) of every form among the rows."""
    return _validate(model, rows, _form_weights(rows, settings)[0], settings.batch_tokens, None)[1]


def _optimizer(model: Any, settings: WarmstartConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)


class _Schedule:
    """Warm-up, a constant learning rate, then a fall to 0 that starts at the plateau or at 60 % of the budget."""

    def __init__(self, settings: WarmstartConfig, started: float) -> None:
        self._settings, self._started = settings, started
        self._best, self._misses, self._next_check = float("inf"), 0, 1 / CHECKS
        self._fall = CONSTANT

    @property
    def end(self) -> float:
        """Share of the budget at which training ends."""
        return self._fall / CONSTANT

    def used(self, epochs: float) -> float:
        """Share of the budget that is spent: of seconds or of epochs, whichever is nearer its end."""
        return max((time.monotonic() - self._started) / self._settings.seconds, epochs / self._settings.epochs)

    def ended_by(self, epochs: float) -> str:
        """What ended the constant phase: the plateau, or which half of the budget. A model cut short is not a good teacher."""
        if self._fall < CONSTANT:
            return "plateau"
        return "warmstart.epochs" if epochs / self._settings.epochs >= self.end else "warmstart.seconds"

    def factor(self, used: float, step: int) -> float:
        """What the learning rate is multiplied with."""
        falling = (self.end - used) / (self.end - self._fall)
        return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, falling))

    def check_due(self, used: float) -> bool:
        if used < self._next_check:
            return False
        self._next_check = used + 1 / CHECKS
        return True

    def saw(self, loss: float, used: float) -> None:
        """One validation loss; without a gain in the last `patience` of them the fall begins."""
        self._misses = 0 if loss < self._best - 1e-4 else self._misses + 1
        self._best = min(self._best, loss)
        if self._misses >= self._settings.patience and used < self._fall:
            self._fall = used


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows for training and for validation; no task is in both."""
    ids = list(dict.fromkeys(row.task_id for row in rows))
    held_out = set(ids[HELD_OUT - 1 :: HELD_OUT])
    return [row for row in rows if row.task_id not in held_out], [row for row in rows if row.task_id in held_out]


def _form_weights(rows: Sequence[Row], settings: WarmstartConfig) -> tuple[list[float], list[int]]:
    """Loss weight of one token of every form, 1 on average, and the number of such tokens."""
    counts = [sum(row.forms.count(i) for row in rows) for i in range(len(FORMS))]
    shares = [getattr(settings, f"share_{name}") if n else 0.0 for name, n in zip(FORMS, counts, strict=True)]
    unit = sum(counts) / sum(shares)
    return [unit * share / n if n else 0.0 for share, n in zip(shares, counts, strict=True)], counts


def _groups(rows: Sequence[Row], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Random rows of about `batch_tokens` tokens, for one optimizer step each, without end."""
    while True:
        group: list[Row] = []
        size = 0
        for row in rng.sample(rows, len(rows)):
            group.append(row)
            size += len(row.ids)
            if size >= batch_tokens:
                yield group
                group, size = [], 0
        if group:
            yield group


def _by_length(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar lengths together, so that little of a forward pass is padding."""
    part: list[Row] = []
    real = 0
    for row in sorted(rows, key=lambda row: len(row.ids)):
        padded = len(row.ids) * (len(part) + 1)
        if part and (padded > 2 * batch_tokens or padded - real - len(row.ids) > PADDING):
            yield part
            part, real = [], 0
        part.append(row)
        real += len(row.ids)
    if part:
        yield part


def _batch(rows: Sequence[Row], weights: Sequence[float], pad_id: int) -> tuple[Batch, Tensor]:
    """Right-padded rows with the loss weights as `advantages`, and the forms (B, T-1)."""
    length = max(len(row.ids) for row in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.long)
    forms = torch.full((len(rows), length - 1), CONTEXT)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.ids)] = torch.tensor(row.ids)
        attention_mask[i, : len(row.ids)] = 1
        forms[i, : len(row.forms)] = torch.tensor(row.forms)
    weight_of = torch.tensor([*weights, 0.0])  # CONTEXT is -1, the last one
    batch = Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=forms != CONTEXT,
        old_logprobs=torch.zeros(forms.shape),
        advantages=weight_of[forms],
        temperatures=torch.ones(forms.shape),
        levels=torch.full(forms.shape, ACTION),
    )
    return batch, forms


def _copy(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
