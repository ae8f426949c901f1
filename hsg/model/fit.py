"""What a model can do: the fastest attention, cache and packing that are seen to be right for it, before anything is played.

    model.attention    as loaded, eager         where transformers' own forward gives what eager gives
    rollout.cache      on, on by steps, off     by steps: a state that goes on takes one token at a time
    update.packing     prefix, plain, off

Each is tried from the fastest down (probe.py).  What a user sets is tried alone, and refused with all that was tried to work.
A fit stays with its model (`use_fit`), and whoever forwards it asks `fit_of`.  Deliberately absent: a table of architectures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hsg.config.options import Config
from hsg.engine.states import has_states
from hsg.model.models import check_head, with_attention
from hsg.model.probe import SMALL, Probe, WrongError, restated, shallow, undisturbed
from hsg.model.twin import make_twin

CACHES, PACKINGS = ("on", "steps", "off"), ("prefix", "plain", "off")
"""From the fastest down. `steps` is a way of `rollout.cache: on`."""


@dataclass(frozen=True)
class Fit:
    """The settings that a model was seen to be right in, and how far (nats) it was from its plain forward in them.

    passed_over  what would have been faster and is not right, as options with the reason
    """

    attention: str
    cache: str
    packing: str | None  # None: nothing is trained
    gap: float = 0.0
    passed_over: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """As a command line sets them."""
        said = {"model.attention": self.attention, "rollout.cache": "off" if self.cache == "off" else "on"}
        return said | ({} if self.packing is None else {"update.packing": self.packing})

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.options.items())

    def line(self, name: str) -> str:
        """What a run says at its start."""
        steps = " (context token by token)" if self.cache == "steps" else ""
        said = f"{name} runs with {self}{steps}, tried now: log-probs within {self.gap:.1g} nats of its plain forward"
        return "; not ".join([said, *self.passed_over])

    @property
    def decoding(self) -> dict[str, Any]:
        """Options of a `Decoder`."""
        return {"use_cache": self.cache != "off", "stepwise": self.cache == "steps"}


def fit_of(model: Any, config: Config | None = None) -> Fit:
    """The settings of a model: what the configuration says, else those that were found, else the fastest."""
    fit = getattr(model, "fit", None) or Fit(str(model.config._attn_implementation), "on", "prefix")
    if config is None:
        return fit
    cache, packing = config.rollout.cache, config.update.packing
    keeps = cache == "auto" or (cache == "on" and fit.cache == "steps")
    return replace(fit, cache=fit.cache if keeps else cache, packing=fit.packing if packing == "auto" else packing)


def use_fit(model: Any, fit: Fit) -> None:
    """Set the model to its fit."""
    if fit.attention != model.config._attn_implementation:
        model.set_attn_implementation(fit.attention)
    model.fit = fit


def asked_again(config: Config, kept: Mapping[str, str] | None) -> Config:
    """The configuration with the settings that a run chose at its start (`Fit.options`) in place of `auto`.

    Flash-attention aside: it may be missing where the run goes on, and another attention gives the same numbers.
    """
    settings: dict[str, Any] = dict(kept or {})
    for key in settings:
        section, name = key.split(".")
        chosen = getattr(getattr(config, section), name)
        if chosen == "auto" and not settings[key].startswith("flash"):
            config = replace(config, **{section: replace(getattr(config, section), **{name: settings[key]})})
    return config


_FOUND: dict[tuple[object, ...], Fit] = {}
"""Fits of this process: a run's reference and critic are its policy's architecture once more."""


def find_fit(model: Any, config: Config, *, trains: bool = True) -> Fit:
    """The fastest settings that are right for a model; those that the configuration names are held to.

    `trains` False: packing is not looked at. The model comes back as it was. One-line ValueError where what is asked for
    is wrong, naming the settings that were seen to work, or where none are right.
    """
    asked = (config.model.attention, config.rollout.cache, config.update.packing if trains else None)
    dtype = next(model.parameters()).dtype
    key = (type(model).__name__, model.config.to_json_string(), str(model.config._attn_implementation), dtype, *asked)
    if key not in _FOUND:
        with undisturbed(model):
            _FOUND[key] = _search(model, *asked)
    return _FOUND[key]


def expected_fit(of: Any, config: Config, *, trains: bool = True) -> Fit | None:
    """What `find_fit` will say of a model without its weights, from its configuration (of transformers): asked of its twin.

    None where no tiny one can be made that runs. ValueError with the line that a run would be refused with.
    """
    attention = "sdpa" if config.model.attention == "auto" else config.model.attention
    try:
        twin = with_attention(functools.partial(make_twin, of), attention)
        twin(input_ids=torch.arange(1, 6)[None], use_cache=False)
    except Exception:  # a stranger's configuration: it may need any size to be what it is
        return None
    check_head(twin)
    return find_fit(twin, config, trains=trains)


# -------------------------------------------------------------------------------------------------------------- the search


def _search(model: Any, attention: str, cache: str, packing: str | None) -> Fit:
    found = _cut_or_whole(model, attention, cache, packing)
    if isinstance(found, Fit):
        return found
    name = type(model).__name__
    works = _cut_or_whole(model, "auto", "auto", packing and "auto")
    if isinstance(works, WrongError):
        raise ValueError(
            f"model.path must be a model that rollouts sample from as it computes, got {name}, which is not even with "
            f"{works.key}={works.value}: {works.problem}"
        )
    raise ValueError(
        f"{found.key} must be a setting that is right for {name}, got {found.value} ({found.problem}); what was tried and "
        f"works: {works}"
    )


def _cut_or_whole(model: Any, *asked: Any) -> Fit | WrongError:
    """`_try` on the first layers of a large model; whole where that finds nothing, or the model cannot be cut."""
    if sum(p.numel() for p in model.parameters()) > SMALL:
        with shallow(model) as cut:
            found = _try(model, *asked) if cut else None
        if isinstance(found, Fit):
            return found
    return _try(model, *asked)


def _try(model: Any, attention: str, cache: str, packing: str | None) -> Fit | WrongError:
    """The fastest right settings among those asked for (`auto`: all), or what is wrong with the last of them."""
    loaded = str(model.config._attn_implementation)
    attentions = [loaded, "eager"] if attention == "auto" else [attention]
    caches = {"auto": CACHES, "on": ("on", "steps"), "off": ("off",)}[cache]
    packings = PACKINGS if packing == "auto" else (packing or "off",)
    wrong: list[WrongError] = []
    if not has_states(model):
        caches = tuple(c for c in caches if c != "steps")
    elif packing == "auto":  # what stands before a token in the sequence has entered its state, of whatever row it is
        wrong += [WrongError("update.packing", "prefix", "a recurrence would run from row to row")]
        packings = ("off",)
    for name in dict.fromkeys(attentions):
        try:
            probe = Probe(model, name, trains=packing is not None)
            found_cache, gap = _first("rollout.cache", caches, probe.check_cache, wrong)
            found_packing = None
            if packing is not None:
                found_packing, other = _first("update.packing", packings, probe.check_packing, wrong)
                gap = max(gap, other)
        except WrongError as error:
            wrong.append(error)
            continue
        fit = Fit(name, found_cache, found_packing, gap)
        passed: dict[str, str] = {}  # of each option the fastest
        for each in wrong:
            if fit.options[each.key] != each.value:
                passed.setdefault(each.key, f"{each.key}={each.value} ({each.problem})")
        return replace(fit, passed_over=tuple(passed.values()))
    return wrong[-1]


def _first(
    key: str, values: Sequence[str], check: Callable[[str], float], wrong: list[WrongError]
) -> tuple[str, float]:
    """The first value that passes, and its gap; those that do not are added to `wrong`, and the last one is raised."""
    for value in values:
        try:
            return value, restated(key, value, functools.partial(check, value))
        except WrongError as error:
            last = error
            if value != values[-1]:
                wrong.append(error)
    raise last
