"""What a model can do: the fastest attention, cache and packing that are seen to be right for it, before anything is played.

    probe    four ragged rows, two with one prompt, three turns with context in between, rows that stop at other times, as
             long as three of the model's windows
    right    sampled log-probs, and those and the gradient of packed rows, are the plain forward's of each row alone

             model.attention    as loaded, eager         where transformers' own forward gives what eager gives
             rollout.cache      on, on by steps, off     by steps: a state that goes on takes one token at a time
             update.packing     prefix, plain, off

Each is tried from the fastest down.  What a user sets is tried alone, and refused with all that was tried to work.  Only
numbers are compared, in the precision of the weights: no list of architectures is kept, so a new one needs none.
Deliberately absent: bfloat16 (its rounding would hide a difference; the gap of a run is watched while it trains), speed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hsg.config.options import Config
from hsg.engine.generation import Decoder
from hsg.engine.layout import make_layout
from hsg.engine.packing import packed_attention
from hsg.engine.seeds import make_generator
from hsg.engine.states import has_states
from hsg.model.models import score
from hsg.types import ACTION, Batch

T = TypeVar("T")

CACHES, PACKINGS = ("on", "steps", "off"), ("prefix", "plain", "off")
"""From the fastest down. `steps` is a way of `rollout.cache: on`."""

WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size")
"""What transformers' configurations and attention modules call the reach of a layer, read in each forward pass."""

NARROW = 16
"""What long windows are set to while a model is probed: three of 4,096 tokens would take minutes on a CPU."""

LONGEST = 400
"""Tokens of a probe's row; windows that ask for more are narrowed."""


@dataclass(frozen=True)
class Fit:
    """The settings that a model was seen to be right in, and how far (nats) it was from its plain forward in them."""

    attention: str
    cache: str
    packing: str | None  # None: nothing is trained
    gap: float

    def __str__(self) -> str:
        """As options, which a command line takes."""
        said = [f"model.attention={self.attention}", f"rollout.cache={'off' if self.cache == 'off' else 'on'}"]
        return " ".join([*said, *([f"update.packing={self.packing}"] if self.packing else [])])


def fit_of(model: Any, config: Config) -> Fit:
    """The settings of a model in one run: what the configuration says, else what was found, else the fastest."""
    found = getattr(model, "fit", None) or Fit(str(model.config._attn_implementation), "on", "prefix", 0.0)
    cache, packing = config.rollout.cache, config.update.packing
    if cache == "on" and found.cache == "steps":
        cache = "steps"
    return Fit(
        found.attention,
        found.cache if cache == "auto" else cache,
        found.packing if packing == "auto" else packing,
        found.gap,
    )


_FOUND: dict[tuple[object, ...], Fit] = {}
"""Fits of this process: a run's reference and critic are its policy's architecture once more."""


def find_fit(model: Any, config: Config, *, trains: bool = True) -> Fit:
    """The fastest settings that are right for a model; those that the configuration names are held to.

    `trains` False: packing is not looked at. The model comes back as it was. One-line ValueError where what is asked for
    is wrong, naming the settings that were seen to work, or where none are right.
    """
    asked = (config.model.attention, config.rollout.cache, config.update.packing if trains else None)
    dtype = next(model.parameters()).dtype
    key = (type(model).__name__, model.config.to_json_string(), str(model.config._attn_implementation), dtype, *asked)
    if key not in _FOUND:
        with _undisturbed(model):
            _FOUND[key] = _search(model, *asked)
    return _FOUND[key]


def use_fit(model: Any, fit: Fit) -> None:
    """Set the model to its fit."""
    if fit.attention != model.config._attn_implementation:
        model.set_attn_implementation(fit.attention)
    model.fit = fit


# -------------------------------------------------------------------------------------------------------------- the search


class _WrongError(Exception):
    """One setting is not right, and why."""

    def __init__(self, key: str, value: str, problem: str) -> None:
        super().__init__(problem)
        self.key, self.value, self.problem = key, value, problem


