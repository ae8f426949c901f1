"""Sampling with HuggingFace `generate`, many rows at once, over a cache that lives as long as the episodes do.

A `Decoder` holds rows that grow turn by turn.  Each token is forwarded once:

    slot 0   [prompt .. | response | observation | response |        ]     cache slot == token position, so rows
    slot 1   [prompt ..    | response | observation | ...            ]     are ragged without padding inside, and a
    slot 2   [prompt .. | response |                                 ]     key is visible iff its slot <= the query's,
                                                                           and within the layer's window (reach.py)

Rows that still sample stand in the first slots; one that stops is swapped behind them, so that a decoding step forwards
live rows only, on a view and not on a copy.

Sampling is from the full softmax at each row's own temperature by inverting the distribution function with one uniform
number per token, drawn from the row's own generator: what a row samples does not depend on which rows share its batch.

Deliberately absent: top-k and top-p (they would make the ratio of training and sampling log-probs wrong), beam search,
padding ids (rows are known by position), any decoding of what was sampled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hsg.engine.attention import masked_attention
from hsg.engine.cache import RowCache
from hsg.engine.layout import common_prefix
from hsg.engine.precision import autocast, compute_weights
from hsg.engine.reach import masks_itself, row_masks
from hsg.engine.states import StateCache, has_states
from hsg.text.markers import SegmentEnd

PADDING = 40
"""Filler positions that one forward call may hold: about what another call costs with a small model."""


@dataclass(frozen=True)
class Sampled:
    """One sampled response: ids with the log-prob (nats) and temperature of each; `closed`: it ended on a stop id.

    num_first  tokens of its first segment (a turn's strategy), the end marker's own included; all where it never ended,
               0 where no segment was looked for
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperatures: tuple[float, ...]
    closed: bool
    num_first: int = 0


def sample_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits / temperature), and its log-prob there.

    logits (B, V); temperatures (B,), 0 = greedy, whose log-prob is recorded at temperature 1; uniforms (B,) in [0, 1).
    Returns ids (B,) and logprobs (B,), in float32 (float64 for float64 logits).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures).to(logits.dtype)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)  # (B, V)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniforms[:, None].double() * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)  # right: a token of mass 0 is never met
    ids = ids.clamp(max=logits.shape[-1] - 1)
    if greedy.any():
        ids = torch.where(greedy, logits.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


@dataclass
class Cost:
    """Token positions that were really forwarded, padding included."""

    positions: int = 0
    sampled: int = 0


class Decoder:
    """Rows that are extended by given ids and by sampled ones, in one batch, over one cache.

    model      a causal LM of transformers; `stop_ids` end a response
    prompts    ids of each row; rows with equal prompts are forwarded once
    shared     a label per row: rows with the same label also share their longest common prefix (a task's strategies)
    use_cache  False: the slow twin, which forwards every row from its start for every token, as the scorer does
    stepwise   context that continues a row goes in token by token: for models whose state takes several only at its start

    ValueError for a model that no cache of ragged rows fits.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        *,
        shared: Sequence[object] | None = None,
        use_cache: bool = True,
        stepwise: bool = False,
        cost: Cost | None = None,
    ) -> None:
        assert len(prompts) > 0 and all(len(p) > 0 for p in prompts), "a row needs at least one prompt token"
        self.model, self.stop_ids, self.use_cache = model, frozenset(stop_ids), use_cache
        self.stepwise = stepwise
        self.device = model.device
        # transformers 5.20, the last one for Python 3.10, knows the other name only, and drops what it does not know.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in known and "cache" not in known else "cache"
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in known}
        self._config = model.config.get_text_config()
        self.rows: list[list[int]] = [list(p) for p in prompts]
        self.cost = cost if cost is not None else Cost()
        # Nothing of the model folder's own sampling settings is taken over.
        self._settings = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, use_cache=False, max_new_tokens=1
        )
        self._in_cache = [0] * len(prompts)  # leading ids of each row whose keys are in the cache
        self._slot = list(range(len(prompts)))  # row -> slot
        self._row = list(range(len(prompts)))  # slot -> row
        if use_cache:
            if masks_itself(self._config):
                raise ValueError("it cuts its windows by columns, which rows of different lengths do not share")
            capacity = max(map(len, self.rows)) + 64
            limit = getattr(self._config, "max_position_embeddings", None)
            self._has_states = has_states(model)
            make = functools.partial(StateCache, model) if self._has_states else RowCache
            self.cache = make(len(prompts), self._config.num_hidden_layers, capacity, self.device, limit)
            with torch.no_grad(), compute_weights(model), autocast(model), masked_attention(model):
                self._prefill(list(shared) if shared is not None else [tuple(p) for p in prompts])

    def append(self, row: int, ids: Sequence[int]) -> None:
        """Context for one row; it is forwarded together with the next response."""
        self.rows[row].extend(ids)

    def sample(
        self,
        rows: Sequence[int],
        *,
        temperatures: Sequence[float],
        generators: Sequence[torch.Generator],
        max_new_tokens: Sequence[int],
        first_segment: SegmentEnd | None = None,
        first_temperatures: Sequence[float] = (),
    ) -> list[Sampled]:
        """One response for each of some rows, appended to them. All sequences have one entry per row sampled.

        With a `first_segment` a response begins at its row's `first_temperatures`; `temperatures` come after its end.
        """
        if not rows:
            return []
        # `generate` hands the loop below a model in inference mode with its own bookkeeping settled; the ids it is
        # given are only a place to start from, since every row keeps its own.
        start = torch.tensor([[self.rows[row][-1]] for row in rows], device=self.device)
        masked = masked_attention(self.model) if self.use_cache else contextlib.nullcontext()
        with torch.no_grad(), compute_weights(self.model), autocast(self.model), masked:
            return self.model.generate(
                start,
                attention_mask=torch.ones_like(start),
                generation_config=self._settings,
                custom_generate=_decode,
                decoder=self,
                rows=list(rows),
                temperatures=list(temperatures),
                first_segment=first_segment,
                first_temperatures=list(first_temperatures),
                generators=list(generators),
                limits=list(max_new_tokens),
            )

    def _prefill(self, labels: list[object]) -> None:
        """Forward the prompts but for their last token: what rows share once, then copied to each of them."""
        stem: dict[object, list[int]] = {}  # label -> rows
        for row, label in enumerate(labels):
            stem.setdefault(label, []).append(row)
        # First the longest common prefix of each label's rows, then what is left of each distinct prompt.
        for level in ("label", "prompt"):
            leaders, lengths, followers = [], [], []
            for members in stem.values():
                groups: list[tuple[list[int], int]]
                if level == "label":
                    first, last = min(self.rows[r] for r in members), max(self.rows[r] for r in members)
                    common = common_prefix(first, last)
                    groups = [(members, min(common, len(first) - 1, len(last) - 1))]
                else:
                    same: dict[tuple[int, ...], list[int]] = {}
                    for row in members:
                        same.setdefault(tuple(self.rows[row]), []).append(row)
                    groups = [(rows, len(prompt) - 1) for prompt, rows in same.items()]
                for rows, length in groups:
                    leaders.append(rows[0])
                    lengths.append(length)
                    followers.append(rows[1:])
            self._feed(leaders, lengths)
            for leader, length, rest in zip(leaders, lengths, followers, strict=True):
                if rest and length:
                    self.cache.copy([self._slot[leader]] * len(rest), [self._slot[r] for r in rest], length)
                for row in rest:
                    self._in_cache[row] = length
        # The last prompt token is forwarded by every row, since its logits are where each one starts to sample; the
        # first decoding step counts it.

    def _feed(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forward ids [in cache, length) of each row; nothing is returned, the cache has them."""
        with masked_attention(self.model, cache_only=True):
            if self.stepwise:
                ends = dict(zip(rows, lengths, strict=True))
                while going := [r for r in rows if 0 < self._in_cache[r] < ends[r]]:
                    self._forward(going, [self._in_cache[r] + 1 for r in going])
            widths = [n - self._in_cache[r] for r, n in zip(rows, lengths, strict=True)]
            for part in _similar(rows, widths, 0 if self._has_states else PADDING):
                self._forward([rows[i] for i in part], [lengths[i] for i in part])

    def _forward(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Hidden-to-logits of the last fed token of each row, (n, V). Right padding lands behind and is overwritten."""
        width = max(n - self._in_cache[r] for r, n in zip(rows, lengths, strict=True))
        ids, positions, last = [], [], []
        for row, length in zip(rows, lengths, strict=True):
            begin = self._in_cache[row]
            fed = self.rows[row][begin:length]
            last.append(len(fed) - 1)
            ids.append(fed + [fed[-1]] * (width - len(fed)))
            positions.append(range(begin, begin + width))
            self._in_cache[row] = length
        where = torch.tensor([list(p) for p in positions], device=self.device)
        limit = getattr(self._config, "max_position_embeddings", None)
        if limit is not None and int(where.max()) >= limit:
            where = where.clamp(max=limit - 1)  # padding only: real tokens are within the context
        self.cache.aim([self._slot[r] for r in rows], where)
        self.cost.positions += len(rows) * width
        # Where no layer attends: such a model takes any mask it gets for that of padding.
        dtype = getattr(self.model, "compute_dtype", self.model.dtype)
        mask = row_masks(self._config, where, self.cache.length, dtype) if self.cache.attends else None
        more = {"attention_mask": mask, "use_cache": True, self._cache_name: self.cache}
        return self._logits(torch.tensor(ids, device=self.device), where, last, **more)

    def _forward_whole(self, rows: Sequence[int]) -> Tensor:
        """The slow twin: each row from its start, right-padded, with the model's own masks, which no real token outlives."""
        width = max(len(self.rows[r]) for r in rows)
        ids = torch.tensor([self.rows[r] + [self.rows[r][-1]] * (width - len(self.rows[r])) for r in rows])
        where = torch.arange(width, device=self.device).expand(len(rows), -1)
        self.cost.positions += ids.numel()
        last = [len(self.rows[r]) - 1 for r in rows]
        return self._logits(ids.to(self.device), where, last, use_cache=False)

    def _logits(self, ids: Tensor, positions: Tensor, last: Sequence[int], **more: Any) -> Tensor:
        keep = torch.tensor(sorted(set(last)), device=self.device)  # the head runs on these columns only
        given = {"position_ids": positions, "logits_to_keep": keep}
        out = self.model(input_ids=ids, **{k: v for k, v in given.items() if k in self._takes}, **more)
        columns = torch.tensor(last, device=self.device)
        if "logits_to_keep" in self._takes:
            columns = torch.searchsorted(keep, columns)
        return out.logits[torch.arange(len(last), device=self.device), columns]

    def _lead(self, rows: Sequence[int]) -> None:
        """Bring these rows into the first slots."""
        wanted = set(rows)
        outside = iter([slot for row in rows if (slot := self._slot[row]) >= len(rows)])
        for slot in range(len(rows)):
            if self._row[slot] not in wanted:
                self._swap(slot, next(outside))

    def _swap(self, a: int, b: int) -> None:
        one, other = self._row[a], self._row[b]
        self.cache.swap(a, b, max(self._in_cache[one], self._in_cache[other]))
        self._row[a], self._row[b] = other, one
        self._slot[one], self._slot[other] = b, a


def _similar(rows: Sequence[int], widths: Sequence[int], most: int = PADDING) -> list[list[int]]:
    """Parts of the rows (as indices) with similar widths, `most` filler positions in each. Rows of width 0 are left out."""
    order = sorted((i for i in range(len(rows)) if widths[i] > 0), key=lambda i: widths[i])
    parts: list[list[int]] = []
    padding = 0
    for i in order:
        if parts and padding + (grown := (widths[i] - widths[parts[-1][-1]]) * len(parts[-1])) <= most:
            padding += grown
            parts[-1].append(i)
        else:
            parts.append([i])
            padding = 0
    return parts


def _decode(model: Any, input_ids: Tensor, *, decoder: Decoder, rows: list[int], temperatures: list[float],
            generators: list[torch.Generator], limits: list[int], first_segment: SegmentEnd | None,
            first_temperatures: list[float], **unused: Any) -> list[Sampled]:  # fmt: skip
    """The decoding loop handed to `generate`: one token per live row and step."""
    count = len(rows)
    # One uniform per token a row may sample, from its own generator: the rest of the batch cannot matter.
    uniforms = [torch.rand(limits[i], generator=generators[i], dtype=torch.float64) for i in range(count)]
    ids: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    heats: list[list[float]] = [[] for _ in rows]
    closed = [False] * count
    heat = list(temperatures if first_segment is None else first_temperatures)  # of each row's next token
    seen = [SegmentEnd.START] * count  # how much of the first segment's end marker
    num_first = [0] * count
    live = [i for i in range(count) if limits[i] > 0]
    if decoder.use_cache and live:
        decoder._lead([rows[i] for i in live])
        lengths = [len(decoder.rows[rows[i]]) for i in live]
        # All but the last new token go in parts of similar width; the last one is the first decoding step.
        decoder._feed([rows[i] for i in live], [n - 1 for n in lengths])
    while live:
        if decoder.use_cache:
            live.sort(key=lambda i: decoder._slot[rows[i]])
            sampled = [rows[i] for i in live]
            logits = decoder._forward(sampled, [len(decoder.rows[r]) for r in sampled])
        else:
            logits = decoder._forward_whole([rows[i] for i in live])
        now = torch.tensor([heat[i] for i in live], device=logits.device)
        chance = torch.stack([uniforms[i][len(ids[i])] for i in live]).to(logits.device)
        picked, scored = sample_tokens(logits, now, chance)
        going = []
        for i, token, logprob in zip(live, picked.tolist(), scored.tolist(), strict=True):
            ids[i].append(token)
            logprobs[i].append(logprob)
            heats[i].append(heat[i] or 1.0)  # greedy is recorded at temperature 1
            if first_segment is not None and seen[i] != first_segment.END:
                num_first[i] += 1
                seen[i] = first_segment.step(seen[i], token)
                if seen[i] == first_segment.END:
                    heat[i] = temperatures[i]
            decoder.rows[rows[i]].append(token)
            closed[i] = token in decoder.stop_ids
            if not closed[i] and len(ids[i]) < limits[i]:
                going.append(i)
        decoder.cost.sampled += len(live)
        if decoder.use_cache and len(going) < len(live):
            decoder._lead([rows[i] for i in going])
        live = going
    return [Sampled(tuple(ids[i]), tuple(logprobs[i]), tuple(heats[i]), closed[i], num_first[i]) for i in range(count)]
