"""Low-rank adapters on a frozen policy (LoRA, arXiv 2106.09685), by peft: W + alpha / rank * B A, of which A, B are trained.

    adapters on     the policy                     B begins at 0, so that both are one model at first
    adapters off    the reference, without a copy
    merged          plain weights, as checkpoints/*/model holds them: any program loads them, without peft
    state           A and B alone, beside AdamW's moments of them: a resumed run loads its base again and adds these
    experts         where a model keeps all experts' matrices in one tensor (E, in, out), each expert has its own A and B

so that merging rounds nothing that the run goes on with.  Experts' matrices are W + alpha / rank B A as a whole before they
are used, so that no expert is ever read without its adapter; `frozen_share` says what no adapter reaches (routers, the
convolutions and decays of state space models).  Deliberately absent: dropout, merging of plain layers while a rollout goes
on (its log-probs would be those of other roundings), adapters of the critic.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hsg.config.checks import require
from hsg.config.options import LoraConfig, choose_targets

_NAME = "default"
_HELD = "held"


def check_peft(options: LoraConfig) -> None:
    """ValueError where adapters are asked for and the package that makes them is not there."""
    there = importlib.util.find_spec("peft") is not None
    require(not options.rank or there, "model.lora.rank", "0 without peft", options.rank, "pip install hsg[peft]")


def add_adapters(model: Any, options: LoraConfig, seed: int) -> None:
    """Put adapters into a model, in place; from then on they alone are trained. Equal seeds give equal adapters.

    ValueError where a name in `targets` is that of no linear layer and no experts' matrices, or of the head.
    """
    check_peft(options)
    from peft import LoraConfig as Options
    from peft import inject_adapter_in_model

    linear, fused, turned = targets_of(model)
    chosen = choose_targets([*linear, *fused], options)
    sizes = {"r": options.rank, "lora_alpha": options.alpha, "lora_dropout": 0.0}
    asked = Options(
        **sizes,
        target_modules=[f"{_HELD}.{name}" for name in chosen if name not in fused],
        target_parameters=[f"{_HELD}.{name}" for name in chosen if name in fused],
        fan_in_fan_out=turned,
    )
    # Not the model itself: peft knows some by their config, and then takes the names of shared experts' layers, which are
    # meant as they stand here, for those of the routed experts in older checkpoints.
    holder = nn.Module()
    holder.add_module(_HELD, model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(asked, holder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.has_adapters = True


def targets_of(model: Any) -> tuple[list[str], frozenset[str], bool]:
    """What can have adapters: names of linear layers but the head, of experts' matrices, and whether layers are (in, out)."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    head = model.get_output_embeddings()
    linear, fused = [], []
    for place, module in model.named_modules():
        plain = type(module).forward in (nn.Linear.forward, Conv1D.forward)  # a router may be one that returns more
        if plain and module is not head and not _is_read(place, model):
            linear.append(place)
        # A convolution's weight has three axes too, and is of no experts.
        elif not isinstance(module, nn.modules.conv._ConvNd):
            own = module.named_parameters(recurse=False)
            fused += [f"{place}.{name}" for name, p in own if p.ndim == 3 and min(p.shape[1:]) > 1]
    return linear, frozenset(fused), any(isinstance(module, Conv1D) for module in model.modules())


def _is_read(place: str, model: Any) -> bool:
    """Whether a layer's weight is read past the layer: a state space model (Mamba) hands these to its kernels."""
    outer, _, name = place.rpartition(".")
    if name not in ("dt_proj", "out_proj"):
        return False
    mixer = model.get_submodule(outer)
    return hasattr(mixer, "A_log") and hasattr(mixer, "D")


def frozen_share(model: Any) -> tuple[float, list[str]]:
    """The share of the matrices between embedding and head that no adapter of `model` reaches, and what they are called."""
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        outside.add(id(head.weight))
    reached = {id(_base_parameter(layer)) for _, layer in _adapted(model)}
    matrices = [
        (name, p)
        for name, p in model.named_parameters()
        if p.ndim >= 2 and ".lora_" not in name and id(p) not in outside and not name.endswith("bias")
    ]
    frozen = [(_plain_name(name), p) for name, p in matrices if id(p) not in reached]
    total = sum(p.numel() for _, p in matrices)
    names = dict.fromkeys(".".join(name.removesuffix(".weight").split(".")[-2:]) for name, _ in frozen)
    return sum(p.numel() for _, p in frozen) / max(total, 1), list(names)


def frozen_line(model: Any) -> str:
    """One line that says which share of the weights stays as it is; nothing where adapters reach all."""
    share, names = frozen_share(model)
    if not names:
        return ""
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"adapters reach {1 - share:.1%} of the weights between embedding and head; {share:.1%} stay frozen: {shown}"


def has_adapters(model: Any) -> bool:
    """Whether `add_adapters` was here."""
    return getattr(model, "has_adapters", False)


def _adapted(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within it the model is the one that the adapters were added to. No gradients: nothing is to be trained in there."""
    layers = [module for _, module in _adapted(model)]
    # Not by peft's own method: it would also freeze the adapters, which FSDP must not see.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with whole tensors as that of the plain model: adapters added to what they stand beside."""
    plain = {_plain_name(name): value for name, value in weights.items() if ".lora_" not in name}
    for name, layer in _adapted(model):
        a, b = (weights[f"{name}.lora_{part}.{_NAME}.weight"] for part in "AB")
        if a.numel():  # else this rank does not keep them
            place = f"{_plain_name(name)}.{getattr(layer, 'parameter_name', 'weight')}"
            plain[place] = plain[place] + layer.scaling[_NAME] * _product(layer, a, b, plain[place].shape)
    return plain


def _product(layer: Any, a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """B A, in the axes of the matrix that the adapter stands beside.

    a (r, in), b (out, r); of E experts a (E r, in) expert after expert, b (out, r E) with the experts as the inner axis, as
    peft keeps them -> (E, out, in), or (E, in, out) where the experts' matrices are so.
    """
    if len(shape) == 2:
        return (b @ a).T if layer.fan_in_fan_out else b @ a
    experts = shape[0]
    b = b.reshape(b.shape[0], -1, experts)  # (out, r, E)
    a = a.reshape(experts, -1, a.shape[1])  # (E, r, in)
    return torch.einsum("ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio", b, a)


def _plain_name(name: str) -> str:
    """A name as it was before adapters; those of several matrices in one module stand around each other."""
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def _base_parameter(layer: Any) -> Any:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
