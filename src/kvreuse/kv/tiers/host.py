"""Blocks in host memory.

Knows tensors in memory. Knows nothing of files or networks.
"""

from __future__ import annotations

from dataclasses import replace

from kvreuse.kv.tiers.booked import BookedTier, Entry
from kvreuse.kv.tiers.entry import BadEntry, Block
from kvreuse.types import Tier

__all__ = ["HostTier"]


class HostTier(BookedTier):
    """Keeps blocks as they are. is_pinned: copied to page-locked memory, which a GPU reads faster."""

    tier = Tier.HOST

    def __init__(self, *, max_bytes: int, is_pinned: bool = False) -> None:
        super().__init__(max_bytes=max_bytes)
        self._is_pinned = is_pinned
        self._blocks: dict[bytes, Block] = {}

    def _listed(self) -> dict[bytes, Entry]:
        return {}

    def _size(self, block: Block) -> int:
        return block.num_bytes

    def _write(self, block: Block) -> None:
        if self._is_pinned:
            block = replace(block, payload=block.payload.pin_memory())
        self._blocks[block.key] = block

    def _opened(self, key: bytes) -> None:
        """Blocks are not kept as entries."""

    def _read(self, key: bytes, token_bytes: bytes) -> Block | None:
        block = self._blocks.get(key)
        if block is not None and token_bytes and block.token_bytes != token_bytes:
            raise BadEntry("it holds other tokens")
        return block

    def _delete(self, key: bytes) -> None:
        self._blocks.pop(key, None)
