"""Groups of similar prompts, for the order in which they are admitted. Never for what they share: that is exact tokens.

MinHash (Broder 1997) over shingles of tokens: two prompts agree in a place of their signatures with the probability of
their Jaccard similarity. Knows token ids. Knows nothing of blocks, memory or scheduling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvreuse.cache.hashing import TOKEN_BYTES, pack_tokens

__all__ = ["SimilarityGroups"]

_SHINGLE, _NUM_PLACES = 8, 32
# Of a long prompt this many shingles, evenly spread over it, stand for all: a look must cost far less than a step.
_MAX_SHINGLES = 64
_MAX_GROUPS = 256


class SimilarityGroups:
    """Assigns prompts to the first known one whose estimated similarity is at least `threshold` (0 to 1)."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # group -> signature, least recently met first

    def group_of(self, token_ids: Sequence[int]) -> bytes:
        """The name of the prompt's group; a prompt unlike all known ones begins a new one."""
        signature = _signature(token_ids)
        for name, other in reversed(self._known.items()):
            if sum(a == b for a, b in zip(signature, other, strict=True)) >= self._threshold * _NUM_PLACES:
                self._known.move_to_end(name)
                return name
        name = b"".join(value.to_bytes(8, "big") for value in signature[:2])
        self._known[name] = signature
        if len(self._known) > _MAX_GROUPS:
            self._known.popitem(last=False)
        return name


def _signature(token_ids: Sequence[int]) -> tuple[int, ...]:
    packed, size = pack_tokens(token_ids), _SHINGLE * TOKEN_BYTES
    starts = range(0, max(1, len(token_ids) - _SHINGLE + 1))
    shingles = {packed[i * TOKEN_BYTES : i * TOKEN_BYTES + size] for i in starts}
    # Which shingles stand for all must not depend on where they are: take those with the smallest hashes.
    chosen = sorted(shingles, key=xxh3_64_intdigest)[:_MAX_SHINGLES]
    return tuple(min(xxh3_64_intdigest(shingle, seed) for shingle in chosen) for seed in range(1, _NUM_PLACES + 1))
