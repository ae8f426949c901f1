"""The one seam to Accelerate: who I am, where I compute, and how sums, gradients and records meet.

Every rank plays and trains the tasks it owns.  Gradients are sums over tokens divided by global denominators, so they are
added over ranks (never averaged), and metrics travel as sums and counts.

Deliberately absent: a wrapper around the model on one or several plain processes (ranks may run different numbers of
micro-batches, so gradients meet once per optimizer step, here).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor

from hsg import stopping

T = TypeVar("T")


def has_accelerator() -> bool:
    """Whether this machine has a GPU (or another accelerator) that torch can use."""
    return torch.accelerator.is_available()


class Distributed:
    """One process among `world_size`; everything works alone too."""

    def __init__(self) -> None:
        # Under torchrun the launcher's use_cpu does not arrive, and every rank would believe it is alone.
        # Ranks wait for the first one's warm start, and for ranks whose environments are slow.
        patience = InitProcessGroupKwargs(timeout=timedelta(hours=3))
        self.accelerator = Accelerator(cpu=not has_accelerator(), kwargs_handlers=[patience])
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.is_main: bool = self.accelerator.is_main_process
        self.device: torch.device = self.accelerator.device

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

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add every parameter's gradient over ranks; a rank without one contributes zeros."""
        if self.world_size == 1:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)

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
        """The state dict of a model whose parameters are sharded; None for an ordinary one."""
        return None

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor with all its shards, on the CPU."""
        return tensor.detach().cpu()

    def like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """What `whole` returned, placed and sharded like a parameter of its shape (a number stays on the CPU)."""
        return tensor.clone() if tensor.ndim == 0 else tensor.to(parameter.device, copy=True)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()
