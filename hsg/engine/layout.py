"""Which tokens of a batch are forwarded, where each one stands, and which of them look at which.

    rows     prompt a b c          packed   prompt a b c | d e | f       one sequence without padding, in which each
             prompt a d e                   └─ row 0 ──┘ └ 1 ┘ └2┘       row owns the tokens that no earlier row had
             prompt f

Attention looks along a row: its own tokens ask each other, causally, and everything on their path before them.  Said as
dense calls, queries of one stretch on the keys of another:

    queries        keys              calls with the same keys and neighbouring queries become one;
    row 0's own    row 0's own       a long stretch asks itself step by step
    row 1's own    row 1's own
    row 1's own    prompt a
    row 2's own    row 2's own
    row 2's own    prompt

Where a layer sees a window only (reach.py), calls lose the keys that none of their queries sees (`Layout.within`):

    queries        keys              dense where every query sees every key, with a mask along the window's edge
    row 1's own    prompt [..edge..|.dense..]

Deliberately absent: any arithmetic (packing.py), sharing of suffixes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hsg.engine.reach import Reach

STEP = 192
"""Queries of one causal call: the kernel computes all pairs of up to 512 keys, seen or not."""

Run = tuple[int, int]
"""A stretch [start, stop) of the packed sequence."""


@dataclass(frozen=True)
class Call:
    """One dense attention: the queries of one stretch on the keys of another (causal: on their own).

    hidden     (q, k) bool: keys that a query does not see although the call has both; None: `causal` says it all
    """

    queries: Run
    keys: Run
    causal: bool
    hidden: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of B rows stand in one packed sequence of n tokens.

    input_ids, positions  (n,) int64: the token and its place in its row
    index                 (B, T) int64: where each token of the padded batch stands, 0 where there is none
    paths                 places of the tokens of each row that owns some, one row after the other, in packed order
    lengths, own          of those rows: tokens on the path, and how many at its end are the row's own
    calls                 the attention of all rows as dense pieces
    read                  (r,) places of the tokens whose last hidden state is asked for, None where most are: in the last
                          layer only they look back
    read_calls            the attention of those alone; their queries are counted within `read`
    """

    input_ids: Tensor
    positions: Tensor
    index: Tensor
    paths: Tensor
    lengths: tuple[int, ...]
    own: tuple[int, ...]
    calls: tuple[Call, ...]
    read: Tensor | None = None
    read_calls: tuple[Call, ...] = ()
    _within: dict[tuple[Reach, bool], tuple[Call, ...]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.input_ids)

    def within(self, reach: Reach, *, read: bool = False) -> tuple[Call, ...]:
        """`calls`, or `read_calls`, of a layer with this reach; made once for all of its kind."""
        if not reach.hides(max(self.lengths)):
            return self.read_calls if read else self.calls
        if (reach, read) not in self._within:
            if read:
                assert self.read is not None
                calls = _asked_by(self.read.tolist(), self.within(reach))
            else:
                places = self.positions.cpu()
                calls = tuple(part for call in self.calls for part in _narrowed(call, places, reach))
            self._within[reach, read] = calls
        return self._within[reach, read]


