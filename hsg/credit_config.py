"""Options of rewards and advantages, and those that one baseline alone reads; sections of `config.py`.

Deliberately absent: an option that says the same for two methods twice (`advantage.gamma` is GiGPO's as well as PPO's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsg.checks import require


@dataclass(frozen=True)
class RewardConfig:
    turns: Literal["outcome", "dense"] = (
        "outcome"  # a turn's reward: the outcome at the last one | its share of the gains
    )
    format_penalty: float = 0.0  # size of the penalty when the tags cannot be parsed
    length_penalty: bool = False  # of responses near their limit: rollout.max_action_tokens, strategy.max_tokens
    length_penalty_start: float = 0.5  # share of that limit from which it grows, to -1 at the limit
    scale: float = 1.0  # outcomes are multiplied by it before anything else
    invalid_action_penalty: float = 0.0  # size of the penalty of a turn that the environment did not understand

    def __post_init__(self) -> None:
        for name in ("format_penalty", "invalid_action_penalty"):
            require(getattr(self, name) >= 0, f"reward.{name}", ">= 0 (it is subtracted)", getattr(self, name))
        require(
            0 <= self.length_penalty_start < 1, "reward.length_penalty_start", "in [0, 1)", self.length_penalty_start
        )
        require(self.scale > 0, "reward.scale", "> 0", self.scale)


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: str = (
        "group"  # how actions are credited, a name of hsg/estimators.py: group, rloo, reinforce++, gigpo, gae
    )
    turn_baseline: Literal["pooled", "trajectory"] = "pooled"  # whose mean and std (estimator group)
    std: Literal["population", "sample", "none"] = "population"
    eps: float = 1e-6
    gamma: float = 1.0  # discount of the return-to-go (reinforce++, gigpo, gae), per unit
    unit: Literal["turn", "token"] = "turn"  # what an advantage is of
    whiten: bool = False  # the whole batch to mean 0 and std 1 afterwards
    entropy_bonus: float = 0.0  # EntropyAdv: A + min(entropy_bonus * entropy, entropy_cap * |A|) per token; 0: off
    entropy_cap: float = 0.5

    def __post_init__(self) -> None:
        require(self.eps > 0, "advantage.eps", "> 0", self.eps)
        require(0 <= self.gamma <= 1, "advantage.gamma", "in [0, 1]", self.gamma)
        for name in ("entropy_bonus", "entropy_cap"):
            require(getattr(self, name) >= 0, f"advantage.{name}", ">= 0", getattr(self, name))


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
