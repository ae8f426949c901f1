"""Tiny random models and a tiny chat tokenizer, made in milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hsg.config.options import NanoConfig
from hsg.model.nano import build_nano
from hsg.types import ACTION, Batch

TEXTS = [
    "Find the key. You are in the hall. Ways: attic, cellar. <strategy>Search the attic first.</strategy>",
    "The trunk is empty. 2 <action>open trunk</action> Look back at your turns. <judgment>[2, 5]</judgment>",
] * 20
NANO = NanoConfig(
    vocab_size=330, hidden_size=32, num_layers=2, intermediate_size=64, max_position_embeddings=256,
    num_heads=2, num_key_value_heads=1,
)  # fmt: skip


def nano_folder(folder: Path) -> Path:
    return build_nano(TEXTS, NANO, folder)


def tiny_model(kind: str, seed: int = 0, vocab_size: int = 97, dtype: torch.dtype = torch.float64) -> Any:
    """gpt2 (absolute positions), llama or qwen2 with random weights large enough to make positions matter."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                            initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        model: Any = GPT2LMHeadModel(config)
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **shape))
    else:
        model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=vocab_size, initializer_range=0.3, num_key_value_heads=2, **shape)
        )
    return model.to(dtype).eval()


def batch_of(
    rows: list[list[int]], masks: list[list[bool]], temperatures: list[float] | None = None, pad_id: int = 0
) -> Batch:
    """Right-padded rows; masks[i] is aligned with rows[i][1:], temperatures holds one number per row."""
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad_id)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.long)
    response_mask = torch.zeros(len(rows), length - 1, dtype=torch.bool)
    temperature = torch.ones(len(rows), length - 1)
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        input_ids[i, : len(row)] = torch.tensor(row)
        attention_mask[i, : len(row)] = 1
        response_mask[i, : len(mask)] = torch.tensor(mask)
        if temperatures is not None:
            temperature[i][response_mask[i]] = temperatures[i]
    zeros = torch.zeros(response_mask.shape)
    levels = torch.full(response_mask.shape, ACTION)
    return Batch(input_ids, attention_mask, response_mask, zeros, zeros, temperature, levels)


WINDOW = 6
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},  # every layer
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},  # all but the first
    "gemma2": {**_MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3_text": _MIXED,
    "gemma4_text": {**_MIXED, "num_kv_shared_layers": 1},
    "gpt_oss": {**_MIXED, **_EXPERTS},  # sinks
    "cohere2": _MIXED,
    "olmo3": _MIXED,
    "exaone4": _MIXED,
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1],
                    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
}  # fmt: skip
"""Models whose attention is not full and causal in every layer, by what transformers calls them."""


def windowed_model(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A random model of `WINDOWED` with weights and sinks large enough to make every key matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    given = copy.deepcopy({**shape, **WINDOWED.get(kind, {}), **options})  # some configs write into what they are given
    config = AutoConfig.for_model(kind, **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attention = "eager" if kind in ("gemma2", "gpt_oss", "gpt_neo") else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or "sinks" in name:
                    parameter.normal_(0, 1 if "sinks" in name else 0.3)
    return model.to(dtype).eval()
