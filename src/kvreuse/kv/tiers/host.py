"""Blocks in host memory.

Knows tensors in memory. Knows nothing of files or networks.
"""

from __future__ import annotations

from kvreuse.kv.tiers.base import BadEntry, StorageTier
from kvreuse.kv.tiers.block import Block
from kvreuse.types import Tier

__all__ = ["HostTier"]


class HostTier(StorageTier):
    """Keeps blocks as they are; nothing is copied."""

    tier = Tier.HOST

    def __init__(self, *, max_bytes: int) -> None:
        super().__init__(max_bytes=max_bytes)
        self._blocks: dict[bytes, Block] = {}

    def _write(self, block: Block) -> None:
        self._blocks[block.key] = block

    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        block = self._blocks[key]
        if token_bytes and block.token_bytes != token_bytes:
            raise BadEntry("it holds other tokens")
        return block

    def _delete(self, key: bytes) -> None:
        self._blocks.pop(key, None)
