"""One block of KV on its way between tiers: its name, its tokens, its bytes.

Knows bytes and sizes. Knows nothing of where blocks are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The KV of one block of tokens.

    key: the chained hash of the block (16 bytes). tenant: whose it is; part of the hash too, kept for purge.
    token_bytes: the block's own token ids, 4 bytes each, compared on every hit.
    payload: uint8 (num_bytes,) on the CPU; `encoding` says how it is packed ("raw", or a quantised form).
    """

    key: bytes
    tenant: str
    token_bytes: bytes
    payload: Tensor
    encoding: str = "raw"

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.numel()
