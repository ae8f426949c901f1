"""A few ragged rows, played and scored by one model: whether an attention, a cache or a packing is right for it.

    rows     four, two with one prompt; three turns with context in between; rows that stop at other times; as long as three
             of the model's windows
    right    sampled log-probs, and those and the gradient of packed rows, are the plain forward's of each row alone

Only numbers are compared, in the precision of the weights: no list of architectures is kept, so a new one needs none.
A large model is cut to its first layers while it is probed (`shallow`): every kind of layer is in them, and what is right
for each kind is right for all.  Deliberately absent: which setting is tried when (fit.py), bfloat16 (its rounding would hide
a difference), speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from hsg.engine.attention import trunk
from hsg.engine.generation import Decoder
from hsg.engine.layout import make_layout
from hsg.engine.packing import packed_attention
from hsg.engine.reach import narrowed, window_sizes
from hsg.engine.seeds import make_generator
from hsg.model.models import score
from hsg.types import ACTION, Batch

T = TypeVar("T")

NARROW = 8
"""What long windows are set to while a model is probed: three of 4,096 tokens would take minutes on a CPU."""

SHORT, LONGEST = 32, 120
"""Tokens of a probe's row: without a window, and the most; windows that ask for more are narrowed."""

SMALL = 20_000_000
"""Parameters up to which a model is probed as it is."""


NOT_PLAIN = "its log-probs are not those of the plain forward"


class WrongError(Exception):
    """One setting is not right, and why: in words without numbers, so that `hsg plan` says what training says."""

    def __init__(self, key: str, value: str, problem: str) -> None:
        super().__init__(problem)
        self.key, self.value, self.problem = key, value, problem


