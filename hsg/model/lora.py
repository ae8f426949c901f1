"""Low-rank adapters on a frozen policy (LoRA, arXiv 2106.09685), by peft: W + alpha / rank * B A, of which A, B are trained.

    adapters on     the policy                     B begins at 0, so that both are one model at first
    adapters off    the reference, without a copy
    merged          plain weights, as checkpoints/*/model holds them: any program loads them, without peft
    state           A and B alone, beside AdamW's moments of them: a resumed run loads its base again and adds these

so that merging rounds nothing that the run goes on with.  Deliberately absent: dropout, merging while a rollout goes on
(its log-probs would be those of other roundings), adapters of the critic.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hsg.config.checks import require
from hsg.config.options import LoraConfig, choose_targets

_NAME = "default"


def check_peft(options: LoraConfig) -> None:
    """ValueError where adapters are asked for and the package that makes them is not there."""
    there = importlib.util.find_spec("peft") is not None
    require(not options.rank or there, "model.lora.rank", "0 without peft", options.rank, "pip install hsg[peft]")


def add_adapters(model: Any, options: LoraConfig, seed: int) -> None:
    """Put adapters into a model, in place; from then on they alone are trained. Equal seeds give equal adapters.

    ValueError where a name in `targets` is that of no linear layer, or of the head.
    """
    check_peft(options)
    from peft import LoraConfig as Options
    from peft import inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    chosen = choose_targets(linear, options)
    turned = any(isinstance(module, Conv1D) for module in model.modules())  # their weights are (in, out)
    sizes = {"r": options.rank, "lora_alpha": options.alpha, "lora_dropout": 0.0}
    asked = Options(**sizes, target_modules=chosen, fan_in_fan_out=turned)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(asked, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.has_adapters = True


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
    plain = {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}
    for name, layer in _adapted(model):
        a, b = (weights[f"{name}.lora_{part}.{_NAME}.weight"] for part in "AB")
        if a.numel():  # else this rank does not keep them
            delta = layer.scaling[_NAME] * (b @ a)
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + (delta.T if layer.fan_in_fan_out else delta)
    return plain
