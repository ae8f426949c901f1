"""Attention of rollouts: many rows, a mask of their own, keys and values in the cache.

    heads that share keys and values stand as more queries of one head:  (B, H, q, D) -> (B, H', H/H' * q, D)

so that nothing of the cache is copied.  Deliberately absent: the attention of updates (packing.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "hsg_rows"


@contextlib.contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Attention that obeys a mask of its own, (B, 1, q, T): in place of sdpa, and of flash-attention, which knows no mask."""
    name = str(model.config._attn_implementation)
    if name != "sdpa" and not name.startswith("flash"):
        yield
        return
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = name


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """query (B, H, q, D), key and value (B, H', T, D), mask (B, 1, q, T) bool -> (B, q, H, D)."""
    batch, heads, width, _ = query.shape
    groups = heads // key.shape[1]
    plain = attention_mask is not None and attention_mask.shape[1] == 1 and more.get("position_bias") is None
    if groups == 1 or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    assert attention_mask is not None
    out = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * width, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask if width == 1 else attention_mask.repeat(1, 1, groups, 1),
        scale=more.get("scaling"),
    )  # (B, H', H/H' * q, D)
    return out.reshape(batch, heads, width, -1).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
