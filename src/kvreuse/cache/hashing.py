"""Names of blocks: chained xxh3_128 over (parent, token ids, scope).

Knows ints and bytes. Knows nothing of what is stored. A name is the same in every process and on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

from xxhash import xxh3_128_digest

from kvreuse.types import Scope

__all__ = ["HASH_BYTES", "TOKEN_BYTES", "BlockHasher", "block_hashes", "extend_hashes", "pack_tokens"]

HASH_BYTES = 16
TOKEN_BYTES = 4
_NO_PARENT = bytes(HASH_BYTES)
_TAGS = ("model", "adapter", "tenant")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """4 little-endian bytes per id. Raises OverflowError for an id outside [0, 2**32)."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@lru_cache(maxsize=256)  # every block of a request has the same
def encode_scope(scope: Scope) -> bytes:
    """Tagged, length-prefixed parts: no two different scopes encode alike."""
    values = {tag: getattr(scope, tag).encode("utf-8", "surrogatepass") for tag in _TAGS}
    return b"".join(b"%s:%d:%s" % (tag.encode(), len(value), value) for tag, value in values.items())


def extend_hashes(hashes: list[bytes], packed: bytes, *, scope: Scope, block_size: int) -> None:
    """Append the names of the whole blocks in `packed`, the token bytes that follow the blocks of `hashes`."""
    step = block_size * TOKEN_BYTES
    suffix = encode_scope(scope)
    parent = hashes[-1] if hashes else _NO_PARENT
    for start in range(0, len(packed) - step + 1, step):
        parent = xxh3_128_digest(parent + packed[start : start + step] + suffix)
        hashes.append(parent)


def block_hashes(token_ids: Sequence[int], *, scope: Scope, block_size: int) -> list[bytes]:
    """16 bytes for every whole block of token_ids, each depending on all tokens before it and on the scope."""
    hashes: list[bytes] = []
    extend_hashes(hashes, pack_tokens(token_ids), scope=scope, block_size=block_size)
    return hashes


class BlockHasher:
    """The same for a sequence that grows: `hashes` are those of all whole blocks seen so far."""

    def __init__(self, *, scope: Scope, block_size: int) -> None:
        self.hashes: list[bytes] = []
        self._scope = scope
        self._block_size = block_size
        self._pending = b""

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Take new tokens; returns all hashes so far (the list itself: do not change it)."""
        packed = self._pending + pack_tokens(token_ids)
        extend_hashes(self.hashes, packed, scope=self._scope, block_size=self._block_size)
        whole = len(packed) - len(packed) % (self._block_size * TOKEN_BYTES)
        self._pending = packed[whole:]
        return self.hashes
