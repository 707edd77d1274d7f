"""The slabs: one preallocated tensor per layer for K and one for V.

Knows slots. Which slots are whose is the store's business (cache/).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvreuse.kv.layout import KVLayout

__all__ = ["KVPool"]


class KVPool:
    """K and V of `num_slots` tokens: `keys[layer]` is (num_slots, kv_heads, key_head_dim), `values[layer]` likewise.

    The memory is taken at once and never grows. It is not cleared: a slot that was never written holds
    anything, so no reader may touch one.
    """

    def __init__(self, layout: KVLayout, *, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for spec in layout.layers:
            for slabs, head_dim in ((self.keys, spec.key_head_dim), (self.values, spec.value_head_dim)):
                slabs.append(torch.empty(num_slots, spec.num_kv_heads, head_dim, dtype=spec.dtype, device=spec.device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.num_slots * self.layout.bytes_per_token

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens: slots (T,) int64, keys and values (T, kv_heads, head_dim)."""
        for slab, new in ((self.keys[layer], keys), (self.values[layer], values)):
            slab.index_copy_(0, slots, new.to(slab.dtype))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots from `source` to `target` in every layer; the ranges may overlap."""
        overlap = abs(source - target) < length
        for slab in (*self.keys, *self.values):
            moved = slab[source : source + length]
            slab[target : target + length].copy_(moved.clone() if overlap else moved)
