"""Which keys a query of a layer sees: those at or before it, and within the layer's window or chunk.

    full      all of them                     first(q) = 0                  seen iff  first(q) <= key <= q
    window    the last w, its own included    first(q) = q - w + 1          (places in the row)
    chunk     those of its own chunk          first(q) = q - q mod c

A model's config says it of every layer, in the words of transformers (`layer_types`).  The rollout's masks, packed rows and
the checks at the start all ask here, and nowhere else.  Deliberately absent: soft caps and sinks, which change what a key
weighs and not whether it is seen (attention.py); masks that a model makes for itself (`masks_itself`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Place = TypeVar("Place", int, Tensor)

STATE_KINDS = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
"""Layers without keys: they are given no mask."""


@dataclass(frozen=True)
class Reach:
    """How far back the queries of a layer see; without a window and a chunk: to the row's beginning."""

    window: int | None = None
    chunk: int | None = None

    def first(self, query: Place) -> Place:
        """The first key that a query at this place sees; below 0 where that is before the row."""
        if self.window is not None:
            return query - (self.window - 1)
        return query - query % self.chunk if self.chunk is not None else query - query

    def hides(self, length: int) -> bool:
        """Whether any query of a row of this length misses a key that stands before it."""
        return any(size is not None and size < length for size in (self.window, self.chunk))

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries (..., q) and keys (k,), places in one row -> (..., q, k) bool."""
        seen = keys <= queries[..., None]
        if self.window is None and self.chunk is None:
            return seen
        return seen & (keys >= self.first(queries)[..., None])


FULL = Reach()


def layer_kinds(config: Any) -> tuple[str, ...]:
    """What transformers calls each layer; one word where a config does not tell its layers apart."""
    config = config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return tuple(kinds)
    if getattr(config, "sliding_window", None) is not None:
        return ("sliding_attention",)
    return ("chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention",)


def kind_reach(config: Any, kind: str) -> Reach:
    """The reach of one kind of layer."""
    config = config.get_text_config()
    if "sliding" in kind:
        return Reach(window=getattr(config, "sliding_window", None))
    return Reach(chunk=getattr(config, "attention_chunk_size", None)) if "chunked" in kind else FULL


def layer_reach(module: Any) -> Reach:
    """The reach of an attention module of a model of transformers."""
    kinds = layer_kinds(module.config)
    return kind_reach(module.config, kinds[module.layer_idx if len(kinds) > 1 else 0])


def row_masks(config: Any, positions: Tensor, length: int, dtype: torch.dtype) -> Any:
    """What is added to the scores of queries at positions (n, q) on the keys at 0 .. length - 1 of their rows.

    (n, 1, q, length), 0 where a key is seen and -inf elsewhere; where layers differ, one for each kind of layer.
    """
    kinds = dict.fromkeys(layer_kinds(config))
    reaches = {kind: kind_reach(config, kind) for kind in kinds if kind not in STATE_KINDS}
    keys = torch.arange(length, device=positions.device)

    def mask(reach: Reach) -> Tensor:
        hidden = ~reach.seen(positions[:, None], keys)  # (n, 1, q, length)
        # Made once: every layer would make it of a boolean mask again, and eager attention cannot.
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)

    if len(set(reaches.values())) <= 1:
        return mask(next(iter(reaches.values()), FULL))
    # Not by the layers alone: some models look up a kind that none of their layers has.
    reaches = {"full_attention": FULL, "sliding_attention": kind_reach(config, "sliding_attention"), **reaches}
    made = {reach: mask(reach) for reach in set(reaches.values())}
    return {**dict.fromkeys(STATE_KINDS), **{kind: made[reach] for kind, reach in reaches.items()}}


def masks_itself(config: Any) -> bool:
    """Whether a model cuts windows out of a mask of its own, by columns and not by places in the row (GPT-Neo)."""
    return "local" in (getattr(config.get_text_config(), "attention_layers", None) or ())


_SIZES = ("sliding_window", "attention_chunk_size", "attention_window_size")
"""What configurations and attention modules call the size of a window or chunk; they read it in every forward pass."""


def window_sizes(model: Any) -> list[tuple[Any, str, int]]:
    """Every (owner, attribute, size) of a window or chunk in the configurations and modules of a model."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]  # the same one twice does no harm
    held = ((owner, name, vars(owner).get(name)) for owner in owners for name in _SIZES)
    return [(owner, name, size) for owner, name, size in held if isinstance(size, int) and not isinstance(size, bool)]


@contextlib.contextmanager
def narrowed(model: Any, size: int) -> Iterator[None]:
    """A model with windows and chunks of a few tokens, so that a check on short rows shows what long ones would meet."""
    held = window_sizes(model)
    try:
        for owner, name, old in held:
            setattr(owner, name, min(size, old))
        yield
    finally:
        for owner, name, old in held:
            setattr(owner, name, old)
