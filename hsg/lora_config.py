"""Options of low-rank adapters; a part of the section `model` of `config.py`.

Deliberately absent: dropout (the first ratio of an update must be 1), adapters of embeddings and of the vocabulary head.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def choose_targets(layers: Iterable[str], options: LoraConfig) -> list[str]:
    """Those of the linear layers' full names that get an adapter: the ones that end in a target's name.

    ValueError where a target is that of no layer, for that one would silently not be trained.
    """

    def named(layer: str, target: str) -> bool:
        return f".{layer}".endswith(f".{target}")

    listed = list(layers)
    unknown = [target for target in options.targets if not any(named(layer, target) for layer in listed)]
    known = ", ".join(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in listed))
    rule = "names of the model's linear layers"
    require(not unknown, "model.lora.targets", rule, unknown, f"it has {known}; none is named: all of them")
    return [layer for layer in listed if not options.targets or any(named(layer, t) for t in options.targets)]
