"""The numbers of a model that decide about memory and time, from its config.json: no weights are needed.

    folder or config.json    read as it is
    nano                     the one that `warmstart.nano` asks for
    hub id                   as the hub, or its cache on this machine, has it; without either the few that stand here

Deliberately absent: models without a gated feed-forward part, mixtures of experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsg.config.checks import require
from hsg.config.options import Config


@dataclass(frozen=True)
class Architecture:
    """What of a config.json decides about memory. Sizes of Qwen2, Qwen3, Llama and Mistral follow from it exactly."""

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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Architecture:
        """From what config.json holds. ValueError where it is that of another kind of model."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        lacking = [key for key in names if config.get(key) is None]
        kind = str(config.get("model_type", "unknown"))
        experts = [key for key in config if "expert" in key]
        known = not lacking and not experts
        rule = "a decoder with a gated feed-forward part (Qwen2, Qwen3, Llama, ...)"
        require(known, "model.path", rule, f"{name} ({kind})", "plan such a model by a short run of it")
        optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
        for key in (*names, *(key for key in optional if config.get(key) is not None)):
            value = config[key]
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
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer(self) -> int:
        """Numbers in a layer: its matrices, biases and norms."""
        biases = (self.query_size + 2 * self.key_size) * self.qkv_bias + 2 * self.head_size * self.qk_norm
        return self.layer_matrices + biases + 2 * self.hidden_size

    @property
    def head(self) -> int:
        """Numbers in the embedding, and in the head."""
        return self.vocabulary * self.hidden_size

    @property
    def root(self) -> int:
        """Numbers outside the layers: embedding, last norm, a head of its own."""
        return self.head * (1 if self.tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_layers * self.layer + self.root


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


def read_architecture(config: Config) -> Architecture:
    """The sizes of `model.path`, from its config.json alone. ValueError in one line where it cannot be known here."""
    name = config.model.path
    if name == "nano":
        nano = config.warmstart.nano
        return Architecture(
            nano.num_layers, nano.hidden_size, nano.intermediate_size, nano.num_heads, nano.num_key_value_heads,
            nano.hidden_size // nano.num_heads, nano.vocab_size + nano.num_phrases + len(nano.marks),
            nano.max_position_embeddings, tied=True, qkv_bias=True,
        )  # fmt: skip
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return Architecture.from_config(_read(path), name)
    short = name.rsplit("/", 1)[-1].lower()
    if near := [key for key in FACTS if short.startswith(key)]:
        return Architecture.from_config(FACTS[max(near, key=len)], name)
    try:
        from transformers import AutoConfig

        known = AutoConfig.from_pretrained(name).get_text_config().to_dict()
    except Exception:  # no such model, no network, a stranger's file: the same to whoever plans
        rule = f"a folder, a config.json, a model that can be reached, or one of {', '.join(FACTS)}"
        require(False, "model.path", rule, name, "save the model's config.json and name that file")
        raise
    return Architecture.from_config(known, name)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    rule = "a model's config.json, or its folder"
    require(isinstance(found, dict), "model.path", rule, str(path))
    inner = found.get("text_config") or {}
    require(isinstance(inner, dict), "model.path", rule, str(path))
    return {**found, **inner}
