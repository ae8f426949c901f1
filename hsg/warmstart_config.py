"""Options of the warm start and of the nano model that it builds; a section of `config.py`.

Deliberately absent: options that the run itself reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hsg.checks import require


@dataclass(frozen=True)
class NanoConfig:
    """The nano model: Qwen2 architecture and a byte-level BPE tokenizer, built locally from the warm start's texts."""

    vocab_size: int = 1024
    num_phrases: int = 0  # frequent phrases that are one token each, on top of vocab_size
    marks: tuple[
        str, ...
    ] = ()  # texts that are one token each and part phrases, so that what stands between can be copied
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 352
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        require(self.vocab_size >= 300, "warmstart.nano.vocab_size", ">= 300 (256 bytes and the tags)", self.vocab_size)
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings"):
            require(getattr(self, name) >= 1, f"warmstart.nano.{name}", ">= 1", getattr(self, name))
        require(
            self.hidden_size % (2 * self.num_heads) == 0,  # rotary positions turn pairs of a head's numbers
            "warmstart.nano.hidden_size",
            "a multiple of 2 * num_heads",
            self.hidden_size,
        )
        whole = all(self.marks) and len(set(self.marks)) == len(self.marks)
        require(whole, "warmstart.nano.marks", "texts of at least one letter, each once", list(self.marks))
        require(self.num_phrases >= 0, "warmstart.nano.num_phrases", ">= 0", self.num_phrases)
        divides = self.num_key_value_heads >= 1 and self.num_heads % self.num_key_value_heads == 0
        require(divides, "warmstart.nano.num_key_value_heads", "a divisor of num_heads", self.num_key_value_heads)


@dataclass(frozen=True)
class WarmstartConfig:
    """Supervised learning on demonstrations before RL (experiments/warmstart.py)."""

    cache_dir: str = ".cache/warmstart"
    num_tasks: int = 200  # training tasks whose demonstrations are played
    max_turns: int | None = None  # demonstrations are cut here; None: rollout.max_turns
    seconds: float = 600.0  # wall time of supervised training at most
    epochs: float = 100.0  # passes over the data at most
    batch_tokens: int = 8192
    lr: float = 2e-3
    weight_decay: float = 0.1
    patience: int = 3  # evaluations of the validation loss without gain before it stops: the plateau
    share_strategy: float = 0.15  # weights of the prompt forms in the loss, relative to each other
    share_action: float = 0.45  # play that follows a strategy
    share_plain: float = 0.2  # play without a strategy
    share_judgment: float = 0.2
    share_turn: float = 0.15  # play with a strategy in every response
    share_reflection: float = 0.05  # ... or a strategy for the episode, after an earlier attempt was shown
    seed: int = 0
    nano: NanoConfig = field(default_factory=NanoConfig)

    def __post_init__(self) -> None:
        for name in ("num_tasks", "batch_tokens", "patience"):
            require(getattr(self, name) >= 1, f"warmstart.{name}", ">= 1", getattr(self, name))
        for name in ("seconds", "epochs", "lr"):
            require(getattr(self, name) > 0, f"warmstart.{name}", "> 0", getattr(self, name))
        value = self.max_turns
        require(value is None or value >= 1, "warmstart.max_turns", ">= 1 or null", value)
        shares = [value for name, value in vars(self).items() if name.startswith("share_")]
        require(min(shares) >= 0 and sum(shares) > 0, "warmstart.share_*", ">= 0 with a sum > 0", shares)
