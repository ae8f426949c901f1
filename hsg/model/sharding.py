"""One model spread over ranks with FSDP2: each holds a slice of every weight and borrows the rest while it computes.

    shard        layer by layer; float32 slices, gathered in the compute dtype, gradients added in float32
    with_weights functions that use a model's weights outside of its own forward
    gathered     every rank keeps whole weights for a while (a rollout) and forwards as often as it likes
    in_step      weights are borrowed layer by layer; ranks forward together, and who has nothing to do forwards a filler
    whole, like  from slices to whole tensors and back

FSDP on CPU processes is the same code over gloo.  Deliberately absent: FSDP1, tensor and pipeline parallelism, Accelerate's
`prepare` (it enters its FSDP branch on GPUs alone, so that no test could drive it).
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def is_sharded(model: Any) -> bool:
    """Whether `shard` was here."""
    return isinstance(model, FSDPModule)


def shard(model: Any, mesh: DeviceMesh, *, cpu_offload: bool = False) -> None:
    """Spread a model over a mesh, in place: (ranks,) or, for hybrid sharding, (copies, ranks of a copy). Collective."""
    half = getattr(model, "compute_dtype", None) == torch.bfloat16
    # What goes into a forward is left as it is: FSDP would round temperatures, and build each record of tensors that a
    # layer is handed (its packed layout) anew, layer by layer.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )
    model.has_weights = False  # inside a function of `with_weights`
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    model.run_with_weights = types.MethodType(
        lambda self, function, *args, **options: function(self, *args, **options), model
    )
    for module in [*layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in _parts(model):
        # Gradients are sums over tokens with a global denominator: added over ranks, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "run_with_weights")
    with torch.no_grad():  # FSDP finds out at the first forward which module is the root
        forward_filler(model)
    model.reshard()


def layers(model: Any) -> list[nn.Module]:
    """The decoder layers: what the model says must not be split, else the longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = list(max(lists, key=len, default=[]))
    return found


def _parts(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def with_weights(function: Function) -> Function:
    """For a function of (model, ...) that uses weights outside of `model.forward`: it finds them whole."""

    @functools.wraps(function)
    def wrapped(model: Any, *args: Any, **options: Any) -> Any:
        if not is_sharded(model) or model.has_weights:
            return function(model, *args, **options)
        model.has_weights = True
        try:
            result = model.run_with_weights(function, *args, **options)
        finally:
            model.has_weights = False
        if not torch.is_grad_enabled():
            # The root keeps its weights for a backward pass; where none comes, `parameters()` would go on giving these
            # copies, and an optimizer or a checkpoint that asks would miss the slices.
            model.reshard()
        return result

    return wrapped  # type: ignore[return-value]


def forward_filler(model: Any) -> None:
    """The smallest forward that there is: for a rank that only takes part."""
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


@contextmanager
def gathered(models: Sequence[Any]) -> Iterator[None]:
    """Whole weights on every rank within it, no gradients. Collective at its beginning only."""
    # Every module, not the root alone: what is still sharded would be gathered in forwards that only some ranks run.
    parts = [part for model in models for part in _parts(model)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            is_root = any(part is model for model in models)  # the backward pass, which begins there, needs it at once
            part.set_reshard_after_forward(not is_root, recurse=False)


class _Rounds:
    """Agreement of ranks on which model is forwarded next."""

    def __init__(self, models: Sequence[Any], device: torch.device) -> None:
        self.models, self.device = models, device
        self._filling = False

    def take_part(self, wanted: int | None) -> None:
        """Forward fillers until it is the turn of model number `wanted`; None: until no rank wants any."""
        while (agreed := self._agree(wanted)) != wanted:
            assert agreed is not None
            self._filling = True
            try:
                with torch.no_grad():
                    forward_filler(self.models[agreed])
            finally:
                self._filling = False

    def _agree(self, wanted: int | None) -> int | None:
        nobody = len(self.models)
        lowest = torch.tensor(nobody if wanted is None else wanted, device=self.device)
        torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN)
        return None if (number := int(lowest)) == nobody else number

    def before_forward(self, number: int, *_: Any) -> None:
        """A hook of model `number`."""
        if not self._filling:
            self.take_part(number)


@contextmanager
def in_step(models: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Ranks may call `model(...)` of these models any number of times within it: whoever is done earlier fills up.

    A rank that waits for its environments lets the others wait with it.
    """
    rounds = _Rounds(models, device)
    hooks = [
        # Before FSDP's own hook, which gathers the root's weights.
        model.register_forward_pre_hook(functools.partial(rounds.before_forward, number), prepend=True)
        for number, model in enumerate(models)
    ]
    try:
        yield
    finally:
        rounds.take_part(None)
        for hook in hooks:
            hook.remove()
        for model in models:
            model.reshard()


def whole(tensor: Tensor, *, keep: bool = True) -> Tensor:
    """A tensor with all its slices, on the CPU. Collective; ranks that do not `keep` it get an empty one."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.cpu() if keep else full.new_empty(0, device="cpu")


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """What `whole` returned, placed and sliced like a parameter of its shape (a number stays on the CPU). Collective."""
    if tensor.ndim == 0:
        return tensor.clone()
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device, copy=True)


def whole_weights(model: Any, *, keep: bool = True) -> dict[str, Tensor]:
    """The state dict with whole tensors; of weights under two names the first."""
    names = {name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    return {name: whole(value, keep=keep) for name, value in model.state_dict().items() if name in names}
