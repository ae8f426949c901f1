"""Tiny random models and a tiny chat tokenizer, made in milliseconds."""

from __future__ import annotations

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
