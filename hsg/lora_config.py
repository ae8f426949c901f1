"""Options of low-rank adapters; a part of the section `model` of `config.py`.

Deliberately absent: dropout (the first ratio of an update must be 1), adapters of embeddings and of the vocabulary head.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsg.checks import require


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685): W + alpha / rank * B A, of which A and B alone are trained."""

    rank: int = 0  # of the adapters; 0: none, all weights are trained
    alpha: float = 32.0  # their sum is scaled by alpha / rank
    targets: tuple[str, ...] = ()  # names of the layers that get one (q_proj, ...); none: every linear one but the head

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", ">= 0", self.rank)
        require(self.alpha > 0, "model.lora.alpha", "> 0", self.alpha)
        plain = all(self.targets) and len(set(self.targets)) == len(self.targets)
        require(plain, "model.lora.targets", "names of layers, each once", list(self.targets))
