"""A model's sizes as a plan counts with them: by formulas from config.json, or as its own code makes it.

Deliberately absent: whatever needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsg.config.checks import require

DENSE = ("qwen2", "qwen3", "llama", "mistral")
"""The kinds whose sizes follow from config.json."""


@dataclass(frozen=True)
class Counted:
    """Sizes of a model of another kind, as its own code makes it."""

    layers: int  # numbers in all layers
    matrices: int  # of them those in matrices
    used: int  # of these those that a token is multiplied by: of experts a token has a few
    root: int  # numbers outside the layers
    adapters: Mapping[str, int]  # what can have an adapter -> numbers in one of rank 1


@dataclass(frozen=True)
class Architecture:
    """What of a config.json decides about memory. Sizes of the `DENSE` follow from it exactly, others are `counted`."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary: int
    context: int  # positions that a row may have
    tied: bool  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    counted: Counted | None = None
    settings: str = ""  # attention, cache and packing that a run would choose, where a twin was asked (fit.py)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Architecture:
        """From what config.json of one of the `DENSE` holds."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        kind = str(config.get("model_type"))
        optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
        for key in (*names, *(key for key in optional if config.get(key) is not None)):
            value = config.get(key)
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            require(whole, f"{key} of model.path", "a whole number > 0", value, f"see the config.json of {name}")
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            context=config.get("max_position_embeddings") or 2**20,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        return self.num_key_value_heads * self.head_size

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer: q, k, v, o; gate, up, down."""
        if self.counted:
            return round(self.counted.matrices / self.num_layers)
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def used_matrices(self) -> int:
        """Numbers in a layer's matrices that one token is multiplied by."""
        return round(self.counted.used / self.num_layers) if self.counted else self.layer_matrices

    @property
    def adapters(self) -> Mapping[str, int]:
        """Each matrix that can have an adapter, and the numbers of one of rank 1."""
        if self.counted:
            return self.counted.adapters
        wide, query, key, inner = self.hidden_size, self.query_size, self.key_size, self.intermediate_size
        sizes = {
            "self_attn.q_proj": wide + query, "self_attn.k_proj": wide + key, "self_attn.v_proj": wide + key,
            "self_attn.o_proj": query + wide,
            "mlp.gate_proj": wide + inner, "mlp.up_proj": wide + inner, "mlp.down_proj": inner + wide,
        }  # fmt: skip
        return {f"model.layers.{i}.{name}": size for i in range(self.num_layers) for name, size in sizes.items()}

    @property
    def layer(self) -> int:
        """Numbers in a layer: its matrices, biases and norms."""
        if self.counted:
            return round(self.counted.layers / self.num_layers)
        biases = (self.query_size + 2 * self.key_size) * self.qkv_bias + 2 * self.head_size * self.qk_norm
        return self.layer_matrices + biases + 2 * self.hidden_size

    @property
    def head(self) -> int:
        """Numbers in the embedding, and in the head."""
        return self.vocabulary * self.hidden_size

    @property
    def root(self) -> int:
        """Numbers outside the layers: embedding, last norm, a head of its own."""
        if self.counted:
            return self.counted.root
        return self.head * (1 if self.tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return (self.counted.layers if self.counted else self.num_layers * self.layer) + self.root


_QWEN = {"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768}
_QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
FACTS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "qwen3-4b": {**_QWEN3, "max_position_embeddings": 40960},
    "qwen3-4b-instruct-2507": {**_QWEN3, "max_position_embeddings": 262144},
    "smollm2": {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""By the beginning of a name. Source: config.json of huggingface.co/Qwen/Qwen2.5-1.5B-Instruct, .../Qwen2.5-7B-Instruct,
.../Qwen3-4B, .../Qwen3-4B-Instruct-2507 and huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct."""
