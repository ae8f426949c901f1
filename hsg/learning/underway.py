"""An iteration between the end of its rollout and the end of its update: what a checkpoint in the middle of it holds.

    rollout -> Collected | optimizer step, optimizer step, (here a run may be stopped) optimizer step | log

Each rank has its own part.  A checkpoint lists the parts of all ranks; as many ranks take up their own again, another
number of ranks takes whole parts, joined, and some may have none until the iteration is over.

Deliberately absent: the rollout itself, which begins anew (it needs nothing but the weights and the seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hsg.batch import Row
from hsg.engine.generation import Cost
from hsg.losses import Metrics
from hsg.measure import metrics as mx
from hsg.rollout import RolloutCosts
from hsg.types import Tokens


@dataclass
class Collected:
    """What one rank's rollout left for the log: sums of metrics, records of trajectories, positions forwarded."""

    sums: mx.Sums = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    costs: RolloutCosts = field(default_factory=RolloutCosts)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "records": self.records, "costs": asdict(self.costs)}

    @classmethod
    def join(cls, states: Sequence[Mapping[str, Any]]) -> Collected:
        """One rank's part from those it takes over."""
        sums = mx.merge({k: (v[0], v[1]) for k, v in s["sums"].items()} for s in states)
        costs = RolloutCosts()
        for purpose, cost in vars(costs).items():
            assert isinstance(cost, Cost)
            for state in states:
                cost.positions += state["costs"][purpose]["positions"]
                cost.sampled += state["costs"][purpose]["sampled"]
        return cls(sums, [record for s in states for record in s["records"]], costs)


@dataclass
class Underway:
    """One rank's part of an update: its rows, and how far it is. What follows `rows` speaks of all epochs together."""

    rows: list[Row]
    num_done: int = 0  # mini-batches behind it
    metrics: list[Metrics] = field(default_factory=list)  # one per mini-batch
    norms: list[float] = field(default_factory=list)  # the same on every rank
    values: dict[str, float] = field(default_factory=dict)  # the same on every rank

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def join(cls, states: Sequence[Mapping[str, Any]], *, of: Mapping[str, Any]) -> Underway:
        """One rank's part from those it takes over; `of`: any one, for what is the same on every rank."""
        rows: list[Row] = []
        for state in states:
            first = 1 + max((row.trajectory for row in rows), default=-1)
            for row in state["rows"]:
                tokens, number = Tokens(**row["tokens"]), first + row["trajectory"]
                rows.append(Row(**{**row, "tokens": tokens, "trajectory": number}))
        metrics = [part for state in states for part in state["metrics"]]
        return cls(rows, of["num_done"], metrics, list(of["norms"]), dict(of["values"]))


class NonfiniteError(RuntimeError):
    """Too many optimizer steps in a row without finite numbers. `rows`: this rank's mini-batch of the last one."""

    def __init__(self, times: int, rows: list[Row]) -> None:
        super().__init__(
            f"gradients must be finite, got {times} optimizer steps in a row that are not; "
            "lower optimizer.lr or look at the last trajectories"
        )
        self.rows = rows
