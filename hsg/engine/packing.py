"""Forward every token of a batch once: rows packed end to end, and what they share only the first time (layout.py).

Everything but attention works token by token, so it runs on the packed sequence as it is.  Attention is computed call by
call: the pieces of one query's softmax are joined by their log-sum-exps, and the backward kernel, given the joined output
and log-sum-exp, returns each piece's exact share of the gradient.  The numbers are those of the padded rows, gradients
included, since a hidden state depends on what stands before it only.  In the last layer only the tokens whose hidden state
is read look back at all.  A layer that sees a window or a chunk only has calls of its own (reach.py); a sink is one more piece
of every query's softmax, whose values are 0.  Scores with a soft cap are no kernel's, and are written out row by row.

A model takes part through the attention interface of transformers: `packed_attention(model)` sets it for a forward and its
backward pass, and `layout` travels to every layer as a keyword.  Deliberately absent: a dense block mask (quadratic in
the packed length), models with state other than attention (model/fit.py sees
that it is not for them).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from hsg.engine.attention import is_last_layer, trunk, written_out
from hsg.engine.layout import Call, Layout
from hsg.engine.reach import FULL, Reach, layer_reach

NAME = "hsg_packed"

# ------------------------------------------------------------------------------------------------------------- the model


@contextlib.contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Attention that follows a layout. Backward passes belong inside too: checkpointed layers run again there."""
    name = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = name


def packed_hidden(model: Any, layout: Layout) -> Tensor:
    """Last hidden states (n, D) of a packed sequence, inside `packed_attention`."""
    ids = layout.input_ids
    # A mask of four axes is passed on as it is. Nothing reads this one; attention that did would see no key at all.
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    out = trunk(model)(
        input_ids=ids[None],
        position_ids=layout.positions[None],
        attention_mask=nothing,
        use_cache=False,
        layout=layout,
    )
    return out.last_hidden_state[0]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query (1, H, n, D), key and value (1, H', n, D), H a multiple of H'; s_aux (H,): sinks -> (1, n, H, D)."""
    special = [name for name in _UNKNOWN if more.get(name) is not None]
    if attention_mask is not None and attention_mask.numel() > 1:
        special.append("a mask of the model's own")
    if special:
        raise NotImplementedError(f"attention with {', '.join(special)}")
    if torch.is_autocast_enabled(query.device.type):  # it knows PyTorch's own attention, and not the kernel below
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = layer_reach(module)
    if _use_varlen(query) and s_aux is None and reach.chunk is None:
        out = _varlen_attention(query, key, value, layout, scale, reach.window, softcap)
    elif softcap is None and _use_joined(query, value):
        read = layout.read if is_last_layer(module) else None
        asked = query if read is None else query.index_select(2, read)
        calls = layout.within(reach, read=read is not None)
        found = _JoinedAttention.apply(asked, key, value, calls, read, scale, s_aux)
        out = found if read is None else torch.zeros_like(query).index_copy(2, read, found)
    else:
        out = _path_attention(query, key, value, layout, scale, reach, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None  # some models take a view of it


_UNKNOWN = ("position_bias", "sinks", "indices", "block_indices")
"""What some models tell their attention, and nothing here obeys."""


def _use_joined(query: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel that tells its log-sum-exp."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


AttentionInterface.register(NAME, _attention)


def _use_varlen(query: Tensor) -> bool:
    """Whether flash-attention can do it: one call for all rows, whose queries are the last ones of their keys."""
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and _has_flash()


@functools.cache
def _has_flash() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


# ----------------------------------------------------------------------------------- pieces joined by their log-sum-exps


class _JoinedAttention(torch.autograd.Function):
    """The calls of a layout with PyTorch's flash kernel for CPUs.

    query (1, H, q, D), key and value (1, H', n, D), H a multiple of H'; places (q,) of the queries among the n tokens, None
    where they are all of them; sinks (H,) or None -> (1, H, q, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: Sequence[Call],
        places: Tensor | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        kept = key, value  # for the backward pass: before they are repeated
        key, value = (_repeat(x, query.shape[1]) for x in kept)
        out = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(0)
        for call in calls:  # every query is in one causal call, and those come first
            asked, seen = slice(*call.queries), slice(*call.keys)
            piece, piece_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, asked], key[:, :, seen], value[:, :, seen], 0.0,
                **_causality(call, places, query.dtype), scale=scale,
            )  # fmt: skip  # (1, H, q, D), (1, H, q)
            if not len(logsumexp):
                logsumexp = piece_lse.new_empty(query.shape[:3])
            if call.causal:
                out[:, :, asked] = piece
                logsumexp[:, :, asked] = piece_lse
                continue
            before = logsumexp[:, :, asked]
            total = torch.logaddexp(before, piece_lse)
            old, new = (before - total).exp()[..., None], (piece_lse - total).exp()[..., None]
            out[:, :, asked] = out[:, :, asked] * old + piece * new
            logsumexp[:, :, asked] = total
        if sinks is not None:  # a piece whose log-sum-exp is the sink itself, and whose values are 0
            total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype).view(1, -1, 1))
            out *= (logsumexp - total).exp()[..., None]
            logsumexp = total
        ctx.save_for_backward(query, *kept, out, logsumexp, sinks)
        ctx.calls, ctx.places, ctx.scale = calls, places, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, *kept, out, logsumexp, sinks = ctx.saved_tensors
        key, value = (_repeat(x, query.shape[1]) for x in kept)
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for call in ctx.calls:
            asked, seen = slice(*call.queries), slice(*call.keys)
            pieces = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, asked], query[:, :, asked], key[:, :, seen], value[:, :, seen],
                out[:, :, asked], logsumexp[:, :, asked], 0.0,
                **_causality(call, ctx.places, query.dtype), scale=ctx.scale,
            )  # fmt: skip
            for total, where, piece in zip(grads, (asked, seen, seen), pieces, strict=True):
                total[:, :, where] += piece
        # Heads that share a key add up its gradient.
        shared = [g.unflatten(1, (x.shape[1], -1)).sum(2) for g, x in zip(grads[1:], kept, strict=True)]
        return grads[0], *shared, None, None, None, _sink_gradient(grad, out, logsumexp, sinks)


