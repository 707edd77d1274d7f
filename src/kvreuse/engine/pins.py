"""Pins that outlive a request: prefixes kept from eviction until somebody lets them go.

Knows leases and how many tokens they may hold. Knows nothing of why a prefix is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvreuse.cache.lease import Lease
from kvreuse.cache.store import PrefixCache
from kvreuse.types import Scope

__all__ = ["Pins"]


class Pins:
    """Thread-safe. All pins together hold at most `max_tokens`, so that they cannot take the pool from requests."""

    def __init__(self, cache: PrefixCache, *, max_tokens: int) -> None:
        self._cache = cache
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._pins: set[Lease] = set()

    def pin(self, token_ids: Sequence[int], *, scope: Scope) -> Lease:
        """Keep what is cached of a prefix until `unpin`; what goes beyond max_tokens is not kept."""
        with self._lock:
            room = self._max_tokens - sum(lease.num_committed_tokens for lease in self._pins)
            lease = self._cache.acquire(token_ids[: max(0, room)], scope=scope)
            self._pins.add(lease)
        return lease

    def unpin(self, lease: Lease) -> None:
        """Does nothing the second time."""
        with self._lock:
            self._pins.discard(lease)
        self._cache.release(lease)

    def let_go(self) -> bool:
        """Unpin everything, for a request that could not run otherwise. False: there was nothing."""
        with self._lock:
            pins = list(self._pins)
        for lease in pins:
            self.unpin(lease)
        return any(lease.num_committed_tokens for lease in pins)
