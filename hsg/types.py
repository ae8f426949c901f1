"""Records that cross the seams between rollout, judge, advantages, batch and loss.

Axis letters, the one legend:
    P tasks per iteration     C candidate strategies per task (sigma * N)     N strategies per task
    M rollouts per strategy   G rollouts of a flat group                      K turns
    B rows of a batch         T tokens of a row      V vocabulary             D embedding

Alignment law: every per-token tensor but `input_ids` and `attention_mask` has length T - 1 and speaks of
`input_ids[:, t + 1]`, the token predicted at t.  `response_mask` is 1 exactly where the policy sampled that token.

Deliberately absent: an untyped bag of tensors, group ids to join on (structure is an axis until `batch.py`
flattens it), advantages inside the rollout's records (they are another stage's product).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsg.protocol import FAULTS, StopReason, Task

STRATEGY, ACTION = 0, 1
"""Levels of tokens in the unified loss (`Batch.levels`)."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One row exactly as it was sampled; ids are never decoded and encoded again.

    input_ids      (T,)    int64
    response_mask  (T-1,)  bool     True where the policy sampled input_ids[t + 1]
    logprobs       (T-1,)  float32  the sampler's, nats at `temperatures`, 0.0 where the mask is False
    temperatures   (T-1,)  float32  the temperature each token was sampled at, 1.0 where the mask is False
    trainer_logprobs  (T-1,) float32  the training forward's before the update, or None (`Learner.settle_logprobs`)
    """

    input_ids: Tensor
    response_mask: Tensor
    logprobs: Tensor
    temperatures: Tensor
    trainer_logprobs: Tensor | None = None

    @property
    def num_sampled(self) -> int:
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class Attempt:
    """What is remembered of an earlier rollout of a task: its strategies in turn order, the environment's last feedback."""

    strategies: tuple[str, ...]
    feedback: str | None


@dataclass(frozen=True)
class Reflection:
    """An attempt shown in a prompt: as a failure to criticise, or as a success to be inspired by."""

    attempt: Attempt
    success: bool


@dataclass(frozen=True, eq=False)
class Strategy:
    """One strategy of one task: a sampled text that conditions every action of its rollouts."""

    text: str  # what the rollouts see; the whole response where its tags did not parse
    parsed: bool
    truncated: bool  # the token limit cut it off
    tokens: Tokens  # prompt + response, the row that is trained
    token_limit: int  # of a strategy, whatever room its prompt left
    prompt: str = ""  # what the policy was asked, a reflection included
    reflection: Reflection | None = None  # the earlier attempt that the prompt showed

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_sampled


@dataclass(frozen=True, eq=False)
class Candidates:
    """The C candidates of one task and which N of them the selector kept, in selection order."""

    strategies: tuple[Strategy, ...]  # C
    selected: tuple[int, ...]  # N distinct indices
    distance_before: float  # mean pairwise cosine distance of the C candidates
    distance_after: float  # ... of the N selected

    @property
    def kept(self) -> tuple[Strategy, ...]:
        return tuple(self.strategies[i] for i in self.selected)


@dataclass(frozen=True)
class Turn:
    """One observation -> response -> action -> result."""

    observation: str  # what the agent saw before it answered
    response: str  # model tokens as text, without the stop token
    action: str | None  # parsed text given to the environment; None: nothing was sent
    reward: float  # gain in environment units
    valid: bool  # parsed, sent and understood by the environment
    truncated: bool  # the token limit cut the response off
    row: int  # which of the trajectory's token rows holds it
    start: int  # its trained tokens are row.response positions [start, stop) of the (T-1)-aligned tensors
    stop: int
    token_limit: int  # of a response, whatever room its row had left
    strategy: str | None = None  # the turn's own, where each has one (`strategy.per: turn`); None: none was found
    num_strategy_tokens: int = 0  # the first of its sampled tokens: those at the strategy's temperature
    strategy_missing: bool = False  # one was asked for and not found
    several_actions: bool = False  # more than one action stood in it
    num_cut: int = 0  # sampled tokens behind `stop` that are not trained: what was invented after the first action

    @property
    def parsed(self) -> bool:
        return self.action is not None and not self.strategy_missing

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_sampled(self) -> int:
        return self.num_tokens + self.num_cut


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished rollout. `outcome` is None where the environment failed: it then has no say anywhere."""

    task: Task
    seed: int
    strategy_index: int
    rollout_index: int
    strategy: str | None
    turns: tuple[Turn, ...]
    rows: tuple[Tokens, ...]  # one in conversation context, one per turn in window context
    outcome: float | None
    score: float
    success: bool
    stop_reason: StopReason
    final_observation: str  # what the last action brought
    feedback: str | None = None
    error: str | None = None
    prompt: str = ""  # the first user turn as the policy read it, a reflection included
    reflection: Reflection | None = None  # the earlier attempt that it showed

    @property
    def valid(self) -> bool:
        """Counts in returns and baselines: also where the first prompt left no room for a turn, with its outcome of 0."""
        return self.stop_reason not in FAULTS


@dataclass(frozen=True)
class Judgment:
    """What the self-judgment said of one trajectory. `text` None: it was not asked."""

    text: str | None
    flagged: tuple[int, ...] = ()  # 0-based turns
    parsed: bool = True
    skipped: bool = False  # no room in the context to ask


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of both levels, right-padded. The only padded thing in the code base; the alignment law of hsg/types.py holds.

    input_ids       (B, T)    int64
    attention_mask  (B, T)    int64  1 = real
    response_mask   (B, T-1)  bool   True = sampled by the policy and trained
    old_logprobs    (B, T-1)  float32  the sampler's
    advantages      (B, T-1)  float32
    temperatures    (B, T-1)  float32
    levels          (B, T-1)  int64  STRATEGY or ACTION
    ref_logprobs    (B, T-1)  float32 or None
    trainer_logprobs  (B, T-1) float32 or None
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    levels: Tensor
    ref_logprobs: Tensor | None = None
    trainer_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return Batch(**moved)
