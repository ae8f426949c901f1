"""What a model computes in, while it is sampled from and while it is scored."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn


def autocast(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The compute precision of a model that `load_model` made; sampling and scoring both run under it."""
    dtype = getattr(model, "compute_dtype", None)
    if dtype != torch.bfloat16:
        return contextlib.nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=dtype, cache_enabled=torch.is_grad_enabled())
