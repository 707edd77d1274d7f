"""Which block goes first: a policy sorts entries into levels and gives each a key (smallest goes first).

Knows use counts, ages and sizes. Knows nothing of the tree, of locks or of how blocks are freed.

Ages are counted in turnovers (slots written since the last use / slots in the pool), so that a flood of new prompts
looks the same whether it takes a second or a day.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import log2
from typing import NamedTuple, Protocol

from kvreuse.errors import ConfigError
from kvreuse.types import MissReason

__all__ = ["POLICIES", "Ghost", "GhostHistory", "Policy", "Usable", "Uses", "make_policy"]

_MAX_GHOSTS = 131_072
_GHOSTS_PER_BLOCK = 16  # what returns after more turnovers is taken for new


class Usable(Protocol):
    """What a policy may look at. level: that of `Policy.level` when it was last used."""

    num_uses: int
    level: int
    last_used_s: float
    last_turnover: float

    @property
    def num_blocks(self) -> int: ...


class Policy:
    """The least recently used goes first; also what all policies have in common.

    Of one level either the entry that was used first or the one that was used last goes. margin: the first of all goes
    unless another's key is smaller by more.
    """

    margin = 0.0

    def __init__(self, weights: tuple[float, float], *, num_blocks: int) -> None:
        """weights: of frequency and recency. num_blocks: in the pool."""
        del weights
        self.num_blocks = num_blocks

    def level(self, num_uses: int) -> int:
        del num_uses
        return 0

    def key(self, entry: Usable, turnover: float) -> float:
        del turnover
        return entry.last_used_s

    def stored(self, level: int, num_blocks: int) -> None:
        """So many blocks are on that level now."""

    def reused(self, level: int, age: float, num_blocks: int) -> None:
        """Blocks of that level were asked for, `age` turnovers after their last use, whether they were still here."""


class LFU(Policy):
    """The one with the fewest uses goes first, of these the least recently used."""

    def level(self, num_uses: int) -> int:
        return min(num_uses, 63)

    def key(self, entry: Usable, turnover: float) -> float:
        del turnover
        return entry.level


class SizeWeightedLRU(Policy):
    """The one goes first whose slots promise the fewest hits: value = hits soon / (slots x time until then).

    How soon the blocks of a level come again is learned from what happens to them, evicted ones included. The value of
    age a is the best over all horizons T of (hits in [a, T) / time spent in [a, T)): Gittins' index of a block that may
    be given up at any time (Gittins 1979); learned hit densities as in LHD (Beckmann 2018), whose classes are its ages
    too. Recomputing costs about the same per byte everywhere, so it cancels out.

    On traffic whose prompts return soon or never the value falls with age: least recently used goes first. Where they
    return after more turnovers than the pool has, the newest go first and some of the older survive to be hit.

    weights: how much the learned value counts, and how sure it must be to overrule the order of last use.
    """

    # A level for 1, 2, 3, 4-5, 6-8, 9-13 and more uses.
    _LEVEL_OF = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 6)
    _NUM_LEVELS = 7
    # Ages are told apart in octaves, [0, 1/8), [1/8, 1/4) ... turnovers; what was not used for 64 is forgotten.
    _NUM_AGES = 11
    _FIRST_AGE = 1 / 8
    _FORGOTTEN = -1e9
    # Known before anything is learned: the fate of so many blocks (a share of the pool, but not fewer than that), with
    # so many hits per turnover, 2 ** -slope times as many with every octave of age.
    _PRIOR_POOLS = 1 / 8
    _MIN_PRIOR_BLOCKS = 64.0
    _PRIOR_HITS = 0.7
    _PRIOR_SLOPE = 0.6
    # So many times more is expected of a level than was seen of the one below, until it shows by itself.
    _LEVEL_GAIN = 3.0
    _UPDATES_PER_TURNOVER = 16
    _HALF_LIFE_TURNOVERS = 32.0
    # log2 of how many times smaller the value must be than that of the least recently used: noise is about so large.
    _MARGIN = 0.3
    _SIZE_EXPONENT = 0.05

    def __init__(self, weights: tuple[float, float], *, num_blocks: int) -> None:
        super().__init__(weights, num_blocks=num_blocks)
        self._by_value = weights[0] / 0.3
        self.margin = self._MARGIN * weights[1] / 0.7
        self._widths = [self._FIRST_AGE] + [self._FIRST_AGE * 2**age for age in range(self._NUM_AGES - 1)]
        self._num_known = max(self._PRIOR_POOLS * num_blocks, self._MIN_PRIOR_BLOCKS)
        self._num_stored = [0.0] * self._NUM_LEVELS
        self._hits = [[0.0] * self._NUM_AGES for _ in range(self._NUM_LEVELS)]
        self._next_update = 0.0
        self._values: list[list[float]] = []

    def level(self, num_uses: int) -> int:
        return self._LEVEL_OF[min(num_uses, len(self._LEVEL_OF) - 1)]

    def stored(self, level: int, num_blocks: int) -> None:
        self._num_stored[level] += num_blocks

    def reused(self, level: int, age: float, num_blocks: int) -> None:
        self._hits[level][self._age_class(age)] += num_blocks

    def key(self, entry: Usable, turnover: float) -> float:
        if turnover >= self._next_update:
            self._learn()
            self._next_update = turnover + 1 / self._UPDATES_PER_TURNOVER
        value = self._values[entry.level][self._age_class(turnover - entry.last_turnover)]
        return self._by_value * value - self._SIZE_EXPONENT * log2(entry.num_blocks)

    def _age_class(self, age: float) -> int:
        octave = int(age / self._FIRST_AGE).bit_length()
        return octave if octave < self._NUM_AGES else self._NUM_AGES - 1

    def _learn(self) -> None:
        """Values of all levels and ages from what was counted; old counts fade."""
        self._values = []
        expected = [self._PRIOR_HITS * 2.0 ** (-self._PRIOR_SLOPE * age) for age in range(self._NUM_AGES)]
        for stored, hits in zip(self._num_stored, self._hits, strict=True):
            times = self._times(stored, hits)
            more = [
                num + self._num_known * width * e for num, width, e in zip(hits, self._widths, expected, strict=True)
            ]
            self._values.append(self._best(more, times))
            expected = [self._LEVEL_GAIN * num / time for num, time in zip(more, times, strict=True)]
        fade = 0.5 ** (1 / self._UPDATES_PER_TURNOVER / self._HALF_LIFE_TURNOVERS)
        self._num_stored = [num * fade for num in self._num_stored]
        self._hits = [[num * fade for num in hits] for hits in self._hits]

    def _times(self, num_stored: float, hits: list[float]) -> list[float]:
        """Blocks x turnovers spent at each age: by what is known at first, and by all that had not been hit before."""
        times = []
        for num_hits, width in zip(hits, self._widths, strict=True):
            times.append((max(num_stored - num_hits / 2, 0.0) + self._num_known) * width)
            num_stored -= num_hits
        return times

    def _best(self, hits: list[float], times: list[float]) -> list[float]:
        """log2 of the value at each age: the most hits per time up to any age behind it."""
        row = [self._FORGOTTEN] * self._NUM_AGES
        for age in range(self._NUM_AGES - 1):
            best = sum_hits = sum_times = 0.0
            for num_hits, time in zip(hits[age:], times[age:], strict=True):
                sum_hits += num_hits
                sum_times += time
                best = max(best, sum_hits / sum_times)
            row[age] = log2(best)
        return row


POLICIES: dict[str, Callable[..., Policy]] = {
    "lru": Policy,
    "lfu": LFU,
    "size_weighted_lru": SizeWeightedLRU,
}


def make_policy(name: str, *, lru_weights: tuple[float, float], num_blocks: int = 1) -> Policy:
    """The policy of that name. Raises ConfigError for an unknown name or weights that cannot order anything."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    if min(lru_weights) < 0 or sum(lru_weights) <= 0:
        raise ConfigError(f"lru_weights must not be negative nor both zero, got {lru_weights}")
    return POLICIES[name](lru_weights, num_blocks=num_blocks)


