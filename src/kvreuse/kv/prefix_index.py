"""One bucket of the prefix store: the entries of all prompts that begin with the same block, under one lock.

Knows hashes, token ids and times. Does not look into what an entry holds, and knows nothing of the byte budget.

A block entry holds one whole block of tokens; its parent holds the block before it. A snapshot entry holds a whole
prompt and has neither parent nor children.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Bucket", "Entry"]


@dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """A stored piece. `data` never changes once it is stored, so it may be read without the lock.

    block_hash: chained hash of the last whole block in it.
    token_ids: the ids of the block; of the whole prompt in a snapshot.
    num_tokens: length of the prefix that ends with this entry; num_blocks: whole blocks in the entry itself.
    """

    block_hash: bytes
    token_ids: tuple[int, ...]
    num_tokens: int
    num_bytes: int
    data: Any
    tenant: str
    num_blocks: int = 1
    is_snapshot: bool = False
    needs_single_steps: bool = False
    parent: Entry | None = None
    num_children: int = 0
    # What the eviction policy looks at, see `cache.policy.Usable`.
    last_used_s: float = 0.0
    last_turnover: float = 0.0
    frequency: float = 0.0


class Bucket:
    """Every method is called with `lock` held. Entries last used before `oldest_s` have expired: nobody sees them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_collisions = 0
        self._blocks: dict[bytes, Entry] = {}
        self._snapshots: dict[bytes, list[Entry]] = {}

    def entries(self) -> Iterator[Entry]:
        """All of them, in no order."""
        yield from self._blocks.values()
        for snapshots in self._snapshots.values():
            yield from snapshots

    def chain(self, token_ids: tuple[int, ...], hashes: Sequence[bytes], *, oldest_s: float) -> list[Entry]:
        """The longest run of blocks from position 0 whose hashes AND token ids are those of the prompt."""
        found: list[Entry] = []
        for block_hash in hashes:
            entry = self._blocks.get(block_hash)
            if entry is None or entry.last_used_s < oldest_s:
                break
            parent = found[-1] if found else None
            start = parent.num_tokens if parent else 0
            if entry.parent is not parent or entry.token_ids != token_ids[start : entry.num_tokens]:
                self.num_collisions += 1
                break
            found.append(entry)
        return found

    def extend(self, chain: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
        """Hang new blocks one behind the other at the end of the chain. Returns those that were taken.

        What another thread has stored meanwhile is not taken twice. When the chain's end was evicted meanwhile, or
        something else sits under the same hash, what follows is not taken.
        """
        parent = chain[-1] if chain else None
        if parent is not None and not self._holds(parent):
            return []
        taken = []
        for entry in entries:
            stored = self._blocks.setdefault(entry.block_hash, entry)
            if stored is entry:
                taken.append(entry)
                entry.parent = parent
                if parent is not None:
                    parent.num_children += 1
            elif stored.parent is not parent or stored.token_ids != entry.token_ids:
                self.num_collisions += 1
                break
            parent = stored
        return taken

    def snapshots(self, token_ids: tuple[int, ...], hashes: Sequence[bytes], *, oldest_s: float) -> Iterator[Entry]:
        """Stored prompts that token_ids begins with, or is, longest first."""
        for block_hash in reversed(hashes):
            entries = [entry for entry in self._snapshots.get(block_hash, ()) if entry.last_used_s >= oldest_s]
            for entry in sorted(entries, key=lambda entry: -entry.num_tokens):
                if entry.token_ids == token_ids[: entry.num_tokens]:
                    yield entry

    def add_snapshot(self, entry: Entry) -> None:
        """The caller has seen that the prompt is not there yet."""
        self._snapshots.setdefault(entry.block_hash, []).append(entry)

    def remove(self, entry: Entry) -> bool:
        """False when it has children or is no longer here."""
        if entry.num_children or not self._holds(entry):
            return False
        if not entry.is_snapshot:
            del self._blocks[entry.block_hash]
            if entry.parent is not None:
                entry.parent.num_children -= 1
            return True
        siblings = self._snapshots[entry.block_hash]
        siblings.remove(entry)
        if not siblings:
            del self._snapshots[entry.block_hash]
        return True

    def remove_where(self, condition: Callable[[Entry], bool]) -> list[Entry]:
        """Drop what meets the condition and has no children that do not. Returns what was dropped."""
        doomed = sorted(filter(condition, self.entries()), key=lambda entry: -entry.num_tokens)
        return [entry for entry in doomed if self.remove(entry)]

    def check_integrity(self) -> None:
        """Raises AssertionError when parents and children disagree."""
        num_children = {id(entry): 0 for entry in self._blocks.values()}
        for entry in self._blocks.values():
            if entry.parent is not None:
                if id(entry.parent) not in num_children:
                    raise AssertionError(f"the block that ends at {entry.num_tokens} has lost its parent")
                num_children[id(entry.parent)] += 1
        for entry in self._blocks.values():
            if entry.num_children != num_children[id(entry)]:
                raise AssertionError(f"the block that ends at {entry.num_tokens} miscounts its children")

    def _holds(self, entry: Entry) -> bool:
        if entry.is_snapshot:
            return entry in self._snapshots.get(entry.block_hash, ())
        return self._blocks.get(entry.block_hash) is entry
