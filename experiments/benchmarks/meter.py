"""What a function costs: seconds, CPU seconds, and what the model really forwards while it runs, padding included.

Deliberately absent: any reading of hsg's own counters; they are compared with these.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Meter:
    """Wall and CPU seconds, positions forwarded, query-key pairs and rows of the head, by the function they went to."""

    NAMES = ("", "_cpu", "_positions", "_pairs", "_head")

    def __init__(self, model: Any, profile: Path | None = None) -> None:
        self.spent: dict[str, float] = {}
        self.profile, self._counts = profile, [0, 0, 0]
        model.base_model.register_forward_pre_hook(self._forward, with_kwargs=True)
        model.get_output_embeddings().register_forward_pre_hook(self._head)

    def _forward(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        ids, mask = given["input_ids"] if "input_ids" in given else args[0], given.get("attention_mask")
        query = ids.shape[-1]
        self._counts[0] += ids.numel()
        if (layout := given.get("layout")) is not None:  # packed rows: the mask says nothing
            for call in layout.calls:
                asked, seen = (stop - start for start, stop in (call.queries, call.keys))
                self._counts[1] += asked * (asked + 1) // 2 if call.causal else asked * seen
        elif isinstance(mask, torch.Tensor) and mask.dim() == 4:
            self._counts[1] += ids.numel() * mask.shape[-1]  # a kernel with a mask computes every pair of it
        else:
            self._counts[1] += ids.numel() * (query + 1) // 2

    def _head(self, module: Any, args: Any) -> None:
        self._counts[2] += args[0].numel() // args[0].shape[-1]

    def now(self) -> list[float]:
        return [time.perf_counter(), time.process_time(), *self._counts]

    def of(self, name: str, function: Callable[..., Any], *, outer: bool = False) -> Callable[..., Any]:
        """The same function; what it costs is added to `spent`. An outer one is not profiled: only one can be at a time."""

        def metered(*args: Any, **options: Any) -> Any:
            profiler = cProfile.Profile() if self.profile is not None and not outer else None
            before = self.now()
            result = profiler.runcall(function, *args, **options) if profiler else function(*args, **options)
            for key, a, b in zip(self.NAMES, before, self.now(), strict=True):
                self.spent[name + key] = self.spent.get(name + key, 0) + b - a
            if profiler and self.profile:
                profiler.dump_stats(self.profile.with_suffix(f".{name}.prof"))  # of the last call
            return result

        return metered