def restated(key: str, value: str, function: Callable[[], T]) -> T:
    """`function()`; `WrongError` for whatever else it raises."""
    try:
        return function()
    except (WrongError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a stranger's model: whatever it raises means that this setting is not for it
        text = " ".join(str(error).split()) or type(error).__name__
        raise WrongError(key, value, text if len(text) <= 120 else f"{text[:117]}...") from error


class Probe:
    """One model under one attention; `WrongError` where that alone is wrong.

    trains  whether rows are going to be scored for a gradient
    """

    def __init__(self, model: Any, attention: str, *, trains: bool = True) -> None:
        self.model, self.trains = model, trains
        # Flash-attention knows no float32; it is the same mask, and rollouts do not use it at all.
        self.attention = "sdpa" if attention.startswith("flash") else attention
        self.limit = 1e-3 if model.device.type == "cpu" else 1e-2  # GPUs round the factors of a convolution
        self.plan = _Plan.of(model)
        self.played: list[_Row] | None = None
        self._alone: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        restated("model.attention", attention, lambda: self._check_attention(attention))

    def _check_attention(self, name: str) -> None:
        """The model has this attention, which gives without cache or packing what the plainest one gives."""
        with attention_of(self.model, name):
            pass
        row = self.plan.prompts()[0]
        known = _Row(row, [False] * 4 + [True] * (len(row) - 5), [0.0] * (len(row) - 1))
        mine = self._scored([known], "off", self.attention, gradient=False)[0][0]
        if self.attention == "eager":
            return
        try:
            plainest = self._scored([known], "off", "eager", gradient=False)[0][0]
        except Exception:  # there is none
            return
        gap = float((mine - plainest).abs().max())
        if not gap <= self.limit:
            raise WrongError("model.attention", name, "its log-probs are not those of eager")

    def check_cache(self, cache: str) -> float:
        """The gap of rows sampled in this way."""
        played = self._play(cache)
        gap = self._gap(played, [torch.tensor(row.logprobs)[torch.tensor(row.mask)] for row in played])
        if not gap <= self.limit:
            raise WrongError("rollout.cache", "off" if cache == "off" else "on", NOT_PLAIN)
        self.played = played
        return gap

    def check_packing(self, packing: str) -> float:
        """The gap of rows scored in this way, in training mode; their gradient is held to the plain one's, too."""
        played = self.played
        assert played is not None, "packing is checked on the rows of a cache that is right"
        gap = 0.0

        def compare(scored: list[Tensor]) -> None:
            nonlocal gap
            gap = self._gap(played, scored)
            if not gap <= self.limit:
                raise WrongError("update.packing", packing, NOT_PLAIN)

        gradient = self._scored(played, packing, self.attention, then=compare)[1]
        if gradient is not None:
            plain = torch.stack([g for row in played if (g := self._plain(row)[1]) is not None]).sum(0)
            far = float((gradient - plain).norm() / plain.norm().clamp(min=1e-30))
            if not far <= 10 * self.limit:
                raise WrongError("update.packing", packing, "its gradient is not that of the plain forward")
        return gap

    def _plain(self, row: _Row) -> tuple[Tensor, Tensor | None]:
        """Log-probs (n,) of the sampled tokens of a row that is forwarded alone, and their gradient."""
        if row.key not in self._alone:
            scored, gradient = self._scored([row], "off", self.attention, gradient=self.trains)
            self._alone[row.key] = scored[0], gradient
        return self._alone[row.key]

    def _gap(self, rows: Sequence[_Row], logprobs: Sequence[Tensor]) -> float:
        """Largest distance of log-probs of sampled tokens, (n,) for each row, from those of the row alone."""
        gaps = []
        for row, values in zip(rows, logprobs, strict=True):
            plain = self._plain(row)[0]
            gaps.append((values.to(plain) - plain).abs().max())
        return float(torch.stack(gaps).max())

    def _scored(
        self,
        rows: Sequence[_Row],
        packing: str,
        attention: str,
        *,
        gradient: bool = True,
        then: Callable[[list[Tensor]], None] = lambda scored: None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Log-probs (n,) of sampled tokens of each row as an update computes them, and their gradient in `_thin` weights.

        `then` looks at the log-probs before the backward pass spends its time.
        """
        model = self.model
        batch = _batch(rows, model.device)
        thin = _thin(model) if gradient else []
        layout = None
        if packing != "off":
            read = nn.functional.pad(batch.response_mask, (0, 1))
            lengths = [len(row.ids) - 1 for row in rows]  # as in updates: the last token predicts nothing
            layout = make_layout(batch.input_ids, lengths, share=packing == "prefix", read=read)
        model.train(gradient)
        found = None
        try:
            with (
                attention_of(model, attention),
                self.plan.windows(model),
                contextlib.nullcontext() if layout is None else packed_attention(model),
                torch.set_grad_enabled(gradient),
            ):
                logprobs, _ = score(model, batch, layout=layout)
                scored = [v[mask] for v, mask in zip(logprobs.detach(), batch.response_mask, strict=True)]
                then(scored)
                if thin:
                    found = torch.autograd.grad(logprobs.sum(), thin, allow_unused=True, materialize_grads=True)
        finally:
            model.eval()
        return scored, None if found is None else torch.cat([g.flatten() for g in found])

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
                    max_new_tokens=[1 + (i + turn) % 3 for i in asked],
                )
                for i, response in zip(asked, sampled, strict=True):
                    rows[i].extend(response.ids, response.logprobs)
        return rows


def _thin(model: Any) -> list[Tensor]:
    """Biases, norms and the like: their gradients come through everything behind them, and cost nothing to keep."""
    thin = [p for p in model.parameters() if p.requires_grad and p.dim() == 1 and p.is_floating_point()]
    embeddings = model.get_input_embeddings().weight
    return thin or ([embeddings] if embeddings.requires_grad else [])


# ---------------------------------------------------------------------------------------------------------------- the rows


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


def _batch(rows: Sequence[_Row], device: torch.device) -> Batch:
    """Right-padded, at temperature 1."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=device)
    mask = torch.tensor([row.mask + [False] * (width - 1 - len(row.mask)) for row in rows], device=device)
    zeros = torch.zeros(mask.shape, device=device)
    real = (torch.arange(width)[None] < lengths[:, None]).long().to(device)
    return Batch(ids, real, mask, zeros, zeros, zeros + 1, torch.full_like(mask, ACTION, dtype=torch.long))


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
        limit = min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST)
        window = max((w for _, _, w in window_sizes(model)), default=0)
        narrow = NARROW if 3 * window + 24 > limit else None
        # GPT-Neo's is laid down when the model is made.
        fixed = getattr(config, "window_size", 0)
        reach = max(NARROW if narrow else window, fixed if isinstance(fixed, int) else 0)
        total = max(min(limit, max(3 * reach + 24, SHORT)), 24)
        more = max(3, min(reach // 2, total // 6))
        count = model.get_input_embeddings().num_embeddings
        return _Plan(total - 2 * more - 9, more, min(count, 1000), narrow)

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
        return contextlib.nullcontext() if self.narrow is None else narrowed(model, self.narrow)


# ------------------------------------------------------------------------------------------------- a model for a short time


@contextlib.contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """The model with another attention of transformers; ValueError where it has none of that name."""
    old = str(model.config._attn_implementation)
    if name == old:
        yield
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # some only warn
        raise ValueError("it has no attention of that name")
    try:
        yield
    finally:
        model.set_attn_implementation(old)


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """The model in evaluation mode and in the precision of its weights; afterwards as it was."""
    training, dtype = model.training, getattr(model, "compute_dtype", None)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what does not work is said by the probe
    model.eval()
    if dtype is not None:
        model.compute_dtype = next(model.parameters()).dtype
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        model.train(training)
        if dtype is not None:
            model.compute_dtype = dtype


@contextlib.contextmanager
def shallow(model: Any) -> Iterator[bool]:
    """The model cut to its first layers, as many as have every kind of layer in them; True: it is cut."""
    config = model.config.get_text_config()
    total = getattr(config, "num_hidden_layers", None) or 0
    owner, name = _layers_of(model, total)
    kept = _enough(config, getattr(owner, name)) if owner is not None else total
    if owner is None or kept >= total:
        yield False
        return
    layers = getattr(owner, name)
    setattr(owner, name, layers[:kept])
    config.num_hidden_layers = kept
    try:
        yield True
    finally:
        config.num_hidden_layers = total
        setattr(owner, name, layers)


def _layers_of(model: Any, total: int) -> tuple[Any, str]:
    """(owner, attribute) of the only list of `total` modules in the model's trunk, else (None, "")."""
    found = [
        (module, name)
        for module in trunk(model).modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    return found[0] if len(found) == 1 else (None, "")


def _enough(config: Any, layers: Sequence[nn.Module]) -> int:
    """The fewest first layers, two or more, that show every kind there is."""
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    seen: dict[object, int] = {}
    for i, layer in enumerate(layers):
        seen.setdefault((kinds[i] if i < len(kinds) else "", _kind(layer)), i)
    return max(2, max(seen.values()) + 1)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What distinguishes a layer from others but for its weights and its place: names, classes, plain settings."""
    return tuple(
        (name, type(module).__name__, *sorted((k, v) for k, v in vars(module).items() if _setting(k, v)))
        for name, module in layer.named_modules()
    )


def _setting(name: str, value: object) -> bool:
    # A float may be made from the layer's number (DiffLlama); what it scales is the same computation.
    return isinstance(value, (bool, int, str)) and "idx" not in name and "index" not in name and name != "training"