def _search(model: Any, attention: str, cache: str, packing: str | None) -> Fit:
    found = _try(model, attention, cache, packing)
    if isinstance(found, Fit):
        return found
    name = type(model).__name__
    works = _try(model, "auto", "auto", packing and "auto")
    if isinstance(works, _WrongError):
        raise ValueError(
            f"model.path must be a model that rollouts sample from as it computes, got {name}, which is not even with "
            f"{works.key}={works.value}: {works.problem}"
        )
    raise ValueError(
        f"{found.key} must be a setting that is right for {name}, got {found.value} ({found.problem}); what was tried and "
        f"works: {works}"
    )


def _try(model: Any, attention: str, cache: str, packing: str | None) -> Fit | _WrongError:
    """The fastest right settings among those asked for (`auto`: all), or what is wrong with the last of them."""
    loaded = str(model.config._attn_implementation)
    attentions = [loaded, "eager"] if attention == "auto" else [attention]
    caches = {"auto": CACHES, "on": ("on", "steps"), "off": ("off",)}[cache]
    if not has_states(model):
        caches = tuple(c for c in caches if c != "steps")
    problem: _WrongError | None = None
    for name in dict.fromkeys(attentions):
        try:
            probe = _Probe(model, name)
            found_cache, gap = _first("rollout.cache", caches, probe.check_cache)
            found_packing = None
            if packing is not None:
                packings = PACKINGS if packing == "auto" else (packing,)
                found_packing, other = _first("update.packing", packings, probe.check_packing)
                gap = max(gap, other)
            return Fit(name, found_cache, found_packing, gap)
        except _WrongError as error:
            problem = problem or error
    assert problem is not None
    return problem


