"""What every tier below the pool does: book room, evict, publish, pin, load, quarantine, survive its storage.

Knows blocks, bytes and recency. How a block is kept is the subclass's: four small hooks that may raise OSError.

A put has two phases: room is booked first, so that the cap holds at every instant, then the content is written and
published. A load has two phases: the entry is pinned, then read and verified. Storage is never touched under the lock,
so `find` never waits for it. No fault of the storage reaches a caller: it is counted, the tier rests for a while and
then tries again by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvreuse.kv.tiers.block import Block
from kvreuse.types import Tier

__all__ = ["BadEntry", "StorageTier", "TierUsage"]

log = logging.getLogger("kvreuse.tiers")

REST_S = 5.0


class BadEntry(Exception):
    """An entry that is not what its name says: short, flipped, foreign, of another version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUsage:
    """A moment of one tier, in entries and bytes; the rest counts since start."""

    num_entries: int
    num_bytes: int
    max_bytes: int
    is_healthy: bool
    num_hits: int
    num_misses: int
    num_puts: int
    num_evicted: int
    num_corrupt: int
    num_errors: int
    tenant_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    tenant: str
    is_published: bool = False  # False while it is written and while it is removed
    is_unwanted: bool = False  # discarded while it was written
    num_pins: int = 0


class StorageTier(ABC):
    """Thread-safe. `max_bytes` bounds what is stored and what is being written, overhead of entries included."""

    tier: Tier

    def __init__(self, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._rests_until_s = 0.0

    # -- what a subclass brings; each may raise OSError -------------------------------------------

    @abstractmethod
    def _write(self, block: Block) -> None:
        """Store and publish at once or not at all."""

    @abstractmethod
    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        """The verified block. Raises BadEntry, or KeyError when it is not there."""

    @abstractmethod
    def _delete(self, key: bytes) -> None:
        """Remove it; nothing happens when it is gone already."""

    def _overhead(self, block: Block) -> int:
        """Bytes that an entry takes beside its payload."""
        return 0

    # -- for callers ------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the storage is tried at all: not for a while after a fault."""
        return self._clock() >= self._rests_until_s

    def put(self, block: Block, *, on_evict: Callable[[Block], None] | None = None) -> bool:
        """Store a block. False when it does not fit or the storage fails. on_evict gets what left to make room."""
        entry = _Entry(block.num_bytes + self._overhead(block), block.tenant)
        with self._lock:
            if block.key in self._entries:
                self._entries.move_to_end(block.key)
                return True
        if not self.is_healthy or not self._book(block.key, entry, on_evict):
            return False
        is_stored = self._guard(lambda: self._write(block)) is not _FAULT
        with self._lock:
            entry.is_published = is_stored and not entry.is_unwanted
            self._counts["puts"] += entry.is_published
        if not entry.is_published:
            self._remove(block.key, entry)
        return entry.is_published

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here. No I/O."""
        with self._lock:
            if not self.is_healthy:
                return 0
            for number, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is None or not entry.is_published:
                    return number
            return len(keys)

    def load(self, key: bytes, *, token_bytes: bytes) -> Block | None:
        """The block, verified, or None. A bad entry is dropped and counted."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_published or not self.is_healthy:
                self._counts["misses"] += 1
                return None
            entry.num_pins += 1
            self._entries.move_to_end(key)
        try:
            block = self._guard(lambda: self._read(key, token_bytes), key=key)
        finally:
            with self._lock:
                entry.num_pins -= 1
        self._counts["misses" if block is _FAULT else "hits"] += 1
        return block if isinstance(block, Block) else None

    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are here and good."""
        run = []
        for key, tokens in zip(keys, token_bytes, strict=True):
            block = self.load(key, token_bytes=tokens)
            if block is None:
                break
            run.append(block)
        return run

    def discard(self, key: bytes) -> None:
        """Drop one entry."""
        self._drop_all(lambda k, entry: k == key)

    def purge(self, tenant: str | None) -> int:
        """Drop what belongs to `tenant`, or everything; returns entries."""
        return self._drop_all(lambda key, entry: tenant is None or entry.tenant == tenant)

    def usage(self) -> TierUsage:
        with self._lock:
            tenants: Counter[str] = Counter()
            for entry in self._entries.values():
                tenants[entry.tenant] += entry.num_bytes
            counts = {f"num_{n}": self._counts[n] for n in ("hits", "misses", "puts", "evicted", "corrupt", "errors")}
            return TierUsage(
                num_entries=len(self._entries),
                num_bytes=self._num_bytes,
                max_bytes=self.max_bytes,
                is_healthy=self.is_healthy,
                tenant_bytes=dict(tenants),
                **counts,
            )

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts disagree."""
        with self._lock:
            assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values())
            assert self._num_bytes <= self.max_bytes

    def close(self) -> None:  # noqa: B027  # most storages hold nothing open
        """Let go of what the storage holds open."""

    # -- inside -----------------------------------------------------------------------------------

    def _book(self, key: bytes, entry: _Entry, on_evict: Callable[[Block], None] | None) -> bool:
        """Account for an entry that will be written, after evicting the least recently used ones that it needs gone."""
        while True:
            with self._lock:
                if key in self._entries:
                    return False
                free = self.max_bytes - self._num_bytes
                if free >= entry.num_bytes:
                    self._entries[key] = entry
                    self._num_bytes += entry.num_bytes
                    return True
                victims = self._claim_victims(entry.num_bytes - free)
            if not victims:
                return False
            for victim_key, victim in victims:
                evicted = self._guard(lambda k=victim_key: self._read(k, b"")) if on_evict else None  # type: ignore[misc]
                self._remove(victim_key, victim)
                self._counts["evicted"] += 1
                if on_evict is not None and isinstance(evicted, Block):
                    on_evict(evicted)

    def _claim_victims(self, num_bytes: int) -> list[tuple[bytes, _Entry]]:
        """Entries that together free num_bytes, hidden from now on; none when there are not enough."""
        victims = []
        for key, entry in self._entries.items():
            if num_bytes <= 0:
                break
            if entry.is_published and not entry.num_pins:
                victims.append((key, entry))
                num_bytes -= entry.num_bytes
        if num_bytes > 0:
            return []
        for _, entry in victims:
            entry.is_published = False
        return victims

    def _drop_all(self, is_meant: Callable[[bytes, _Entry], bool]) -> int:
        with self._lock:
            meant = [(key, entry) for key, entry in self._entries.items() if is_meant(key, entry)]
            published = [(key, entry) for key, entry in meant if entry.is_published]
            for _, entry in meant:
                entry.is_unwanted, entry.is_published = True, False
        for key, entry in published:
            self._remove(key, entry)
        return len(meant)

    def _remove(self, key: bytes, entry: _Entry) -> None:
        """Delete what is hidden already; its bytes count until it is gone."""
        self._guard(lambda: self._delete(key))
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                self._num_bytes -= entry.num_bytes

    def _guard(self, work: Callable[[], object], *, key: bytes | None = None) -> object:
        """What `work` gives, or _FAULT: a bad entry is quarantined, a fault of the storage makes the tier rest."""
        try:
            return work()
        except (BadEntry, KeyError) as error:
            self._counts["corrupt" if isinstance(error, BadEntry) else "vanished"] += 1
            if key is not None:
                log.warning("%s tier: entry %s is dropped: %s", self.tier.value, key.hex(), error)
                self.discard(key)
        except OSError as error:
            self._counts["errors"] += 1
            self._rests_until_s = self._clock() + REST_S
            log.warning("%s tier rests for %g s: %s", self.tier.value, REST_S, error.strerror or type(error).__name__)
        return _FAULT


_FAULT = object()
