"""The byte budget of the prefix store: who may take how much, and who has to go for it.

Knows bytes, buckets and a sort key. Knows nothing of tensors or of matching. Lock order: the room, then one bucket.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvreuse.cache.policy import SortKey
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import free_bytes
from kvreuse.kv.prefix_index import Bucket, Entry

__all__ = ["Grant", "Room", "memory_cap"]

_DEFAULT_MEMORY_RATIO = 0.4


@dataclass(slots=True)
class Grant:
    """Room for `count` pieces, of which the holder sets how many he used."""

    count: int
    num_used: int = 0


class Room:
    """Never books more than max_bytes. `oldest_s` tells the time before which an entry's last use makes it expired."""

    def __init__(
        self, buckets: Sequence[Bucket], *, max_bytes: int, sort_key: SortKey, oldest_s: Callable[[], float]
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.num_evicted = 0
        self.num_expired = 0
        self._written_bytes = 0
        self._buckets = buckets
        self._sort_key = sort_key
        self._oldest_s = oldest_s
        self._lock = threading.Lock()

    @property
    def turnover(self) -> float:
        """How often the whole budget has been written."""
        return self._written_bytes / self.max_bytes

    @contextmanager
    def reserved(self, wanted: int, unit: int, *, keep: Sequence[Entry] = ()) -> Iterator[Grant]:
        """Book up to `wanted` pieces of `unit` bytes, evicting if need be; what is not used is given back at the end.

        `keep` is not evicted for it, and nothing is for pieces that would not fit into an empty store.
        """
        wanted = min(wanted, self.max_bytes // unit)
        with self._lock:
            self._evict_down_to(self.max_bytes - wanted * unit, keep=keep)
            grant = Grant(min(wanted, (self.max_bytes - self.used_bytes) // unit))
            self.used_bytes += grant.count * unit
        try:
            yield grant
        finally:
            with self._lock:
                self.used_bytes -= (grant.count - grant.num_used) * unit
                self._written_bytes += grant.num_used * unit

    def drop(self, bucket: Bucket, condition: Callable[[Entry], bool], *, expired: bool) -> None:
        """Remove what meets the condition, see `Bucket.remove_where`."""
        with self._lock:
            with bucket.lock:
                dropped = bucket.remove_where(condition)
            self.used_bytes -= sum(entry.num_bytes for entry in dropped)
            self.num_expired += len(dropped) if expired else 0

    def _evict_down_to(self, target: int, *, keep: Sequence[Entry]) -> None:
        """Expired entries go first, then as the policy sorts, children before parents. Stops as soon as it may."""
        if self.used_bytes <= target:
            return
        kept, oldest_s = {id(entry) for entry in keep}, self._oldest_s()
        heap = []
        for number, bucket in enumerate(self._buckets):
            with bucket.lock:
                heap += [self._ranked(entry, number) for entry in bucket.entries() if not entry.num_children]
        heapq.heapify(heap)
        while heap and self.used_bytes > target:
            number, entry = heapq.heappop(heap)[-2:]
            bucket, parent = self._buckets[number], entry.parent
            with bucket.lock:
                if id(entry) in kept or not bucket.remove(entry):
                    continue
                if parent is not None and not parent.num_children:
                    heapq.heappush(heap, self._ranked(parent, number))
            self.used_bytes -= entry.num_bytes
            is_expired = entry.last_used_s < oldest_s
            self.num_expired += is_expired
            self.num_evicted += not is_expired

    def _ranked(self, entry: Entry, number: int) -> tuple[bool, tuple[float, float], int, int, int, Entry]:
        # The deeper block of two equals goes first; id() only keeps entries from being compared.
        is_alive = entry.last_used_s >= self._oldest_s()
        return is_alive, self._sort_key(entry), -entry.num_tokens, id(entry), number, entry


def memory_cap(max_bytes: int | None, memory_ratio: float | None, device: torch.device) -> int:
    """The budget in bytes: as given, or a share of what is free on the device. Raises ConfigError when out of range."""
    if max_bytes is not None and memory_ratio is not None:
        raise ConfigError("give max_bytes or memory_ratio, not both")
    if max_bytes is not None:
        if max_bytes < 1:
            raise ConfigError(f"max_bytes must be positive, not {max_bytes}")
        return max_bytes
    ratio = _DEFAULT_MEMORY_RATIO if memory_ratio is None else memory_ratio
    if not 0 < ratio < 1:
        raise ConfigError(f"memory_ratio must lie between 0 and 1, not {ratio}")
    return int(free_bytes(device) * ratio)
