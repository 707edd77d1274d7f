"""A store over a slab that is a plain list, and requests that run without a model.

What a "model" writes for a token depends on everything before it, so a slot that holds the right value proves that the
whole prefix was right.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvreuse.cache.lease import Lease
from kvreuse.cache.store import PrefixCache
from kvreuse.types import Scope

BLOCK = 4
SCOPE = Scope()


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def values(token_ids: Sequence[int], scope: Scope = SCOPE) -> list[tuple[int, int]]:
    """(token, digest of all up to it) for every position."""
    out, digest = [], hash((scope.model, scope.adapter, scope.tenant))
    for token in token_ids:
        digest = hash((digest, token))
        out.append((token, digest))
    return out


class World:
    """A store, its slab and its clock."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = BLOCK, **settings: Any) -> None:
        self.clock = Clock()
        num_slots = num_blocks * block_size
        self.slab: list[Any] = [None] * num_slots
        self.num_copied = 0
        self.cache = PrefixCache(
            num_slots=num_slots,
            block_size=block_size,
            bytes_per_token=10,
            move_slots=self._move,
            clock=self.clock,
            **settings,
        )

    def _move(self, source: int, target: int, length: int) -> None:
        assert length > 0
        self.num_copied += length
        self.slab[target : target + length] = self.slab[source : source + length]

    def prefill(self, lease: Lease, token_ids: Sequence[int], *, commit: bool = True) -> bool:
        """Reserve room for all tokens, write what is not cached, commit. False when there is no room."""
        computed = lease.num_committed_tokens
        if not self.cache.reserve(lease, len(token_ids), num_computed_tokens=computed):
            return False
        self.write(lease, token_ids, begin=computed)
        if commit:
            self.cache.commit(lease, token_ids, num_computed_tokens=len(token_ids))
        self.check_lease(lease, token_ids)
        return True

    def write(self, lease: Lease, token_ids: Sequence[int], *, begin: int) -> None:
        for position, value in enumerate(values(token_ids, lease.scope)[begin:], start=begin):
            assert position >= lease.num_committed_tokens
            self.slab[lease.slot(position)] = value

    def start(self, token_ids: Sequence[int], *, scope: Scope = SCOPE, reuse: bool = True) -> Lease:
        """A request that has computed its prompt and still runs."""
        lease = self.cache.acquire(token_ids, scope=scope, reuse=reuse)
        self.check_lease(lease, token_ids[: lease.num_cached_tokens])
        assert self.prefill(lease, token_ids)
        return lease

    def run(self, token_ids: Sequence[int], *, scope: Scope = SCOPE) -> int:
        """A whole request; returns its cached tokens."""
        with self.start(token_ids, scope=scope) as lease:
            return lease.num_cached_tokens

    def check_lease(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Every slot of the lease holds what a model that computed all of it afresh would have written."""
        slots = [slot for start, length in lease.runs(len(token_ids)) for slot in range(start, start + length)]
        assert [self.slab[slot] for slot in slots] == values(token_ids, lease.scope)
        assert slots == [lease.slot(position) for position in range(len(token_ids))]

    def check(self) -> None:
        """Integrity, and the tokens of every committed block are in its slots."""
        self.cache.check_integrity()
        for node in (node for root in self.cache._tree.roots(None) for node in root.below()):
            tokens = array("I", node.tokens)
            held = self.slab[node.span.start : node.span.end]
            assert [value[0] for value in held] == list(tokens)

    def cached(self, token_ids: Sequence[int], *, scope: Scope = SCOPE) -> int:
        """Whole blocks of the prompt that are in the store, the last one too."""
        return self.cache.peek([*token_ids, 0], scope=scope) // self.cache.block_size


def prompt(first: int, num_blocks: int, *, extra: int = 1, block_size: int = BLOCK) -> list[int]:
    """A prompt of its own: num_blocks whole blocks and `extra` tokens."""
    return [first * 1000 + i for i in range(num_blocks * block_size + extra)]
