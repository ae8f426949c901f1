"""The one seam to Accelerate and FSDP: who I am, where I compute, and how sums, gradients and records meet.

Every rank plays and trains the tasks it owns, or its part of one (teams.py).  Gradients are sums over tokens divided by
global denominators, so they are added over ranks (never averaged), and metrics travel as sums and counts.

    every rank holds the model    gradients meet once per optimizer step, here; ranks run any number of micro-batches
    the model is sharded          they meet in each backward pass (sharding.py), so ranks run equally many

Deliberately absent: averaging, a wrapper around a model that is not sharded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsg.config.options import DistributedConfig
from hsg.engine.precision import compute_weights
from hsg.model import sharding
from hsg.model.lora import has_adapters, merged
from hsg.ranks import stopping

T = TypeVar("T")


def has_accelerator() -> bool:
    """Whether this machine has a GPU (or another accelerator) that torch can use."""
    return torch.accelerator.is_available()


class Distributed:
    """One process among `world_size`; everything works alone too."""

    def __init__(self, options: DistributedConfig | None = None) -> None:
        self.options = options or DistributedConfig()
        # Under torchrun the launcher's use_cpu does not arrive, and every rank would believe it is alone.
        # Ranks wait for the first one's warm start, and for ranks whose environments are slow.
        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=self.options.timeout_seconds))
        self.accelerator = Accelerator(cpu=not has_accelerator(), kwargs_handlers=[patience])
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.is_main: bool = self.accelerator.is_main_process
        self.device: torch.device = self.accelerator.device
        self._mesh: DeviceMesh | None = None  # of sharded models

    def share(self, items: Sequence[T]) -> list[T]:
        """The contiguous part of a list that is this rank's; parts differ by at most one item."""
        begin, end = (round(i * len(items) / self.world_size) for i in (self.rank, self.rank + 1))
        return list(items[begin:end])

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over ranks, the same on each."""
        if self.world_size > 1:
            value = value.to(self.device)
            torch.distributed.all_reduce(value)
        return value

    def max(self, value: float) -> float:
        """Largest of one number per rank."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return tensor.item()

    def shard(self, model: Any) -> None:
        """Spread a model over the ranks where `distributed.sharding` asks for it; else each rank keeps the whole one."""
        kind = self.options.sharding
        if kind == "auto":  # the launcher's file decides
            kind = "full" if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") else "none"
        if kind == "none" or self.world_size == 1:
            return
        if self._mesh is None:
            per_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
            hybrid = kind == "hybrid" and per_host < self.world_size
            shape = (self.world_size // per_host, per_host) if hybrid else (self.world_size,)
            names = ("copy", "shard") if hybrid else ("shard",)
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        sharding.shard(model, self._mesh, cpu_offload=self.options.cpu_offload and self.device.type != "cpu")

    @contextmanager
    def forwards(self, *models: Any, weights: str) -> Iterator[None]:
        """A phase without gradients in which ranks forward as often as they like (`rollout.weights`)."""
        sharded = [model for model in dict.fromkeys(models) if sharding.is_sharded(model)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(compute_weights(*models))
            if sharded and weights == "gathered":
                stack.enter_context(sharding.gathered(sharded))
            elif sharded:
                stack.enter_context(sharding.in_step(sharded, self.device))
            yield

    def equally_many(self, model: Any, parts: Iterable[T], filler: T) -> Iterator[T]:
        """This rank's micro-batches, and fillers where another rank has more of them and the model is sharded."""
        if not sharding.is_sharded(model):
            yield from parts
            return
        held = list(parts)
        missing = int(self.max(float(len(held)))) - len(held)
        yield from [*held, *[filler] * missing]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add every parameter's gradient over ranks; a rank without one contributes zeros."""
        if self.world_size == 1:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                # A small network may be kept on the CPU, where a GPU's process group adds nothing.
                parameter.grad.copy_(self.sum(parameter.grad))

    def clip_gradients(self, model: Any, max_norm: float) -> float:
        """Add the gradients over ranks and clip them; a rank without one contributes zeros. Returns their norm."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not sharding.is_sharded(model):
            self.sum_gradients(parameters)
        return sharding.whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm)).item()

    def gather(self, items: Sequence[T]) -> list[T]:
        """Lists of all ranks joined in rank order, on every rank."""
        return gather_object(list(items)) if self.world_size > 1 else list(items)

    def from_main(self, value: T) -> T:
        """The main rank's value, on every rank."""
        if self.world_size == 1:
            return value
        held: list[Any] = [value]
        broadcast_object_list(held)
        return held[0]

    def from_main_or_fail(self, function: Callable[[], T]) -> T:
        """What the main rank alone works out, on every rank; its ValueError is raised on every rank too."""
        value, refused = None, None
        if self.is_main:
            try:
                value = function()
            except ValueError as error:
                refused = str(error)
        value, refused = self.from_main((value, refused))
        if refused is not None:
            raise ValueError(refused)
        return cast(T, value)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A phase without collectives that a signal may cut short; after it all ranks go on, or all raise `Stopped`."""
        with contextlib.suppress(stopping.Stopped):
            yield
        self.stop_together()

    def stop_together(self) -> None:
        """A good point to stop at: if any rank has been asked to, all do."""
        if number := int(self.max(float(stopping.received()))):
            raise stopping.Stopped(number)

    def whole_weights(self, model: Any) -> dict[str, Tensor] | None:
        """On the main rank, the plain state dict of a model that is sharded or has adapters; None for others. Collective."""
        if not sharding.is_sharded(model) and not has_adapters(model):
            return None
        weights = sharding.whole_weights(model, keep=self.is_main)
        return merged(model, weights) if has_adapters(model) else weights

    def whole(self, tensor: Tensor) -> Tensor:
        """On the main rank, a tensor with all its slices, on the CPU. Collective."""
        return sharding.whole(tensor, keep=self.is_main)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()
