"""Environments that break: how many, in which way, and when a run has to stop.

    trajectory.error = "<kind>: <what happened>"      kind: the exception's name, nonsense, timeout

A broken trajectory trains nothing, so an iteration in which too many break would train on almost nothing in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hsg.config.options import Config
from hsg.protocol import FAULTS
from hsg.ranks.distributed import Distributed
from hsg.types import Trajectory


def fault_kind(error: str) -> str:
    """The kind that an error text begins with."""
    return error.partition(":")[0]


KINDS = {"timeout": "timeout", "NonsenseError": "nonsense", "EnvironmentFault": "engine"}
"""What a rollout's environment did, by the first word of its error: all the others raised something of their own."""


def fault_metrics(errors: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Rollouts that broke, by kind, each attempt counted: totals over ranks, not shares."""
    kinds = Counter(KINDS.get(fault_kind(error), "raised") for error in errors)
    return {f"fault/{kind}": (float(kinds[kind]), 0.0) for kind in ("raised", *KINDS.values())}


def check_faults(config: Config, distributed: Distributed, played: Sequence[Trajectory]) -> None:
    """RuntimeError where more than `rollout.max_error_fraction` of an iteration broke, or all of it; ranks decide together."""
    errors = [t.error or "" for t in played if t.stop_reason in FAULTS]
    counts = distributed.gather([(len(played), Counter(map(fault_kind, errors)), _first_of_each(errors))])
    total = sum(c[0] for c in counts)
    kinds = sum((c[1] for c in counts), Counter[str]())
    failed = sum(kinds.values())
    if failed > config.rollout.max_error_fraction * total or failed == total:
        examples = _first_of_each(error for c in counts for error in c[2])
        summary = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise RuntimeError(
            f"environments must fail in at most rollout.max_error_fraction = {config.rollout.max_error_fraction} of the "
            f"trajectories, got {failed} of {total} ({summary}); first errors: {' | '.join(examples)}"
        )


def _first_of_each(errors: Iterable[str]) -> list[str]:
    """One error of each kind, in the order they were met."""
    first: dict[str, str] = {}
    for error in errors:
        first.setdefault(fault_kind(error), error[:300])
    return list(first.values())