def make_layout(input_ids: Tensor, lengths: Sequence[int], *, share: bool = True, read: Tensor | None = None) -> Layout:
    """The layout of right-padded rows. input_ids (B, T); the first `lengths[i]` >= 1 tokens of row i are packed.

    `share` False: rows stand end to end, and nothing is shared. `read` (B, T) bool: whose last hidden states will be
    read (None: all); those of other tokens may come out wrong.
    """
    rows = [ids[:n] for ids, n in zip(input_ids.tolist(), lengths, strict=True)]
    # In sorted order the longest beginning that a row shares with any earlier row is the one it shares with the last.
    order = sorted(range(len(rows)), key=rows.__getitem__) if share else list(range(len(rows)))
    ids: list[int] = []
    positions: list[int] = []
    index = torch.zeros(input_ids.shape, dtype=torch.long)
    paths: list[Tensor] = []
    own: list[int] = []
    calls: list[Call] = []
    runs: list[Run] = []  # the path of the row before
    previous: list[int] = []
    for i in order:
        row = rows[i]
        common = common_prefix(previous, row) if share else 0
        runs = _first(runs, common)
        if mine := len(row) - common:
            begin, end = len(ids), len(ids) + mine
            calls += _causal_calls(begin, end)
            calls.extend(Call((begin, end), run, causal=False) for run in runs)
            runs.append((begin, end))
            ids += row[common:]
            positions += range(common, len(row))
        path = torch.cat([torch.arange(*run) for run in runs])
        index[i, : len(row)] = path
        if mine:
            paths.append(path)
            own.append(mine)
        previous = row
    device = input_ids.device
    joined = tuple(_joined(calls))
    places = None if read is None else index.to(device)[read].unique()  # sorted
    if places is not None and 2 * len(places) > len(ids):
        places = None
    return Layout(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        index.to(device),
        torch.cat(paths).to(device),
        tuple(map(len, paths)),
        tuple(own),
        joined,
        places,
        () if places is None else _asked_by(places.tolist(), joined),
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _causal_calls(begin: int, end: int) -> list[Call]:
    """A stretch on itself: steps of at most STEP on their own and, densely, on the steps before them."""
    num_steps = math.ceil((end - begin) / STEP)
    bounds = [begin + (end - begin) * k // num_steps for k in range(num_steps + 1)]
    calls = [Call(step, step, causal=True) for step in itertools.pairwise(bounds)]
    return calls + [Call(step, (begin, step[0]), causal=False) for step in itertools.pairwise(bounds[1:])]


def _first(runs: Sequence[Run], length: int) -> list[Run]:
    """The first `length` places of a path."""
    kept = []
    for start, stop in runs:
        if length <= 0:
            break
        kept.append((start, min(stop, start + length)))
        length -= stop - start
    return kept


def _joined(calls: Sequence[Call]) -> list[Call]:
    """The same calls, those with equal keys and adjoining queries as one."""
    joined = [call for call in calls if call.causal]
    open_calls: dict[Run, Call] = {}
    for call in (call for call in calls if not call.causal):
        before = open_calls.get(call.keys)
        if before is not None and before.queries[1] == call.queries[0]:
            call = Call((before.queries[0], call.queries[1]), call.keys, causal=False)
        elif before is not None:
            joined.append(before)
        open_calls[call.keys] = call
    return joined + list(open_calls.values())


def _narrowed(call: Call, places: Tensor, reach: Reach) -> list[Call]:
    """What is left of a call where its queries see no further than `reach`. places (n,): those of tokens in their rows."""
    queries, keys = places[slice(*call.queries)], places[slice(*call.keys)]
    if call.causal:
        if not reach.hides(len(queries)) and int(reach.first(queries[-1])) <= int(queries[0]):
            return [call]
        return [Call(call.queries, call.keys, causal=True, hidden=~reach.seen(queries, keys))]
    first = reach.first(queries)
    # Keys are a stretch of one row, so their places ascend one by one; queries may be of several rows.
    begin, place = call.keys[0], int(keys[0])
    edge = min(max(int(first.max()) - place, 0), len(keys))  # keys from here on are seen by every query
    calls = [Call(call.queries, (begin + edge, call.keys[1]), causal=False)] if edge < len(keys) else []
    sees = (first < place + edge).tolist()  # which queries see any key before the edge
    start = call.queries[0]
    for is_run, run in itertools.groupby(range(len(sees)), key=sees.__getitem__):
        if not is_run:
            continue
        run_of = list(run)
        low, high = run_of[0], run_of[-1] + 1
        skip = max(int(first[low:high].min()) - place, 0)
        hidden = ~reach.seen(queries[low:high], keys[skip:edge])
        if skip < edge:
            part = hidden if bool(hidden.any()) else None
            calls.append(Call((start + low, start + high), (begin + skip, begin + edge), causal=False, hidden=part))
    return calls


def _asked_by(places: list[int], calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls of the queries at some places (sorted) alone, counted within them."""
    found = []
    for call in calls:
        begin, end = (bisect.bisect_left(places, bound) for bound in call.queries)
        if begin < end:
            asked = [place - call.queries[0] for place in places[begin:end]]
            hidden = None if call.hidden is None else call.hidden[asked]
            found.append(Call((begin, end), call.keys, call.causal, hidden))
    return tuple(found)
