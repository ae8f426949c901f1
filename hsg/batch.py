"""From records and their advantages to rows, and from rows to padded batches: the only place that pads or shifts.

    trajectory  prompt | response | observation | response        one row in conversation context, one per turn in window
    advantages         |  A A A   |             |  A' A'          every sampled token of a turn carries the turn's advantage
    strategy    prompt | response                                 a row of its own, with the strategy's advantage

Flattening is row-major over (P, N, M); a strategy's row goes with its first rollout.  Deliberately absent: padding ids with
a meaning (masks are built by length, so pad == eos is harmless), sorting by reward, dropping long rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hsg.credit import Credit
from hsg.engine.layout import Layout, common_prefix, make_layout
from hsg.types import ACTION, STRATEGY, Batch, Strategy, Tokens, Trajectory


@dataclass(frozen=True, eq=False)
class Row:
    """One training row. `trajectory` is the flat index of the trajectory it goes with into a mini-batch."""

    tokens: Tokens
    advantages: Tensor  # (T-1,) float32, 0.0 where the mask is False
    level: int
    trajectory: int
    ref_logprobs: Tensor | None = None  # (T-1,) float32

    def __len__(self) -> int:
        return len(self.tokens.input_ids)


def build_rows(
    strategies: Sequence[Sequence[Strategy]] | None,
    trajectories: Sequence[Sequence[Sequence[Trajectory]]],
    credit: Credit,
) -> list[Row]:
    """The rows of one iteration, strategies' and turns'. What is invalid has none: no token of it is trained.

    strategies (P, N) or None; trajectories (P, N, M), whose own rows follow that of their strategy.
    """
    rows: list[Row] = []
    flat = 0
    for p, groups in enumerate(trajectories):
        for n, group in enumerate(groups):
            if strategies is not None:
                assert credit.strategy_returns is not None and credit.strategy_advantages is not None
                if not credit.strategy_returns[p, n].isnan():
                    tokens = strategies[p][n].tokens
                    rows.append(Row(tokens, strategy_token_advantages(tokens, credit, p, n), STRATEGY, flat))
            for m, trajectory in enumerate(group):
                if credit.valid[p, n, m]:
                    advantages = trajectory_advantages(trajectory, credit, (p, n, m))
                    rows.extend(
                        Row(tokens, a, ACTION, flat) for tokens, a in zip(trajectory.rows, advantages, strict=True)
                    )
                flat += 1
    return rows


def strategy_token_advantages(tokens: Tokens, credit: Credit, p: int, n: int) -> Tensor:
    """(T-1,) float32: the strategy's advantage on each of its sampled tokens."""
    assert credit.strategy_advantages is not None
    return torch.where(tokens.response_mask, credit.strategy_advantages[p, n].float(), 0.0)


def trajectory_advantages(trajectory: Trajectory, credit: Credit, place: tuple[int, int, int]) -> list[Tensor]:
    """One (T-1,) float32 tensor per row of the trajectory: the turn's advantage, or the token's own where it has one."""
    if credit.token_advantages is None:
        return turn_token_advantages(trajectory, credit.turn_advantages[place])
    return spread_tokens(trajectory, credit.token_advantages[place])


def spread_tokens(trajectory: Trajectory, per_token: Tensor) -> list[Tensor]:
    """Numbers of a trajectory's sampled tokens, (L,) in order, at their places: one (T-1,) float32 tensor per row."""
    spread = [torch.zeros(len(row.response_mask)) for row in trajectory.rows]
    begin = 0
    for turn in trajectory.turns:
        spread[turn.row][turn.start : turn.stop] = per_token[begin : begin + turn.num_tokens].float()
        begin += turn.num_tokens
    return spread


def turn_token_advantages(trajectory: Trajectory, advantages: Tensor) -> list[Tensor]:
    """One (T-1,) float32 tensor per row of the trajectory; `advantages` (K,) of its turns."""
    spread = [torch.zeros(len(row.response_mask)) for row in trajectory.rows]
    for turn, advantage in zip(trajectory.turns, advantages.tolist(), strict=False):
        spread[turn.row][turn.start : turn.stop] = advantage
    return spread


def unit_keys(rows: Sequence[Row], *, by_row: bool = False) -> list[int]:
    """What each row belongs to that no mini-batch splits: a trajectory, or (`by_row`) a single turn.

    A strategy's row goes with the first rollout under it.
    """
    key: list[int] = []
    for i, row in enumerate(rows):
        # A strategy stands right before its first rollout, so that by row it is glued to the row that follows it.
        glued = by_row and i > 0 and rows[i - 1].level == STRATEGY and rows[i - 1].trajectory == row.trajectory
        key.append((key[-1] if glued else i) if by_row else row.trajectory)
    return key


