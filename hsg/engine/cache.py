"""Keys and values of a rollout's rows, kept across turns: a token stands at its position, in every layer.

    slot 0   [prompt .. | response | observation | response |        ]     rows are ragged without padding inside; what a
    slot 1   [prompt ..    | response | observation | ...            ]     query sees of its row says reach.py

The owner says with `aim` where the next forward pass writes.  Deliberately absent: which row has which slot (generation.py),
eviction of keys behind a window: the layers that see all of a row need theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _RowLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, capacity, D); written where the owner's `positions` say."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        # Not a reference: in a circle the keys and values of every rollout would stay until Python looks for such circles.
        self.owner = cast(RowCache, weakref.proxy(owner))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, capacity = self.owner.num_slots, self.owner.capacity
        self.keys = key_states.new_zeros(slots, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        where = (owner.slots[:, None], slice(None), owner.positions)
        self.keys[where] = key_states.transpose(1, 2)
        self.values[where] = value_states.transpose(1, 2)
        if owner.leading:  # the first slots: a view, no copy
            count = len(owner.slots)
            return self.keys[:count, :, : owner.length], self.values[:count, :, : owner.length]
        return self.keys[owner.slots, :, : owner.length], self.values[owner.slots, :, : owner.length]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            extra = capacity - self.keys.shape[2]
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """An attention cache whose slot is the token's position, with rows that can be copied and swapped."""

    attends = True  # whether any layer does

    def __init__(
        self, num_slots: int, num_layers: int, capacity: int, device: torch.device, limit: int | None = None
    ) -> None:
        self.num_slots, self.capacity, self.device = num_slots, capacity, device
        self.limit = limit  # no row ever grows longer
        self.slots = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.length, self.leading = 0, False
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    def aim(self, slots: Sequence[int], positions: Tensor) -> None:
        """Say which slots and positions (n, q) the next forward writes; its keys are those at 0 .. `length` - 1."""
        self.slots = torch.tensor(slots, device=self.device)
        self.positions = positions
        self.leading = list(slots) == list(range(len(slots)))
        self.length = int(positions.max()) + 1
        if self.length > self.capacity:
            grown = self.capacity + self.capacity // 2
            self.capacity = max(self.length, grown if self.limit is None else min(grown, self.limit))
            for layer in self.layers:
                layer.grow(self.capacity)

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        self.copy([a, b], [b, a], length)
