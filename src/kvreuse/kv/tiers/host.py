"""Blocks in host memory.

Knows tensors in memory. Knows nothing of files or networks.
"""

from __future__ import annotations

from dataclasses import replace

from kvreuse.kv.tiers.base import BadEntry
from kvreuse.kv.tiers.block import Block
from kvreuse.kv.tiers.booked import BookedTier, Found
from kvreuse.types import Tier

__all__ = ["HostTier"]


class HostTier(BookedTier):
    """Keeps blocks as they are. is_pinned: copied to page-locked memory, which a GPU reads faster."""

    tier = Tier.HOST

    def __init__(self, *, max_bytes: int, is_pinned: bool = False) -> None:
        super().__init__(max_bytes=max_bytes)
        self._is_pinned = is_pinned
        self._blocks: dict[bytes, Block] = {}
        self.open()

    def _open(self) -> list[Found]:
        return []

    def _write(self, block: Block) -> None:
        if self._is_pinned:
            block = replace(block, payload=block.payload.pin_memory())
        self._blocks[block.key] = block

    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        block = self._blocks[key]
        if token_bytes and block.token_bytes != token_bytes:
            raise BadEntry("it holds other tokens")
        return block

    def _delete(self, key: bytes) -> None:
        self._blocks.pop(key, None)