def minibatches(
    rows: Sequence[Row],
    num_parts: int,
    generator: torch.Generator,
    *,
    by_row: bool = False,
    first: int = 0,
    total: int | None = None,
) -> list[list[Row]]:
    """Shuffle into `num_parts` parts of nearly equal size, whole units together (see `unit_keys`).

    `first`, `total`: where the units of this rank stand among those of all ranks, which are shuffled as one, so that the
    mini-batches do not depend on the number of ranks. This rank's rows are returned; a part may have none of them.
    """
    if num_parts == 1:
        return [list(rows)]
    key = unit_keys(rows, by_row=by_row)
    units = list(dict.fromkeys(key))
    total = len(units) if total is None else total
    order = torch.randperm(total, generator=generator).tolist()
    place = {number: place for place, number in enumerate(order)}
    part_of = {unit: place[first + u] * num_parts // total for u, unit in enumerate(units)}
    parts: list[list[Row]] = [[] for _ in range(num_parts)]
    for unit, row in zip(key, rows, strict=True):
        parts[part_of[unit]].append(row)
    return parts


def microbatches(rows: Sequence[Row], max_tokens: int, *, packing: str = "off") -> Iterator[list[Row]]:
    """Parts of at most `max_tokens` forwarded positions each (a longer row stands alone).

    packing off: rows of similar length, padding included. plain: rows end to end. prefix: rows that begin alike are
    neighbours, and what a row shares with the one before it counts once.
    """
    ids: list[list[int]] = []
    if packing == "prefix":
        ids = [row.tokens.input_ids.tolist() for row in rows]
        order = sorted(range(len(rows)), key=ids.__getitem__)
    else:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    part: list[int] = []
    size = 0
    for i in order:
        if packing == "off":
            grown = len(rows[part[0] if part else i]) * (len(part) + 1)
        else:
            shared = common_prefix(ids[part[-1]], ids[i]) if part and packing == "prefix" else 0
            grown = size + len(rows[i]) - shared
        if part and grown > max_tokens:
            yield [rows[k] for k in part]
            part, grown = [], len(rows[i])
        part.append(i)
        size = grown
    if part:
        yield [rows[k] for k in part]


def collate(rows: Sequence[Row], *, pad_id: int = 0) -> Batch:
    """Right-pad B rows into one Batch (B, T). What stands at padding is masked by position; `pad_id` only has to exist."""
    width = max(len(row) for row in rows)
    lengths = torch.tensor([len(row) for row in rows])

    def stack(values: Sequence[Tensor], size: int, fill: float) -> Tensor:
        out = values[0].new_full((len(values), size), fill)
        for i, value in enumerate(values):
            out[i, : len(value)] = value
        return out

    def stack_known(values: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in values if value is not None]
        assert len(known) in (0, len(rows)), "either every row has log-probs of another forward or none has"
        return stack(known, width - 1, 0.0) if known else None

    mask = stack([row.tokens.response_mask for row in rows], width - 1, 0)
    return Batch(
        input_ids=stack([row.tokens.input_ids for row in rows], width, pad_id),
        attention_mask=(torch.arange(width)[None, :] < lengths[:, None]).long(),
        response_mask=mask,
        old_logprobs=stack([row.tokens.logprobs for row in rows], width - 1, 0.0),
        advantages=stack([row.advantages for row in rows], width - 1, 0.0),
        temperatures=stack([row.tokens.temperatures for row in rows], width - 1, 1.0),
        levels=torch.tensor([row.level for row in rows])[:, None].expand(mask.shape),
        ref_logprobs=stack_known([row.ref_logprobs for row in rows]),
        trainer_logprobs=stack_known([row.tokens.trainer_logprobs for row in rows]),
    )


def row_layout(rows: Sequence[Row], batch: Batch, packing: str) -> Layout | None:
    """How the rows of a batch are packed (`update.packing`); None: they are padded."""
    if packing == "off":
        return None
    # What stands behind the last sampled token but one predicts nothing, and is not forwarded.
    lengths = [max(row.tokens.response_mask.nonzero().flatten().tolist(), default=0) + 1 for row in rows]
    read = torch.nn.functional.pad(batch.response_mask, (0, 1))  # a sampled token's log-prob is of the place before it
    return make_layout(batch.input_ids, lengths, share=packing == "prefix", read=read)
