"""Options of many ranks. What the launcher decides (how many, where) is not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsg.checks import require


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
