"""Which block goes first: an eviction policy is a sort key (smallest first), and a memory of what was evicted.

Knows use counts, times and sizes. Knows nothing of the tree, of locks or of how blocks are freed.

Time is counted twice: in seconds, and in turnovers (slots written since the start / slots in the pool), so that a flood
of new prompts looks the same whether it takes a second or a day.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import log2
from typing import NamedTuple, Protocol

from kvreuse.errors import ConfigError
from kvreuse.types import MissReason

__all__ = ["POLICIES", "RETURN_CREDIT", "Ghost", "GhostHistory", "SortKey", "Usable", "make_policy", "touch"]

# Uses fade: a use counts half after this many turnovers.
FREQUENCY_HALF_LIFE = 8.0
# Every doubling of the uses beyond two is worth this many turnovers without any use, before the weights. (More protects
# templates from longer floods; less lets go of finished conversations sooner.)
DOUBLING_TURNOVERS = 8.0
# Every doubling of a node's size costs this many.
SIZE_TURNOVERS = 0.05
# What a block is credited when it returns after its eviction. Much more makes thrashing feed itself.
RETURN_CREDIT = 0.25


class Usable(Protocol):
    """What a policy may look at."""

    last_used_s: float
    last_turnover: float
    frequency: float

    @property
    def num_blocks(self) -> int: ...


SortKey = Callable[[Usable], tuple[float, float]]


def touch(entry: Usable, *, now: float, turnover: float, uses: float) -> None:
    """Record new uses at this moment (0 = still in use, not a new one)."""
    if uses:
        entry.frequency = uses + entry.frequency * 0.5 ** ((turnover - entry.last_turnover) / FREQUENCY_HALF_LIFE)
    entry.last_used_s = now
    entry.last_turnover = turnover


def _lru(weights: tuple[float, float]) -> SortKey:
    del weights
    return lambda entry: (entry.last_used_s, 0.0)


def _lfu(weights: tuple[float, float]) -> SortKey:
    del weights
    return lambda entry: (entry.frequency, entry.last_used_s)


def _size_weighted_lru(weights: tuple[float, float]) -> SortKey:
    """Value per byte = recompute time saved x expected reuse / bytes, plus an age that every later write outruns.

    The additive age makes keys comparable for ever without rewriting them (as in GreedyDual-Size-Frequency,
    Cherkasova 1998). Recompute time per byte is nearly constant; what a hit saves beyond it (fixed costs of a request)
    weighs more in a small node, hence the size term. Two uses are no habit: every conversation has a second turn.
    """
    by_frequency, by_recency = weights

    def key(entry: Usable) -> tuple[float, float]:
        habit = by_frequency * DOUBLING_TURNOVERS * (log2(max(entry.frequency, 2.0)) - 1.0)
        age = by_recency * entry.last_turnover
        return age + habit - SIZE_TURNOVERS * log2(entry.num_blocks), entry.last_used_s

    return key


POLICIES: dict[str, Callable[[tuple[float, float]], SortKey]] = {
    "lru": _lru,
    "lfu": _lfu,
    "size_weighted_lru": _size_weighted_lru,
}


def make_policy(name: str, *, lru_weights: tuple[float, float]) -> SortKey:
    """The sort key of that name. Raises ConfigError for an unknown name or weights that cannot order anything."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    if min(lru_weights) < 0 or sum(lru_weights) <= 0:
        raise ConfigError(f"lru_weights must not be negative nor both zero, got {lru_weights}")
    return POLICIES[name](lru_weights)


class Ghost(NamedTuple):
    """What is remembered of a block that left."""

    reason: MissReason
    frequency: float


class GhostHistory:
    """The last `max_entries` blocks that left: says why a block is missing, and that a returning one is reused."""

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
