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
    anything, so no reader may touch one. A head's slots lie next to each other, which is how attention reads them;
    `heads[layer]` is that view of both, (1, kv_heads, num_slots, head_dim).
    """

    def __init__(self, layout: KVLayout, *, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.heads: list[tuple[Tensor, Tensor]] = []
        for spec in layout.layers:
            keys, values = (
                torch.empty(1, spec.num_kv_heads, num_slots, head_dim, dtype=spec.dtype, device=spec.device)
                for head_dim in (spec.key_head_dim, spec.value_head_dim)
            )
            self.heads.append((keys, values))
        self.keys: list[Tensor] = [keys[0].transpose(0, 1) for keys, _ in self.heads]
        self.values: list[Tensor] = [values[0].transpose(0, 1) for _, values in self.heads]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.num_slots * self.layout.bytes_per_token

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens: slots (T,) int64, keys and values (1, kv_heads, T, head_dim)."""
        for slab, new in zip(self.heads[layer], (keys, values), strict=True):
            slab.index_copy_(2, slots, new.to(slab.dtype))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots from `source` to `target` in every layer; the ranges may overlap."""
        overlap = abs(source - target) < length
        for slab in (*self.keys, *self.values):
            moved = slab[source : source + length]
            slab[target : target + length].copy_(moved.clone() if overlap else moved)
