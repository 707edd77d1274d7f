"""A tier that keeps the books of its storage: room is booked before a write, the least recently used entries leave.

A put has two phases: room is booked, so that the cap holds at every instant, then the content is written and published.
A load has two phases: the entry is pinned, then read and verified. Storage is never touched under the lock, so `find`
never waits for it. Bytes count until the storage says that they are gone. Knows blocks, bytes and recency. How a block
is kept is the subclass's: four small hooks that may raise one of `faults`.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvreuse.kv.tiers.base import FAULT, StorageTier, TierUsage
from kvreuse.kv.tiers.block import Block

__all__ = ["BookedTier", "Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that the storage held already. tenant: None when only its content would tell."""

    key: bytes
    num_bytes: int
    tenant: str | None


class _State(Enum):
    WRITING = auto()
    UNWANTED = auto()  # dropped while it was written
    READY = auto()
    LEAVING = auto()  # one thread removes it
    STUCK = auto()  # it could not be removed; to be tried again


_CLAIMABLE = {_State.READY, _State.WRITING, _State.STUCK}


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    tenant: str | None
    state: _State = _State.WRITING
    num_pins: int = 0


class BookedTier(StorageTier):
    """See the module."""

    def __init__(self, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_bytes=max_bytes, clock=clock)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._tenant_bytes: Counter[str] = Counter()
        self._has_stuck = False
        self._is_open = False
        self._opening = threading.Lock()

    # -- what a subclass brings -------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> Iterable[Found]:
        """Take the storage over; what it holds, least recently used first. Tried again after a fault."""

    @abstractmethod
    def _write(self, block: Block) -> None:
        """Store and publish at once or not at all."""

    @abstractmethod
    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        """The verified block; no token_bytes: whatever its tokens. Raises BadEntry, or KeyError when it is gone."""

    @abstractmethod
    def _delete(self, key: bytes) -> None:
        """Remove it and what a failed write left; nothing happens when it is gone already."""

    def _size(self, block: Block) -> int:
        """Bytes that an entry takes."""
        return block.num_bytes

    # -- for callers ------------------------------------------------------------------------------

    def put(self, block: Block, *, on_evict: Callable[[Block], None] | None = None) -> bool:
        if not self.open():
            return False
        if self._has_stuck:
            self._has_stuck = False
            self._drop(lambda entry: entry.state is _State.STUCK)
        with self._lock:
            known = self._entries.get(block.key)
            if known is not None:
                self._entries.move_to_end(block.key)
                return known.state is _State.READY
        entry = _Entry(self._size(block), block.tenant)
        if not self._book(block.key, entry, on_evict):
            return False
        is_stored = self._try(lambda: self._write(block)) is not FAULT
        with self._lock:
            is_ready = is_stored and entry.state is _State.WRITING
            entry.state = _State.READY if is_ready else _State.LEAVING
            self._counts["puts"] += is_ready
        if not is_ready:
            self._remove(block.key, entry)
        return is_ready

    def find(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            if not self.is_healthy:
                return 0
            for number, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is None or entry.state is not _State.READY:
                    return number
            return len(keys)

    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        run = []
        for key, tokens in zip(keys, token_bytes, strict=True):
            block = self._load(key, tokens)
            if block is None:
                break
            run.append(block)
        return run

    def discard(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.get(key)
            ours = self._claim([(key, entry)]) if entry is not None else []
        self._remove_all(ours)

    def purge(self, tenant: str | None) -> int:
        return self._drop(lambda entry: tenant is None or entry.tenant == tenant)

    def usage(self) -> TierUsage:
        with self._lock:
            tenants = dict(self._tenant_bytes)
            return self._usage(num_entries=len(self._entries), num_bytes=self._num_bytes, tenant_bytes=tenants)

    def check_integrity(self) -> None:
        with self._lock:
            assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values())
            assert self._num_bytes <= self.max_bytes
            assert sum(self._tenant_bytes.values()) <= self._num_bytes
            assert all(entry.num_pins >= 0 for entry in self._entries.values())

    def open(self) -> bool:
        """Take over what the storage holds. False: not now; the next put tries again."""
        if self._is_open:
            return self.is_healthy
        if not self.is_healthy or not self._opening.acquire(blocking=False):
            return False
        try:
            found = self._try(lambda: list(self._open()))
            if found is FAULT:
                return False
            with self._lock:
                for item in found:
                    if item.key not in self._entries:
                        entry = self._entries[item.key] = _Entry(item.num_bytes, item.tenant, _State.READY)
                        self._account(entry, entry.num_bytes)
                too_much = self._claim_victims(self._num_bytes - self.max_bytes)
            self._remove_all(too_much)
            self._is_open = self._num_bytes <= self.max_bytes
            return self._is_open
        finally:
            self._opening.release()

    # -- inside -----------------------------------------------------------------------------------

    def _load(self, key: bytes, token_bytes: bytes) -> Block | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state is not _State.READY or not self.is_healthy:
                self._counts["misses"] += 1
                return None
            entry.num_pins += 1
            self._entries.move_to_end(key)
        try:
            block = self._try(lambda: self._read(key, token_bytes), key=key)
        finally:
            with self._lock:
                entry.num_pins -= 1
        self._count("misses" if block is FAULT else "hits")
        return None if block is FAULT else block

    def _book(self, key: bytes, entry: _Entry, on_evict: Callable[[Block], None] | None) -> bool:
        """Account for an entry that will be written, after the least recently used ones that it needs gone are gone."""
        while self.is_healthy:
            with self._lock:
                if key in self._entries:
                    return False
                lacking = self._num_bytes + entry.num_bytes - self.max_bytes
                if lacking <= 0:
                    self._entries[key] = entry
                    self._account(entry, entry.num_bytes)
                    return True
                victims = self._claim_victims(lacking)
            if not victims:
                return False
            for victim_key, victim in victims:
                evicted = self._try(lambda k=victim_key: self._read(k, b"")) if on_evict else FAULT  # type: ignore[misc]
                self._remove(victim_key, victim)
                self._count("evicted")
                if on_evict is not None and evicted is not FAULT:
                    on_evict(evicted)
        return False

    def _claim_victims(self, num_bytes: int) -> list[tuple[bytes, _Entry]]:
        """Entries that together free num_bytes, hidden from now on; none when there are not enough."""
        victims = []
        for key, entry in self._entries.items():
            if num_bytes <= 0:
                break
            if entry.state in (_State.READY, _State.STUCK) and not entry.num_pins:
                victims.append((key, entry))
                num_bytes -= entry.num_bytes
        if num_bytes > 0:
            return []
        for _, entry in victims:
            entry.state = _State.LEAVING
        return victims

    def _drop(self, is_meant: Callable[[_Entry], bool]) -> int:
        with self._lock:
            meant = [item for item in self._entries.items() if item[1].state in _CLAIMABLE and is_meant(item[1])]
            ours = self._claim(meant)
        self._remove_all(ours)
        return len(meant)

    def _claim(self, meant: list[tuple[bytes, _Entry]]) -> list[tuple[bytes, _Entry]]:
        """What the caller must remove now: what is being written its writer removes, what leaves already is left."""
        ours = [(key, entry) for key, entry in meant if entry.state in (_State.READY, _State.STUCK)]
        for _, entry in meant:
            if entry.state in _CLAIMABLE:
                entry.state = _State.UNWANTED if entry.state is _State.WRITING else _State.LEAVING
        return ours

    def _remove_all(self, claimed: Iterable[tuple[bytes, _Entry]]) -> None:
        for key, entry in claimed:
            self._remove(key, entry)

    def _remove(self, key: bytes, entry: _Entry) -> None:
        """Delete what is hidden already; its bytes count until it is gone."""
        is_gone = self._try(lambda: self._delete(key)) is not FAULT
        with self._lock:
            if is_gone:
                del self._entries[key]
                self._account(entry, -entry.num_bytes)
            else:
                entry.state, self._has_stuck = _State.STUCK, True

    def _account(self, entry: _Entry, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if entry.tenant is not None:
            self._tenant_bytes[entry.tenant] += num_bytes
            if not self._tenant_bytes[entry.tenant]:
                del self._tenant_bytes[entry.tenant]
