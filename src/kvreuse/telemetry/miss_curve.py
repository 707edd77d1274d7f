"""How the hit rate depends on the size of the cache: one pass over the prompts gives it for every size.

Knows block hashes and counts. Knows nothing of tokens, of the store or of who asks.

Stack distances (Mattson et al. 1970) over a Fenwick tree. The blocks of a prompt count as used tail first, so a parent
is always more recent than its children and a block hits exactly when all before it do. `sample_every` k follows one
block in k, chosen by name; what the chosen ones are used too much or too little counts as the shortest distance (SHARDS
with adjustment, Waldspurger et al. 2015), for that is where the hottest blocks are, of which chance may choose none.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["MissCurve"]


class MissCurve:
    """Exact for least-recently-used with sample_every 1. Thread-safe. `max_blocks` bounds its memory: the blocks it
    remembers, about 200 bytes each; what is older counts as a miss at every size.
    """

    def __init__(self, *, block_size: int, sample_every: int = 1, max_blocks: int = 1 << 20) -> None:
        self._block_size = block_size
        self._every = sample_every
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._num_matchable = 0
        self._num_sampled = 0
        self._distances: Counter[int] = Counter()  # sampled blocks between two uses -> how often
        self._places: dict[Hashable, int] = {}  # block -> its time of use, oldest first
        self._tree: list[int] = [0] * 1025  # Fenwick: how many blocks have their place in a range of times
        self._now = 0

    def add(self, blocks: Sequence[Hashable], *, num_prompt_tokens: int) -> None:
        """A prompt: the names of its blocks, each of which stands for all before it. The last token's is never hit."""
        with self._lock:
            blocks = blocks[: num_prompt_tokens // self._block_size]  # a partial one is kept by nobody
            num_matchable = min((num_prompt_tokens - 1) // self._block_size, len(blocks))
            chain = [(depth, b) for depth, b in enumerate(blocks) if hash((b,)) % self._every == 0]
            self._num_matchable += num_matchable
            self._num_sampled += sum(depth < num_matchable for depth, _ in chain)
            for depth, block in chain:
                place = self._places.get(block)
                if place is None or depth >= num_matchable:
                    break
                self._distances[len(self._places) - self._sum(place)] += 1
            for _, block in reversed(chain):
                self._use(block)

    def hit_tokens(self, num_tokens: float) -> int:
        """Prompt tokens that a cache of `num_tokens` tokens (inf: without bound) would have served so far."""
        with self._lock:
            near = self._num_matchable - self._num_sampled * self._every
            far = sum(n for d, n in self._distances.items() if d * self._every * self._block_size <= num_tokens)
            return max(0, near + far * self._every) * self._block_size

    def _use(self, block: Hashable) -> None:
        if self._now + 1 >= len(self._tree):
            self._renumber()
        place = self._places.pop(block, None)
        if place is not None:
            self._count(place, -1)
        elif len(self._places) >= self._max_blocks:
            self._count(self._places.pop(next(iter(self._places))), -1)
        self._places[block] = self._now
        self._count(self._now, 1)
        self._now += 1

    def _renumber(self) -> None:
        """Close the gaps between the times of use, and make room for as many again."""
        self._places = {block: time for time, block in enumerate(self._places)}
        self._now = len(self._places)
        size = max(1024, 2 * self._now)
        self._tree = [0, *([1] * self._now), *([0] * (size - self._now))]
        for place in range(1, size + 1):
            above = place + (place & -place)
            if above <= size:
                self._tree[above] += self._tree[place]

    def _count(self, place: int, change: int) -> None:
        place += 1
        while place < len(self._tree):
            self._tree[place] += change
            place += place & -place

    def _sum(self, place: int) -> int:
        """Blocks used before `place`."""
        total = 0
        while place > 0:
            total += self._tree[place]
            place -= place & -place
        return total
