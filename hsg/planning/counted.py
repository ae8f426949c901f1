"""Sizes of a model that no formula here knows: transformers makes it without weights, and its parameters are counted.

Experts, layers of several kinds, state spaces and the text part of composite checkpoints come out exactly as they are
trained.  What is refused is refused as training refuses it: a tiny twin is tried (fit.py).  Deliberately absent: what such
layers keep for a backward pass; it is estimated from the widths, as of a plain decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from hsg.config.options import Config
from hsg.model.fit import expected_fit
from hsg.model.lora import targets_of
from hsg.model.models import read_config, require_decoder, restated
from hsg.model.sharding import layers
from hsg.planning.sizes import Architecture, Counted


def counted(name: str, config: Config) -> Architecture:
    """The sizes of the model behind a config.json, a folder or a hub id. ValueError in the line that a run would have."""
    of = read_config(name, trust_remote_code=config.model.trust_remote_code)
    require_decoder(of)
    fit = expected_fit(of, config)
    text = of.get_text_config()
    with restated(name, "model.path"), torch.device("meta"):
        model = _causal(text, config.model.trust_remote_code)
    # A composite model's own head decides whether it is the embedding.
    tied = bool(getattr(of if of is not text else text, "tie_word_embeddings", False))
    inside = {id(p): (n, p) for layer in layers(model) for n, p in layer.named_parameters()}
    matrices = [p for _, p in inside.values() if p.ndim >= 2]
    experts = [model.get_parameter(name) for name in targets_of(model)[1]]
    total = sum(p.numel() for p in model.parameters())
    in_layers = sum(p.numel() for _, p in inside.values())
    in_matrices = sum(p.numel() for p in matrices)
    wide = int(text.hidden_size)
    chosen = _number(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k") or 1
    idle = sum(p.numel() * (1 - min(1.0, chosen / p.shape[0])) for p in experts)
    heads = _number(text, "num_attention_heads") or 1
    return Architecture(
        num_layers=len(layers(model)),
        hidden_size=wide,
        intermediate_size=_inner(text, chosen) or 4 * wide,
        num_heads=heads,
        num_key_value_heads=_number(text, "num_key_value_heads") or heads,
        head_size=_number(text, "head_dim") or wide // heads,
        vocabulary=int(text.vocab_size),
        context=_number(text, "max_position_embeddings") or 2**20,
        tied=tied,
        settings="" if fit is None else str(fit),
        counted=Counted(
            layers=in_layers,
            matrices=in_matrices,
            used=round(in_matrices - idle),
            root=total - in_layers,
            adapters=_adapters(model),
        ),
    )


def _causal(text: Any, trust_remote_code: bool) -> nn.Module:
    """The causal language model; of a text part that has no such class (Qwen3-VL), its body and a head."""
    try:
        return AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
    body = AutoModel.from_config(text, trust_remote_code=trust_remote_code)
    head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
    if getattr(text, "tie_word_embeddings", False):
        head.weight = body.get_input_embeddings().weight
    whole = nn.ModuleDict({"model": body, "lm_head": head})
    whole.get_output_embeddings = lambda: head  # type: ignore[assignment]
    return whole


def _adapters(model: Any) -> dict[str, int]:
    """What can have an adapter -> numbers in one of rank 1: in + out, of experts each."""
    linear, fused, _ = targets_of(model)
    sizes = {name: sum(model.get_submodule(name).weight.shape) for name in linear}
    for name in fused:
        experts, rows, columns = model.get_parameter(name).shape
        sizes[name] = experts * (rows + columns)
    return sizes


def _inner(text: Any, chosen: int) -> int | None:
    """Numbers between the two halves of a token's feed-forward part: those of all its experts."""
    if of_expert := _number(text, "moe_intermediate_size"):
        return of_expert * chosen + (_number(text, "shared_expert_intermediate_size") or 0)
    experts = _number(text, "num_local_experts") is not None
    return (_number(text, "intermediate_size") or 0) * (chosen if experts else 1) or None


def _number(text: Any, *names: str) -> int | None:
    """The first of these that is a number; of several, one a layer, the largest."""
    for name in names:
        value = getattr(text, name, None)
        value = max(value, default=None) if isinstance(value, (list, tuple)) else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