def _sink_gradient(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor | None) -> Tensor | None:
    """(H,): a sink's weight p = exp(sink - lse) takes -p (grad . out) of the loss, its own value being 0."""
    if sinks is None:
        return None
    weight = (sinks.to(logsumexp.dtype).view(1, -1, 1) - logsumexp).exp()  # (1, H, q)
    taken = (grad.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1)  # (1, H, q)
    return -(weight * taken).sum((0, 2)).to(sinks.dtype)


def _causality(call: Call, places: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """How the kernel is told which keys a query sees."""
    if call.hidden is not None:
        # Finite, so that a block of keys without a seen one is no 0 / 0 inside the kernel.
        hidden = call.hidden
        return {"is_causal": False, "attn_mask": torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -1e30)}
    if places is None or not call.causal:
        return {"is_causal": call.causal}
    hidden = torch.arange(*call.keys) > places[slice(*call.queries), None]  # (q, k)
    return {"is_causal": False, "attn_mask": torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)}


def _repeat(x: Tensor, heads: int) -> Tensor:
    """(1, H', n, D) -> (1, heads, n, D): each head for all the queries that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# --------------------------------------------------------------------------------------- rows by themselves, on any device


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Each row's own tokens on all of its path, in one call of flash-attention (2.1 or newer: causal from the end)."""
    from flash_attn import flash_attn_varlen_func

    def bounds(sizes: Sequence[int]) -> Tensor:
        return F.pad(torch.tensor(sizes, device=query.device).cumsum(0), (1, 0)).int()

    packed = [query[0].transpose(0, 1), *(x[0].index_select(1, layout.paths).transpose(0, 1) for x in (key, value))]
    out = flash_attn_varlen_func(
        *packed,
        cu_seqlens_q=bounds(layout.own),
        cu_seqlens_k=bounds(layout.lengths),
        max_seqlen_q=max(layout.own),
        max_seqlen_k=max(layout.lengths),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        **({} if softcap is None else {"softcap": softcap}),  # flash-attention 2.6 or newer
    )  # (n, H, D)
    return out.transpose(0, 1)[None]


def _path_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    reach: Reach = FULL,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same with PyTorch's own attention, or written out where that cannot do it, one row after another."""
    keys, values = (x.index_select(2, layout.paths).split(layout.lengths, dim=2) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    plain = softcap is None and sinks is None
    pieces = []
    for q, k, v in zip(query.split(layout.own, dim=2), keys, values, strict=True):
        length, own = k.shape[2], q.shape[2]
        # Where most are asked, the causal kernel on the whole square costs less than a mask.
        causal = plain and not reach.hides(length) and own > length // 2
        if causal:
            q = F.pad(q, (0, 0, length - own, 0))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            pieces.append(out[:, :, -own:])
            continue
        places = torch.arange(length, device=q.device)
        seen = reach.seen(places[length - own :], places)  # (own, length)
        if plain:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
        else:
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
            out = written_out(q, k, v, mask[None, None], scale, softcap, sinks)
        pieces.append(out)
    return torch.cat(pieces, dim=2)
