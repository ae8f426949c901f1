"""States of recurrent layers (Mamba, linear attention, short convolutions), one for each of a rollout's rows.

    slot    attention layer              recurrent layer
    0       keys and values by place     convolution: the last few inputs     recurrence: one matrix
    1       ...                          as transformers' own layers keep them, after the row's last token

A state cannot be taken back: what has entered it stays.  So rows that are forwarded together feed equally many tokens, no
padding (generation.py), and a row is copied only where its state is that of the tokens to be copied.  Between two forward
passes states stand here, by slot; for one pass the layer holds those of the rows that take part.

Deliberately absent: models that keep their state elsewhere (RWKV, xLSTM, RecurrentGemma: they are sampled from without a
cache), any arithmetic of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from hsg.engine.cache import RowCache, _RowLayer

try:
    from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer
except ImportError:  # transformers before 5.23 has no common place for states: no cache for such models

    class LinearAttentionCacheLayerMixin:  # type: ignore[no-redef]
        """No layer is one."""

    class LinearAttentionLayer:  # type: ignore[no-redef]
        """No layer is one."""

    class DummyLayer:  # type: ignore[no-redef]
        """No layer is one."""


class _StateLayer(LinearAttentionLayer):
    """Convolution and recurrent states of one layer. `stored`: (slots, ...) each, while no row is forwarded."""

    def __init__(self, owner: RowCache, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.num_slots = owner.num_slots
        self.stored: dict[tuple[str, int], Tensor] = {}

    def lazy_initialization(  # type: ignore[override]
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        # Not the parent's: marking addresses for CUDA graphs would import the whole compiler, a second at the start.
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
            self.is_conv_states_initialized[state_idx] = True
            self.dtype, self.device = conv_states.dtype, conv_states.device
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    def _kinds(self) -> tuple[tuple[str, dict[int, Any], dict[int, bool]], ...]:
        return (
            ("conv", self.conv_states, self.is_conv_states_initialized),
            ("recurrent", self.recurrent_states, self.is_recurrent_states_initialized),
        )

    def load(self, slots: Tensor, *, leading: bool, fresh: bool) -> None:
        """Take the states of some slots into the layer; `fresh`: their rows have none yet."""
        for name, held, ready in self._kinds():
            for i in range(self.number_of_states):
                stored = None if fresh else self.stored.get((name, i))
                self.has_previous_state[i] = not fresh
                ready[i] = stored is not None
                # The first slots are a view, which many kernels change in place: then nothing is copied at all.
                held[i] = None if stored is None else stored[: len(slots)] if leading else stored[slots]

    def store(self, slots: Tensor) -> None:
        """Put the layer's states back into their slots."""
        for name, held, _ in self._kinds():
            for i, state in held.items():
                if state is None:
                    continue
                if (name, i) not in self.stored:
                    self.stored[name, i] = state.new_zeros(self.num_slots, *state.shape[1:])
                stored = self.stored[name, i]
                if state.data_ptr() != stored.data_ptr():
                    stored[slots] = state

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        for stored in self.stored.values():
            stored[target] = stored[source]

    is_initialized = False  # keys and values: there are none

    def grow(self, capacity: int) -> None:
        """A state has no places."""


class _NoLayer(DummyLayer):
    """A layer that only feeds forward (Nemotron-H)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = False  # there are no keys to copy

    def grow(self, capacity: int) -> None:
        """Nothing to keep."""


class _BothLayer(_RowLayer, _StateLayer):  # type: ignore[misc]
    """A layer with attention and a recurrence side by side (Falcon-H1)."""

    def __init__(self, owner: RowCache, number_of_states: int) -> None:
        _RowLayer.__init__(self, owner)
        _StateLayer.__init__(self, owner, number_of_states)

    def lazy_initialization(
        self, *args: Any, **kwargs: Any
    ) -> None:  # attention gives two by place, states one by name
        kind: Callable[..., None] = _RowLayer.lazy_initialization if args else _StateLayer.lazy_initialization
        kind(self, *args, **kwargs)


class StateCache(RowCache):
    """A `RowCache` for models in which some layers have a state besides, or instead of, keys and values."""

    def __init__(
        self, model: Any, num_slots: int, num_layers: int, capacity: int, device: torch.device, limit: int | None = None
    ) -> None:
        super().__init__(num_slots, num_layers, capacity, device, limit)
        for i, kind in enumerate(_kinds_of(model)):
            if isinstance(kind, LinearAttentionCacheLayerMixin):
                make = _BothLayer if isinstance(kind, CacheLayerMixin) else _StateLayer
                self.layers[i] = make(self, kind.number_of_states)  # type: ignore[attr-defined]
            elif not isinstance(kind, CacheLayerMixin):
                self.layers[i] = _NoLayer()
        self._states = [layer for layer in self.layers if isinstance(layer, _StateLayer)]
        self.attends = any(isinstance(layer, _RowLayer) for layer in self.layers)
        self._loaded = False

    def aim(self, slots: Sequence[int], positions: Tensor) -> None:
        """As `RowCache.aim`; all rows feed all of `positions` (n, q), which begin at 0 for rows that have no state yet."""
        self.settle()
        super().aim(slots, positions)
        # Zeros are what a fresh row has: beside rows that go on it goes on from them.
        fresh = not bool(positions[:, 0].any())
        for layer in self._states:
            layer.load(self.slots, leading=self.leading, fresh=fresh)
        self._loaded = True

    def settle(self) -> None:
        """Put the states of the last forward pass where their slots are."""
        if self._loaded:
            for layer in self._states:
                layer.store(self.slots)
        self._loaded = False

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others; their states must be of just these."""
        self.settle()
        super().copy(source, target, length)
        for layer in self._states:
            layer.copy(source, target)


def has_states(model: Any) -> bool:
    """Whether some layers of a model keep a state in transformers' cache."""
    return any(isinstance(kind, LinearAttentionCacheLayerMixin) for kind in _kinds_of(model))


def _kinds_of(model: Any) -> list[Any]:
    """transformers' own cache layers for this model, empty; none where it names no kind for them."""
    try:
        return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)
    except (KeyError, AttributeError, ValueError, TypeError):  # kinds that only the model's own file knows
        return []
