"""A model's tiny twin: its own code and kinds of layers with random weights of a few kilobytes, from a configuration alone.

    vocabulary, widths, heads, experts    small, with what divides what kept: grouped heads stay grouped
    layers                                the first ones, as many as have every kind in them
    windows, caps, kinds of layers        as they are

What can be sampled from, packed and trained is a matter of a model's code, so the twin answers for the model (fit.py):
`hsg plan` asks it before a weight is there, and `make zoo` makes every architecture of its table so.  Deliberately absent:
anything that depends on the weights, such as how large rounding grows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hsg.model.models import without_dropout

LAYERS, VOCABULARY, WIDTH, HEADS = 3, 320, 64, 4
LARGEST = 20_000_000
"""Weights of a twin: more say that a configuration names its sizes in words that are not known here."""

_MOST = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (WIDTH, "hidden_size n_embd d_model word_embed_proj_dim attention_hidden_size lru_width embedding_dim"),
    (2 * WIDTH, "mamba_d_ssm"),
    (96, "intermediate_size ffn_dim n_inner block_ff_dim intermediate_size_mlp ffn_hidden_size"),
    (
        HEADS,
        "num_attention_heads n_head num_heads n_heads attention_heads encoder_attention_heads decoder_attention_heads",
    ),
    (HEADS, "num_global_key_value_heads linear_num_heads linear_num_value_heads"),
    (
        WIDTH // HEADS,
        "head_dim v_head_dim swa_head_dim swa_v_head_dim global_head_dim kv_channels q_lora_rank kv_lora_rank",
    ),
    (8, "linear_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim linear_key_head_dim linear_value_head_dim"),
    (8, "mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim hidden_size_per_layer_input"),
    (16, "mamba_n_heads mamba_num_heads"),
    (4, "mamba_dt_rank time_step_rank dt_rank"),
    (1, "mamba_n_groups n_groups n_group topk_group group_norm_size num_expert_group"),
    (2, "linear_num_key_heads zero_expert_num"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts expert_top_k"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (4096, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
)
SIZES = {name: most for most, names in _MOST for name in names.split()}
"""The most that the twin has of each; a smaller number of the model's own stays."""

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
"""What configurations call the number of layers."""

REPEATS = ("period", "interval", "offset", "freq", "step", "first_k_dense", "moe_layer_start")
"""Parts of the names of numbers that say at which layers another kind comes."""


def tiny_config(config: Any) -> Any:
    """A tiny configuration of the same kind. Of a composite one: that of its text part."""
    config = copy.deepcopy(config.get_text_config())
    held = dict(vars(config))
    depth = _number(held, COUNTS, LAYERS)
    layers = _num_layers(held, depth)
    heads = _number(held, ("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS)
    for name, value in held.items():
        if isinstance(value, (list, tuple)) and len(value) == depth > layers:
            kept = value[:layers]
            setattr(config, name, type(value)(min(SIZES[name], v) for v in kept) if name in SIZES else kept)
        elif isinstance(value, (list, tuple)) and "layer" in name and all(isinstance(v, int) for v in value):
            setattr(config, name, type(value)(v for v in value if v < layers))  # places of layers of a kind
        elif isinstance(value, dict) and "rope" not in name:
            setattr(config, name, _tiny_parts(value, layers))
        elif name in COUNTS and isinstance(value, int):
            setattr(config, name, layers)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(SIZES[name], value))
        elif name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"):
            setattr(config, name, HEADS if value is None else max(1, min(HEADS, HEADS * value // max(1, heads))))
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            setattr(config, name, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[name])
    if "head_dim" in held and held["head_dim"] is None:
        config.head_dim = WIDTH // HEADS
    if held.get("num_kv_shared_layers"):
        config.num_kv_shared_layers = layers // 2
    if rope := getattr(config, "qk_rope_head_dim", None):  # latent attention: one head of rotated numbers and others
        for name, size in (("head_dim", rope), ("qk_head_dim", rope + config.qk_nope_head_dim)):
            if name in held:
                setattr(config, name, size)
    if held.get("expand") and held.get("state_size") and held.get("num_heads"):  # Mamba 2
        config.num_heads = config.expand * config.hidden_size // config.head_dim
    if each := config.to_dict().get("per_layer_config"):  # Gemma 4
        config.per_layer_config = {int(k): v for k, v in _tiny_parts(each, layers).items()} or None
    _rotary(config)
    return config


def make_twin(config: Any, attention: str = "eager") -> Any:
    """A tiny model of the same kind. ValueError where its configuration does not come out tiny."""
    config = tiny_config(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"a tiny twin must have at most {LARGEST:,} weights, got {size:,} of {config.model_type}")
    return random_model(config, attention)


def random_model(config: Any, attention: str, *, seed: int = 0) -> Any:
    """A model with random weights that are large enough to make every position matter."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        without_dropout(config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
        without_dropout(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 2.4 / math.sqrt(WIDTH))
                elif "sink" in name:
                    parameter.normal_()
    model.config.use_cache = False
    return model


def _num_layers(held: dict[str, Any], depth: int) -> int:
    """The fewest layers with every kind in them; kinds are told by lists, one entry a layer, and by numbers of repeats."""
    least = LAYERS
    for name, value in held.items():
        if isinstance(value, (list, tuple)) and len(value) == depth and len(set(map(str, value))) <= 4:
            least = max(least, max(value.index(kind) for kind in value) + 1)
        if type(value) is int and value <= 16 and any(word in name for word in REPEATS):
            least = max(least, value + 1)
    if held.get("num_kv_shared_layers"):  # the last ones use what the first ones keep
        least *= 2
    return min(least, depth)


def _tiny_parts(held: dict[Any, Any], layers: int) -> dict[Any, Any]:
    """Sizes and layers' places in a part of a configuration."""
    made = {}
    for name, value in held.items():
        if str(name).isdigit() and int(name) >= layers:
            continue
        if isinstance(value, dict):
            value = _tiny_parts(value, layers)
        elif type(value) is int and name in SIZES:
            value = min(SIZES[name], value)
        elif isinstance(value, (list, tuple)) and "layers" in str(name):
            value = [v for v in value if v <= layers]
        made[name] = value
    return made


def _number(held: dict[str, Any], names: Sequence[str], otherwise: int) -> int:
    return next((value for name in names if isinstance(value := held.get(name), int)), otherwise)


def _rotary(config: Any) -> None:
    """Sections of a rotary embedding add up to half a head."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), (list, tuple)):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        count = len(rope["mrope_section"])
        rope["mrope_section"] = [half - (count - 1) * (half // count), *[half // count] * (count - 1)]
