"""Which block goes first: a policy sorts nodes into levels and gives each a key (smallest goes first).

Knows use counts, ages and sizes, and remembers blocks that left. Knows nothing of locks or of how blocks are freed.

Ages are counted in turnovers (slots written since the last use / slots in the pool), so that a flood of new prompts
looks the same whether it takes a second or a day.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import log2
from operator import truediv
from typing import NamedTuple

from kvreuse.cache.hashing import HASH_BYTES
from kvreuse.cache.node import Node
from kvreuse.errors import ConfigError
from kvreuse.types import MissReason

__all__ = ["POLICIES", "Policy", "make_policy"]

_MAX_GHOSTS = 131_072
_GHOSTS_PER_BLOCK = 16  # what returns after more turnovers is taken for new


class Ghost(NamedTuple):
    """What is remembered of a block that left. The rest: as in the node it was in."""

    reason: MissReason
    num_uses: int
    level: int
    last_turnover: float


class Policy:
    """The least recently used goes first; also what all policies have in common.

    Of one level either the node that was used first or the one that was used last goes. margin: the first of all goes
    unless another's key is smaller by more. Of a node: num_uses, level (when it was last used), last_used_s and
    last_turnover (when that was).

    Called under the bucket lock of the node or under the structure lock; counts that threads lose to each other are few
    and only make the policy learn a little slower.
    """

    margin = 0.0

    def __init__(
        self, weights: tuple[float, float], *, num_slots: int, num_blocks: int, clock: Callable[[], float]
    ) -> None:
        """weights: of frequency and recency. num_slots, num_blocks: in the pool."""
        del weights
        self.num_written_slots = 0
        self._num_slots = num_slots
        self._clock = clock
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self._max_ghosts = min(_MAX_GHOSTS, _GHOSTS_PER_BLOCK * num_blocks)

    def level(self, num_uses: int) -> int:
        del num_uses
        return 0

    def keys(self, nodes: Sequence[Node]) -> list[float]:
        """What each is worth at this moment."""
        return [node.last_used_s for node in nodes]

    def stored(self, level: int, num_blocks: int) -> None:
        """So many blocks are on that level now."""

    def reused(self, level: int, age: float, num_blocks: int) -> None:
        """Blocks of that level were asked for, `age` turnovers after their last use, whether they were still here."""

    @property
    def turnover(self) -> float:
        """How often the pool was written over."""
        return self.num_written_slots / self._num_slots

    def touch(self, node: Node) -> None:
        """A request that used it ends at this moment, not a new use. Called from its last node to its first."""
        self._stamp(node)

    def begin(self, node: Node, *, num_uses: int) -> None:
        node.num_uses, node.level = num_uses, self.level(num_uses)
        self._stamp(node)

    def _stamp(self, node: Node) -> None:
        node.last_used_s, node.last_turnover = self._clock(), self.turnover

    def reuse(self, node: Node) -> None:
        """A match goes through it."""
        self.reused(node.level, self.turnover - node.last_turnover, node.num_blocks)
        self.begin(node, num_uses=node.num_uses + 1)
        self.stored(node.level, node.num_blocks)

    def remember(self, node: Node, hashes: bytes, reason: MissReason) -> None:
        """These blocks of the node left."""
        ghost = Ghost(reason, node.num_uses, node.level, node.last_turnover)
        for start in range(0, len(hashes), HASH_BYTES):
            self._ghosts[hashes[start : start + HASH_BYTES]] = ghost
            if len(self._ghosts) > self._max_ghosts:
                self._ghosts.popitem(last=False)

    def reason(self, block_hash: bytes) -> MissReason | None:
        """Why a block left; None when it is not known to have been here."""
        ghost = self._ghosts.get(block_hash)
        return ghost.reason if ghost else None

    def returns(self, block_hash: bytes) -> int:
        """A block is stored that may have been here before: how many uses it has with this one."""
        ghost = self._ghosts.pop(block_hash, None)
        if ghost is None:
            return 1
        self.reused(ghost.level, self.turnover - ghost.last_turnover, 1)
        return ghost.num_uses + 1


class LFU(Policy):
    """The one with the fewest uses goes first, of these the least recently used."""

    def level(self, num_uses: int) -> int:
        return min(num_uses, 63)

    def keys(self, nodes: Sequence[Node]) -> list[float]:
        return [node.level for node in nodes]


class SizeWeightedLRU(Policy):
    """The one goes first whose slots promise the fewest hits: value = hits soon / (slots x time until then).

    How soon the blocks of a level come again is learned from what happens to them, evicted ones included. The value of
    age a is the best over all horizons T of (hits in [a, T) / time spent in [a, T)): Gittins' index of a block that may
    be given up at any time (Gittins 1979); learned hit densities as in LHD (Beckmann 2018), whose classes are its ages
    too. Recomputing costs about the same per byte everywhere, so it cancels out.

    Who asks for little more than is known is likelier to be back than who brings a long new text. So each level has
    kinds, by how many new blocks came with the last request through a block. They share the hits by age of the level,
    which are too few to tell them apart by kind, and each has a factor: its share of returns over that of the level.

    On traffic whose prompts return soon or never the value falls with age: least recently used goes first. Where they
    return after more turnovers than the pool has, the newest go first and some of the older survive to be hit.

    weights: how much the learned value counts, and how sure it must be to overrule the order of last use.
    """

    # Levels for 1, 2, 3, 4-5, 6-8, 9-13 and more uses, each of so many kinds.
    _LEVEL_OF = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 6)
    # Kind 0 is in use now; the others by new blocks of the request / those of a usual one: up to 1/4, 1, 4, and more.
    _NEW_BLOCKS = (0.25, 1.0, 4.0)
    _NUM_KINDS, _NUM_LEVELS = 5, 7 * 5
    _USUAL_OF_REQUESTS = 256
    # Ages are told apart in octaves, [0, 1/8), [1/8, 1/4) ... turnovers; what was not used for 64 is forgotten.
    _NUM_AGES = 11
    _FIRST_AGE = 1 / 8
    _FORGOTTEN = -1e9
    # Known before anything is learned: the fate of so many blocks (a share of the pool, but not fewer than that), with
    # so many hits per turnover, 2 ** -slope times as many with every octave of age.
    _PRIOR_POOLS = 1 / 8
    _MIN_PRIOR_BLOCKS = 64.0
    _KNOWN_RETURNS = 1 / 8  # so many of them returned, of every kind as they should
    _PRIOR_HITS = 0.7
    _PRIOR_SLOPE = 0.6
    # So many times more is expected of a level than was seen of the one below, until it shows by itself.
    _LEVEL_GAIN = 3.0
    _UPDATES_PER_TURNOVER = 16
    _HALF_LIFE_TURNOVERS = 32.0
    # log2 of how many times smaller the value must be than that of the least recently used: noise is about so large.
    _MARGIN = 0.3
    _SIZE_EXPONENT = 0.05

    def __init__(
        self, weights: tuple[float, float], *, num_slots: int, num_blocks: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(weights, num_slots=num_slots, num_blocks=num_blocks, clock=clock)
        self._by_value = weights[0] / 0.3
        self.margin = self._MARGIN * weights[1] / 0.7
        self._widths = [self._FIRST_AGE] + [self._FIRST_AGE * 2**age for age in range(self._NUM_AGES - 1)]
        self._num_known = max(self._PRIOR_POOLS * num_blocks, self._MIN_PRIOR_BLOCKS)
        self._num_stored = [0.0] * self._NUM_LEVELS  # in kind 0 all, when the use began; in the others when it ended
        self._hits = [[0.0] * self._NUM_AGES for _ in range(self._NUM_LEVELS)]
        self._num_new, self._usual_new = 0, 1.0
        self._next_update = 0.0
        self._values: list[list[float]] = []

    def level(self, num_uses: int) -> int:
        return self._LEVEL_OF[min(num_uses, len(self._LEVEL_OF) - 1)] * self._NUM_KINDS

    def stored(self, level: int, num_blocks: int) -> None:
        self._num_stored[level] += num_blocks

    def reused(self, level: int, age: float, num_blocks: int) -> None:
        self._hits[level][self._age_class(age)] += num_blocks

    def touch(self, node: Node) -> None:
        super().touch(node)
        self._num_new += node.num_blocks * (node.num_uses == 1)
        node.level = self.level(node.num_uses) + 1 + bisect_left(self._NEW_BLOCKS, self._num_new / self._usual_new)
        self.stored(node.level, node.num_blocks)
        if node.depth == 0:
            self._usual_new += (max(self._num_new, 1) - self._usual_new) / self._USUAL_OF_REQUESTS
            self._num_new = 0

    def keys(self, nodes: Sequence[Node]) -> list[float]:
        now = self.turnover
        if now >= self._next_update:
            self._learn()
            self._next_update = now + 1 / self._UPDATES_PER_TURNOVER
        values, age_class, exponent = self._values, self._age_class, self._SIZE_EXPONENT
        # Sizes in bytes of hashes: only differences of keys count.
        return [values[n.level][age_class(now - n.last_turnover)] - exponent * log2(len(n.hashes)) for n in nodes]

    def _age_class(self, age: float) -> int:
        return min(int(age / self._FIRST_AGE).bit_length(), self._NUM_AGES - 1)

    def _learn(self) -> None:
        """Values of all levels and ages from what was counted; old counts fade."""
        self._values = []
        expected = [self._PRIOR_HITS * 2.0 ** (-self._PRIOR_SLOPE * age) for age in range(self._NUM_AGES)]
        for first in range(0, self._NUM_LEVELS, self._NUM_KINDS):
            hits = [sum(column) for column in zip(*self._hits[first : first + self._NUM_KINDS], strict=True)]
            times = self._times(self._num_stored[first], hits)
            more = [n + self._num_known * width * e for n, width, e in zip(hits, self._widths, expected, strict=True)]
            values = self._best(more, times)
            self._values += [[self._by_value * (value + factor) for value in values] for factor in self._factors(first)]
            expected = [self._LEVEL_GAIN * num / time for num, time in zip(more, times, strict=True)]
        fade = 0.5 ** (1 / self._UPDATES_PER_TURNOVER / self._HALF_LIFE_TURNOVERS)
        self._num_stored = [num * fade for num in self._num_stored]
        self._hits = [[num * fade for num in hits] for hits in self._hits]

    def _factors(self, first: int) -> list[float]:
        """log2 of how many times more blocks of each kind return than of all kinds of the level; of kind 0 unknown."""
        kinds, known = slice(first + 1, first + self._NUM_KINDS), self._KNOWN_RETURNS * self._num_known
        back, left = [sum(hits) for hits in self._hits[kinds]], self._num_stored[kinds]
        share = sum(back) / max(sum(left), 1.0)
        return [0.0, *(log2((num + known) / (n * share + known)) for num, n in zip(back, left, strict=True))]

    def _times(self, num_stored: float, hits: list[float]) -> list[float]:
        """Blocks x turnovers spent at each age: by what is known at first, and by all that had not been hit before."""
        left = accumulate((-num for num in hits), initial=num_stored)
        return [(max(n - h / 2, 0.0) + self._num_known) * w for n, h, w in zip(left, hits, self._widths, strict=False)]

    def _best(self, hits: list[float], times: list[float]) -> list[float]:
        """log2 of the value at each age: the most hits per time up to any age behind it."""
        sums = [(accumulate(hits[age:]), accumulate(times[age:])) for age in range(self._NUM_AGES - 1)]
        return [*(log2(max(map(truediv, *hits_and_times))) for hits_and_times in sums), self._FORGOTTEN]


POLICIES: dict[str, type[Policy]] = {"lru": Policy, "lfu": LFU, "size_weighted_lru": SizeWeightedLRU}


def make_policy(
    name: str, weights: tuple[float, float], *, num_slots: int, num_blocks: int, clock: Callable[[], float]
) -> Policy:
    """The policy of that name. Raises ConfigError for an unknown name or weights that cannot order anything."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    if min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(f"lru_weights must not be negative nor both zero, got {weights}")
    return POLICIES[name](weights, num_slots=num_slots, num_blocks=num_blocks, clock=clock)