def _first(key: str, values: Sequence[str], check: Callable[[str], float]) -> tuple[str, float]:
    """The first value that passes, and its gap; `_WrongError` of the first one where none does."""
    problem: _WrongError | None = None
    for value in values:
        try:
            return value, _restated(key, value, functools.partial(check, value))
        except _WrongError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _restated(key: str, value: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except (_WrongError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a stranger's model: whatever it raises means that this setting is not for it
        text = " ".join(str(error).split()) or type(error).__name__
        raise _WrongError(key, value, text if len(text) <= 120 else f"{text[:117]}...") from error


# --------------------------------------------------------------------------------------------------------------- the probe


class _Probe:
    """One model under one attention. Rows are played once for each cache; what is right is the plain forward's."""

    def __init__(self, model: Any, attention: str) -> None:
        self.model = model
        # Flash-attention knows no float32; it is the same mask, and rollouts do not use it at all.
        self.attention = "sdpa" if attention.startswith("flash") else attention
        self.limit = 1e-3 if model.device.type == "cpu" else 1e-2  # GPUs round the factors of a convolution
        self.plan = _Plan.of(model)
        self.played: list[_Row] | None = None
        self._plain: dict[tuple[int, ...], Tensor] = {}
        self._gradient: Tensor | None = None
        _restated("model.attention", attention, lambda: self._check_attention(attention))

    def _check_attention(self, name: str) -> None:
        """This attention, without cache or packing, gives what the plainest one gives."""
        row = self.plan.prompts()[0]
        known = _Row(row, [False] * 4 + [True] * (len(row) - 5), [0.0] * (len(row) - 1))
        mine = self._score([known], self.attention)[0]
        try:
            plainest = self._score([known], "eager")[0]
        except Exception:  # there is none
            return
        gap = float((mine - plainest).abs().max())
        if not gap <= self.limit:
            raise _WrongError("model.attention", name, f"{_off(gap)} from eager")

    def check_cache(self, cache: str) -> float:
        """The gap of rows sampled in this way."""
        played = self._play(cache)
        gap = self._gap(played, [torch.tensor(row.logprobs)[torch.tensor(row.mask)] for row in played])
        if not gap <= self.limit:
            raise _WrongError("rollout.cache", "off" if cache == "off" else "on", _off(gap))
        self.played = played
        return gap

    def check_packing(self, packing: str) -> float:
        """The gap of rows scored in this way, in training mode; their gradient is held to the plain one's, too."""
        assert self.played is not None, "packing is checked on the rows of a cache that is right"
        scored, gradient = self._scored(self.played, packing)
        gap = self._gap(self.played, scored)
        if not gap <= self.limit:
            raise _WrongError("update.packing", packing, _off(gap))
        if gradient is not None:
            if self._gradient is None:
                alone = [self._scored([row], "off")[1] for row in self.played]
                self._gradient = torch.stack([g for g in alone if g is not None]).sum(0)
            far = float((gradient - self._gradient).norm() / self._gradient.norm().clamp(min=1e-30))
            if not far <= 10 * self.limit:
                raise _WrongError("update.packing", packing, f"its gradient is off by {far:.2g} of its norm")
        return gap

    def _gap(self, rows: Sequence[_Row], logprobs: Sequence[Tensor]) -> float:
        """Largest distance of log-probs of sampled tokens, (n,) for each row, from those of the row alone."""
        gaps = []
        for row, values in zip(rows, logprobs, strict=True):
            if row.key not in self._plain:
                self._plain[row.key] = self._score([row], self.attention)[0]
            gaps.append((values.to(self._plain[row.key]) - self._plain[row.key]).abs().max())
        return float(torch.stack(gaps).max())

    @torch.no_grad()
    def _score(self, rows: Sequence[_Row], attention: str) -> list[Tensor]:
        with attention_of(self.model, attention), self.plan.windows(self.model):
            batch = _batch(rows, self.model.device)
            logprobs, _ = score(self.model, batch)
        return [values[mask] for values, mask in zip(logprobs, batch.response_mask, strict=True)]

    def _scored(self, rows: Sequence[_Row], packing: str) -> tuple[list[Tensor], Tensor | None]:
        """Log-probs of sampled tokens (n,) of each row as an update computes them, and their gradient in the embeddings."""
        model = self.model
        batch = _batch(rows, model.device)
        weight = model.get_input_embeddings().weight
        layout = None
        if packing != "off":
            read = torch.nn.functional.pad(batch.response_mask, (0, 1))
            lengths = [len(row.ids) - 1 for row in rows]  # as in updates: the last token predicts nothing
            layout = make_layout(batch.input_ids, lengths, share=packing == "prefix", read=read)
        model.train()
        try:
            with attention_of(model, self.attention), self.plan.windows(model), torch.enable_grad():
                with contextlib.nullcontext() if layout is None else packed_attention(model):
                    logprobs, _ = score(model, batch, layout=layout)
                    gradient = torch.autograd.grad(logprobs.sum(), weight)[0] if weight.requires_grad else None
        finally:
            model.eval()
        masks = zip(logprobs.detach(), batch.response_mask, strict=True)
        return [values[mask] for values, mask in masks], gradient

    def _play(self, cache: str) -> list[_Row]:
        """Three turns of all rows."""
        plan, model = self.plan, self.model
        prompts = plan.prompts()
        rows = [_Row(list(ids), [False] * (len(ids) - 1), [0.0] * (len(ids) - 1)) for ids in prompts]
        generators = [make_generator("probe", i) for i in range(len(rows))]
        with attention_of(model, self.attention), plan.windows(model):
            decoder = Decoder(
                model, (), prompts, shared=[0, 0, 0, 1], use_cache=cache != "off", stepwise=cache == "steps"
            )
            for turn, asked in enumerate(((0, 1, 2, 3), (3, 1, 0), (0, 2, 3))):
                if turn:
                    for i in asked:
                        context = plan.context(turn, i)
                        decoder.append(i, context)
                        rows[i].extend(context)
                sampled = decoder.sample(
                    asked,
                    temperatures=[1.0] * len(asked),
                    generators=[generators[i] for i in asked],
                    max_new_tokens=[1 + (3 * i + turn) % 5 for i in asked],
                )
                for i, response in zip(asked, sampled, strict=True):
                    rows[i].extend(response.ids, response.logprobs)
        return rows


@dataclass
class _Row:
    """Ids (T), and for each but the first whether it was sampled and its log-prob."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]

    def extend(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    @property
    def key(self) -> tuple[int, ...]:
        return (*self.ids, *self.mask)


@dataclass(frozen=True)
class _Plan:
    """How long the probe's rows are, of which ids, and how narrow the windows while it lasts (None: as they are)."""

    prompt: int
    more: int  # tokens of context between two turns
    count: int  # ids to choose from
    narrow: int | None

    @staticmethod
    def of(model: Any) -> _Plan:
        config = model.config.get_text_config()
        limit = min(getattr(config, "max_position_embeddings", None) or LONGEST, 2**20)
        window = max((w for _, _, w in _windows(model)), default=0)
        narrow = NARROW if 3 * window + 40 > min(limit, LONGEST) else None
        # GPT-Neo's is laid down when the model is made.
        fixed = getattr(config, "window_size", 0)
        window = max(NARROW if narrow else window, fixed if isinstance(fixed, int) else 0)
        total = max(min(limit, max(3 * window, 24) + 40), 24)
        more = max(2, min(window // 2, total // 6))
        count = model.get_input_embeddings().num_embeddings
        return _Plan(total - 2 * more - 15, more, min(count, 1000), narrow)

    def prompts(self) -> list[list[int]]:
        """Two equal ones, one that begins like them, a shorter one of its own."""
        first, other = self._ids("prompt"), self._ids("other")
        begun = max(1, self.prompt // 2)
        return [first, first, first[:begun] + other[begun - 1 : -2], other[: max(2, self.prompt // 3)]]

    def context(self, turn: int, row: int) -> list[int]:
        """Ragged: long ones and single tokens."""
        return self._ids("context", turn, row)[: 1 + (self.more - 1) * ((row + turn) % 3) // 2]

    def _ids(self, *key: object) -> list[int]:
        low = min(3, self.count - 1)
        return torch.randint(low, self.count, (self.prompt,), generator=make_generator("probe", *key)).tolist()

    def windows(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.narrow is None else _narrowed(model, self.narrow)


def _windows(model: Any) -> list[tuple[Any, str, int]]:
    """Every (owner, attribute, size) of a window of the model's configurations and modules."""
    config = model.config.get_text_config()
    owners = [model.config, config, *model.modules()]  # the same one twice does no harm
    held = ((owner, name, vars(owner).get(name)) for owner in owners for name in WINDOWS)
    return [(owner, name, size) for owner, name, size in held if isinstance(size, int) and not isinstance(size, bool)]


@contextlib.contextmanager
def _narrowed(model: Any, size: int) -> Iterator[None]:
    held = _windows(model)
    try:
        for owner, name, old in held:
            setattr(owner, name, min(size, old))
        yield
    finally:
        for owner, name, old in held:
            setattr(owner, name, old)


@contextlib.contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """The model with another attention of transformers; ValueError where it has none of that name."""
    old = str(model.config._attn_implementation)
    if name == old:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(old)


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """The model in evaluation mode and in the precision of its weights; afterwards as it was."""
    training, dtype = model.training, getattr(model, "compute_dtype", None)
    model.eval()
    if dtype is not None:
        model.compute_dtype = next(model.parameters()).dtype
    try:
        yield
    finally:
        model.train(training)
        if dtype is not None:
            model.compute_dtype = dtype


def _batch(rows: Sequence[_Row], device: torch.device) -> Batch:
    """Right-padded, at temperature 1."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=device)
    mask = torch.tensor([row.mask + [False] * (width - 1 - len(row.mask)) for row in rows], device=device)
    zeros = torch.zeros(mask.shape, device=device)
    real = (torch.arange(width)[None] < lengths[:, None]).long().to(device)
    return Batch(ids, real, mask, zeros, zeros, zeros + 1, torch.full_like(mask, ACTION, dtype=torch.long))


def _off(gap: float) -> str:
    return f"log-probs off by {gap:.2g} nats"
