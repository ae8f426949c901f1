"""How fast an iteration was: seconds by phase, arithmetic against what the machine can do, memory, tokens that differ.

    FLOPs of a pass = 2 x weights x positions forward, twice that again backward; the vocabulary head by its own positions

Deliberately absent: the FLOPs of attention (they depend on lengths; the share is of the matrix products alone), a profiler.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsg.batch import Row
from hsg.types import ACTION, STRATEGY


class Clock:
    """Seconds by phase: `with clock("rollout"): ...`"""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began, self._processor_began = time.monotonic(), time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def total(self) -> float:
        return time.monotonic() - self._began

    def processor(self) -> float:
        """Processor seconds of this process, all its threads: what else the machine does hardly changes them."""
        return time.process_time() - self._processor_began


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """FLOPs per second of a square matrix product, the best of a few."""
    size = size if device.type == "cpu" else 8 * size
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # one to warm up
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


class Arithmetic:
    """FLOPs of the matrix products of one model, by positions."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings().weight
        # Tables of vectors, of tokens as of positions, are looked up and not multiplied.
        skipped = {id(head)} | {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        self._head = head.numel()
        self._body = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in skipped)

    def flops(self, *, forwarded: int, sampled: int, trained: int, headed: int) -> float:
        """forwarded: positions without a gradient, `sampled` of them with the head; trained and headed: with one."""
        return 2 * (self._body * (forwarded + 3 * trained) + self._head * (sampled + 3 * headed))


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process has held so far, MiB: the GPU's on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # Linux; what getrusage says there begins with the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def num_unique_tokens(rows: Sequence[Row], group_shape: tuple[int, int]) -> int:
    """Tokens of rows when each prompt of a rollout group counts once, each task's strategy prompt once, and every later
    token once per row. `group_shape`: (N, M).
    """
    num_strategies, num_rollouts = group_shape
    size = {STRATEGY: num_strategies * num_rollouts, ACTION: num_rollouts}
    prompts: set[tuple[object, ...]] = set()
    unique = 0
    for row in rows:
        sampled = row.tokens.response_mask.nonzero()
        begin = int(sampled[0]) + 1 if len(sampled) else len(row)
        prompt = (row.level, row.trajectory // size[row.level], *row.tokens.input_ids[:begin].tolist())
        unique += len(row) - (begin if prompt in prompts else 0)
        prompts.add(prompt)
    return unique
