"""Attention of rollouts: many rows, a mask of their own, keys and values in the cache.

    one query a row      heads that share keys and values stand as queries of one head:  (B, H, 1, D) -> (B, H', H/H', D)
    several              one call for the first of the heads that share, one for the second, ...:  (B, H', q, D)

so that neither the cache nor the mask is copied.  What kernels do not know is written out (`written_out`): scores with a soft
cap, and sinks, which take their share of a softmax and give nothing.  Deliberately absent: the attention of updates
(packing.py), which keys are seen (reach.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME, CACHE_ONLY = "hsg_rows", "hsg_rows_cache_only"


@contextlib.contextmanager
def masked_attention(model: Any, *, cache_only: bool = False) -> Iterator[None]:
    """Attention that obeys a mask of its own, (B, 1, q, T): in place of sdpa, and of flash-attention, which knows no mask.

    `cache_only`: keys and values of every layer are wanted and no hidden state, so that nobody looks back in the last one.
    """
    name = str(model.config._attn_implementation)
    if name not in ("sdpa", NAME) and not name.startswith("flash"):
        yield
        return
    model.config._attn_implementation = CACHE_ONLY if cache_only else NAME
    try:
        yield
    finally:
        model.config._attn_implementation = name


def trunk(model: Any) -> Any:
    """The part of a causal language model below its head: where a class names no such part, its `model` (Llama 4)."""
    base = model.base_model
    return base if base is not model else getattr(model, "model", base)


def is_last_layer(module: Any) -> bool:
    """Whether nothing but the output head comes after this attention and the feed-forward part of its layer."""
    config = getattr(module, "config", None)
    return config is not None and getattr(module, "layer_idx", None) == config.num_hidden_layers - 1


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache_only: bool = False,
    **more: Any,
) -> tuple[Tensor, None]:
    """query (B, H, q, D), key and value (B, H', T, D), mask (B, 1, q, T), added to the scores -> (B, q, H, D)."""
    batch, heads, width, _ = query.shape
    if cache_only and is_last_layer(module):
        return query.new_zeros(batch, width, heads, value.shape[-1]), None
    softcap, sinks = more.get("softcap"), more.get("s_aux")
    if softcap is not None or sinks is not None:
        assert attention_mask is not None
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        return written_out(query, key, value, attention_mask, scale, softcap, sinks).transpose(1, 2), None
    groups = heads // key.shape[1]
    plain = attention_mask is not None and attention_mask.shape[1] == 1 and more.get("position_bias") is None
    if groups == 1 or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    assert attention_mask is not None
    query = query.unflatten(1, (-1, groups))  # (B, H', H/H', q, D)
    attend = functools.partial(F.scaled_dot_product_attention, attn_mask=attention_mask, scale=more.get("scaling"))
    if width == 1:
        out = attend(query.squeeze(3), key, value)
        return out.reshape(batch, 1, heads, -1), None
    pieces = [attend(query[:, :, g], key, value) for g in range(groups)]  # (B, H', q, D) each
    return torch.stack(pieces, dim=2).flatten(1, 2).transpose(1, 2), None


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention without a kernel, its softmax in float32 or more.

    query (B, H, q, D), key and value (B, H', T, D), mask (B or 1, 1, q, T) added to the scores; softcap c: scores become
    c tanh(score / c) (Gemma 2, arXiv:2408.00118); sinks (H,): one more score of each head, of a value of 0 (gpt-oss).
    Returns (B, H, q, D).
    """
    query = query.unflatten(1, (key.shape[1], -1))  # (B, H', H/H', q, D)
    scores = query @ key[:, :, None].mT * scale  # (B, H', H/H', q, T)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = scores + mask[:, :, None]
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, *query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(CACHE_ONLY, functools.partial(_attention, cache_only=True))
