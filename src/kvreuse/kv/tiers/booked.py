"""A tier that keeps the books of its storage: room is made before a write, the least recently used entries leave.

    put:   booked, found by nobody  ->  written and published  ->  found
    drop:  found by nobody          ->  removed                ->  its bytes count no more

So the cap holds at every instant, and what cannot be removed counts until it can. One thread at a time changes the
storage, any number read from it; `find` never waits for either. Knows blocks, bytes and recency. How a block is kept is
the subclass's: four small hooks that may raise one of `faults`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Unpack

from kvreuse.kv.tiers.base import OnEvict, StorageTier, TierOptions
from kvreuse.kv.tiers.entry import Block

__all__ = ["BookedTier", "Entry"]


class Entry(NamedTuple):
    """Of the books. tenant: None when only the content would tell."""

    num_bytes: int
    tenant: str | None


class BookedTier(StorageTier):
    """See the module."""

    is_shared = False  # others write to the storage too: only asking it would tell what is there

    def __init__(self, **options: Unpack[TierOptions]) -> None:
        super().__init__(**options)
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._hidden: dict[bytes, Entry] = {}  # being written, being removed, or not to be removed so far
        self._changing = threading.RLock()  # taken before _lock
        self._is_open = False

    # -- what a subclass brings -------------------------------------------------------------------

    @abstractmethod
    def _listed(self) -> dict[bytes, Entry]:
        """Take the storage over; what it holds, least recently used first. Tried again after a fault."""

    @abstractmethod
    def _write(self, block: Block) -> None:
        """Store and publish at once or not at all."""

    @abstractmethod
    def _delete(self, key: bytes) -> None:
        """Remove it and what a failed write left; nothing happens when it is gone already."""

    def _size(self, block: Block) -> int:
        """Bytes that an entry takes."""
        return block.entry_bytes

    # -- for callers ------------------------------------------------------------------------------

    def put(self, block: Block, *, on_evict: OnEvict | None = None) -> bool:
        with self._changing:
            if not self.open():
                return False
            self._drop(list(self._hidden))
            with self._lock:
                if block.key in self._entries:
                    self._entries.move_to_end(block.key)
                    return True
            entry = Entry(self._size(block), block.tenant)
            if self._hidden or not self._make_room(entry.num_bytes, on_evict):
                return False
            with self._lock:
                self._hidden[block.key] = entry
                self._account(entry, sign=1)
            with self._noting_faults():
                self._write(block)
                with self._lock:
                    self._entries[block.key] = self._hidden.pop(block.key)
                self._count(num_puts=1)
                return True
            self._drop([block.key])
            return False

    def find(self, keys: Sequence[bytes]) -> int:
        if self.is_shared or not self.is_healthy:
            return super().find(keys)
        with self._lock:
            return next((number for number, key in enumerate(keys) if key not in self._entries), len(keys))

    def discard(self, key: bytes) -> None:
        with self._changing:
            if self.is_shared or key in self._entries:
                self._drop([key])

    def purge(self, tenant: str | None) -> int:
        with self._changing:
            keys = self._keys_of(tenant)
            self._drop(keys)
            return len(keys)

    def check_integrity(self) -> None:
        with self._changing, self._lock:
            entries = [*self._entries.values(), *self._hidden.values()]
            assert self._books.num_entries == len(entries)
            assert self._books.num_bytes == sum(entry.num_bytes for entry in entries) <= self.max_bytes
            assert sum(self._books.tenant_bytes.values()) <= self._books.num_bytes

    def open(self) -> bool:
        """Take over what the storage holds. False: not now; the next put tries again."""
        with self._changing:
            if not self._is_open and self.is_healthy:
                with self._noting_faults():
                    found = self._listed()
                    with self._lock:
                        self._entries.update(found)
                        for entry in found.values():
                            self._account(entry, sign=1)
                    self._is_open = True
                    self._make_room(0)
            return self._is_open and self.is_healthy

    # -- inside -----------------------------------------------------------------------------------

    def _load(self, key: bytes, token_bytes: bytes) -> Block | None:
        with self._lock:
            is_known = key in self._entries
            is_hidden = key in self._hidden  # purged, though its storage did not take the order yet
            if is_known:
                self._entries.move_to_end(key)
        if is_hidden or not (is_known or self.is_shared):
            self._count(num_misses=1)
            return None
        return super()._load(key, token_bytes)

    def _read(self, key: bytes, token_bytes: bytes) -> Block | None:
        block = super()._read(key, token_bytes)
        if block is None and key in self._entries:  # somebody else removed it
            self.discard(key)
        return block

    def _make_room(self, num_bytes: int, on_evict: OnEvict | None = None) -> bool:
        """Let the least recently used go until so many bytes are free. False: never, or not now."""
        while self.is_healthy and num_bytes <= self.max_bytes:
            with self._lock:
                if self._books.num_bytes + num_bytes <= self.max_bytes:
                    return True
                oldest = next(iter(self._entries), None)
            if oldest is None:
                return False
            evicted = None
            if on_evict is not None:
                with self._noting_faults():
                    evicted = self._read(oldest, b"")
            self._drop([oldest])
            self._count(num_evicted=1)
            if on_evict is not None and evicted is not None:
                on_evict(evicted)
        return False

    def _keys_of(self, tenant: str | None) -> list[bytes]:
        with self._lock:
            entries = {**self._entries, **self._hidden}
            return [key for key, entry in entries.items() if tenant in (None, entry.tenant)]

    def _drop(self, keys: Sequence[bytes], *, run: Callable[..., Iterable[None]] = map) -> None:
        """Nobody finds them from now on; their bytes count until they are gone. Under _changing."""
        with self._lock:
            self._hidden |= {key: self._entries.pop(key) for key in keys if key in self._entries}
        list(run(self._remove, keys))

    def _remove(self, key: bytes) -> None:
        with self._noting_faults():
            self._delete(key)
            with self._lock:
                entry = self._hidden.pop(key, None)
                if entry is not None:
                    self._account(entry, sign=-1)

    def _account(self, entry: Entry, *, sign: int) -> None:
        """From now on it counts (1), or no more (-1). Under _lock."""
        books, num_bytes = self._books, sign * entry.num_bytes
        books.num_entries += sign
        books.num_bytes += num_bytes
        if entry.tenant is not None:
            left = books.tenant_bytes.pop(entry.tenant, 0) + num_bytes
            if left:
                books.tenant_bytes[entry.tenant] = left
