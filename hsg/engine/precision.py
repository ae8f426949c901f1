"""The compute precision of a model whose master weights are float32, where `model.dtype` is bfloat16.

    update    autocast casts master weights where a matrix product uses them; hidden states between layers stay float32
    rollout   `compute_weights`: one copy of all weights, made when a phase begins and gone when it ends, so that nothing
              is cast per token and no copy is ever older than its weights; keys, values and hidden states are bfloat16, as
              under FSDP, whose gathered weights are this copy (sharding.py)
    head      factors in bfloat16, their product added up and kept in float32: in both

A logit of 20 has steps of 1/8 in bfloat16, which no temperature or softmax after it can mend.  Deliberately absent: a loss
scaler (bfloat16 has float32's range), a copy that outlives the phase (2 bytes a weight that the update has better use for).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = torch.bfloat16


def is_half(model: Any) -> bool:
    """Whether this model computes in bfloat16."""
    return getattr(model, "compute_dtype", None) == HALF


@contextlib.contextmanager
def autocast(model: Any) -> Iterator[None]:
    """The compute precision of a model that `load_model` made; sampling and scoring both run under it."""
    if not is_half(model):
        yield
        return
    _widen_head(model)
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=HALF, cache_enabled=torch.is_grad_enabled()):
        yield


@contextlib.contextmanager
def compute_weights(*models: Any) -> Iterator[None]:
    """Within it these models compute with a copy of their weights in the compute dtype. No gradients; may be nested.

    What computes in its master weights is left alone, and so is what is sharded (it `has_weights` only at times, see
    sharding.py): FSDP makes its own copy.
    """
    masters: list[tuple[nn.Parameter, Tensor]] = []
    heads: list[Any] = []
    try:
        for model in models:
            if not is_half(model) or hasattr(model, "has_weights"):
                continue
            for parameter in model.parameters():
                if parameter.dtype == torch.float32:
                    masters.append((parameter, parameter.data))
                    parameter.data = parameter.data.to(HALF)
            head = _linear_head(model)
            if head is not None and head.weight.device.type != "cuda" and not hasattr(head, "wide_weight"):
                head.wide_weight = head.weight.detach().float()
                heads.append(head)
        yield
    finally:
        for parameter, master in masters:
            parameter.data = master
        for head in heads:
            del head.wide_weight


def head_weight(model: Any) -> Tensor | None:
    """The head's matrix (V, D) in bfloat16, cast once for many calls `head(hidden, weight)`; None: nothing to cast."""
    head = _linear_head(model)
    return head.weight.to(HALF) if head is not None and _is_on(head.weight.device) else None


def head_product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, wide: Tensor | None = None) -> Tensor:
    """hidden (..., D) and weight (V, D) rounded to bfloat16 -> (..., V) float32, the exact products added up in float32.

    wide  the rounded weight in float32, where someone has it
    """
    logits = _WideProduct.apply(hidden.flatten(0, -2).to(HALF), weight.to(HALF), wide)
    logits = logits.unflatten(0, hidden.shape[:-1])
    return logits if bias is None else logits + bias.float()


class _WideProduct(torch.autograd.Function):
    """hidden (n, D) and weight (V, D) -> (n, V) float32; gradients in bfloat16, as those of every other product are."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wide: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cuda":
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        with torch.autocast(
            hidden.device.type, enabled=False
        ):  # no other kernel hands its sums out: the same factors wide
            return hidden.float() @ (weight.float() if wide is None else wide).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        return grad @ weight, grad.T @ hidden, None


def _linear_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    # One with a forward of its own computes something else.
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward else None


def _widen_head(model: Any) -> None:
    """From now on the head's own forward is `head_product` under bfloat16 autocast, so that every caller gets its logits."""
    head = _linear_head(model)
    if head is not None and "forward" not in vars(head):
        head.forward = types.MethodType(_head_forward, head)


def _head_forward(head: Any, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """`weight`: that of `head_weight`, where it has been cast before."""
    if not _is_on(hidden.device):
        return F.linear(hidden, head.weight, head.bias)
    weight = head.weight if weight is None else weight
    return head_product(hidden, weight, head.bias, getattr(head, "wide_weight", None))


def _is_on(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == HALF