class Ghost(NamedTuple):
    """What is remembered of a block that left. The rest: see Usable."""

    reason: MissReason
    num_uses: int
    level: int
    last_turnover: float


class GhostHistory:
    """The last `max_entries` blocks that left: says why a block is missing, and when a returning one was used."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()

    def remember(self, block_hash: bytes, ghost: Ghost) -> None:
        self._ghosts[block_hash] = ghost
        if len(self._ghosts) > self._max_entries:
            self._ghosts.popitem(last=False)

    def get(self, block_hash: bytes) -> Ghost | None:
        return self._ghosts.get(block_hash)

    def forget(self, block_hash: bytes) -> Ghost | None:
        """Drop and return it (it is back in the store)."""
        return self._ghosts.pop(block_hash, None)


class Uses:
    """Tells the policy what is used, and remembers it of blocks that left.

    Called under the bucket lock of the entry or under the structure lock; counts that threads lose to each other are
    few and only make the policy learn a little slower.
    """

    def __init__(self, policy: Policy, *, num_slots: int, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.ghosts = GhostHistory(min(_MAX_GHOSTS, _GHOSTS_PER_BLOCK * policy.num_blocks))
        self.num_written_slots = 0
        self._num_slots = num_slots
        self._clock = clock

    @property
    def turnover(self) -> float:
        """How often the pool was written over."""
        return self.num_written_slots / self._num_slots

    def touch(self, entry: Usable) -> None:
        """It is in use at this moment, which is not a new use."""
        entry.last_used_s, entry.last_turnover = self._clock(), self.turnover

    def reuse(self, entry: Usable) -> None:
        """A match goes through it."""
        self.policy.reused(entry.level, self.turnover - entry.last_turnover, entry.num_blocks)
        self.begin(entry, num_uses=entry.num_uses + 1)
        self.policy.stored(entry.level, entry.num_blocks)

    def begin(self, entry: Usable, *, num_uses: int) -> None:
        entry.num_uses, entry.level = num_uses, self.policy.level(num_uses)
        self.touch(entry)

    def returns(self, block_hash: bytes) -> int:
        """A block is stored that may have been here before: how many uses it has with this one."""
        ghost = self.ghosts.forget(block_hash)
        if ghost is None:
            return 1
        self.policy.reused(ghost.level, self.turnover - ghost.last_turnover, 1)
        return ghost.num_uses + 1

    def key(self, entry: Usable) -> float:
        return self.policy.key(entry, self.num_written_slots / self._num_slots)
