"""Options that one baseline alone reads; sections of `config.py`.

Deliberately absent: options that several methods share (`advantage.gamma`, `advantage.whiten`, `reward.turns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsg.checks import require


@dataclass(frozen=True)
class ReinforceConfig:
    """REINFORCE++ (arXiv 2501.03262)."""

    baseline: Literal["none", "group"] = "none"  # group: the mean outcome of the group is subtracted before whitening


@dataclass(frozen=True)
class GigpoConfig:
    """GiGPO (arXiv 2505.10978): A = A_E + omega * A_S."""

    omega: float = 1.0  # weight of A_S, the advantage among turns that saw the same observation
    episode_baseline: Literal["trajectory", "turn"] = (
        "trajectory"  # A_E over the outcomes (paper) | all turns (its code)
    )

    def __post_init__(self) -> None:
        require(self.omega >= 0, "gigpo.omega", ">= 0", self.omega)


@dataclass(frozen=True)
class CriticConfig:
    """The value model of PPO (arXiv 1707.06347): a copy of the policy with a linear head, zero at first."""

    lam: float = 1.0  # lambda of GAE
    lr: float = 1e-5
    value_clip: float | None = 0.5  # how far a value may move from the one GAE used; None: any distance
    epochs: int = 1  # passes over an iteration's turns, in the mini-batches of `update`
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.lam <= 1, "critic.lam", "in [0, 1]", self.lam)
        for name in ("lr", "max_grad_norm"):
            require(getattr(self, name) > 0, f"critic.{name}", "> 0", getattr(self, name))
        require(self.value_clip is None or self.value_clip > 0, "critic.value_clip", "> 0 or null", self.value_clip)
        require(self.epochs >= 1, "critic.epochs", ">= 1", self.epochs)


@dataclass(frozen=True)
class RndConfig:
    """Random network distillation (arXiv 1810.12894) on the policy's hidden states; all sizes are ours."""

    weight: float = 0.0  # of the bonus in the return of a zero-reward trajectory's turns; 0: off
    hidden_size: int = 64
    output_size: int = 32
    lr: float = 1e-3
    epochs: int = 1  # predictor steps per iteration, each over all turns

    def __post_init__(self) -> None:
        require(self.weight >= 0, "rnd.weight", ">= 0", self.weight)
        for name in ("hidden_size", "output_size", "epochs"):
            require(getattr(self, name) >= 1, f"rnd.{name}", ">= 1", getattr(self, name))
        require(self.lr > 0, "rnd.lr", "> 0", self.lr)
