"""Exact numbers of the store: what holds which slots now, and what has happened since the start.

Knows ints. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from kvreuse.cache.spans import SpanAllocator
from kvreuse.cache.tree import PrefixTree

__all__ = ["Counters", "StoreUsage", "measure"]


@dataclass(slots=True)
class Counters:
    """Totals since the start, changed under `lock` (the last lock in the order: nothing is taken while it is held)."""

    lock: Lock
    num_lookups: int = 0  # with reuse on
    hit_tokens: int = 0
    miss_tokens: int = 0
    num_collisions: int = 0
    num_evicted_blocks: int = 0
    num_expired_blocks: int = 0
    num_purged_blocks: int = 0
    num_oom: int = 0  # reservations refused
    num_moves: int = 0  # spans moved by compaction
    max_used_slots: int = 0

    def add(self, **amounts: int) -> None:
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUsage:
    """Slots: num_slots = node_slots + private_slots + free_slots; pinned_slots is the part of node_slots in use.

    tenant_bytes: bytes of nodes by tenant. The rest: see Counters.
    """

    num_slots: int
    node_slots: int
    private_slots: int
    free_slots: int
    pinned_slots: int
    largest_free_slots: int
    max_used_slots: int
    num_nodes: int
    num_blocks: int
    used_bytes: int
    tenant_bytes: Mapping[str, int]
    num_lookups: int
    hit_tokens: int
    miss_tokens: int
    num_collisions: int
    num_evicted_blocks: int
    num_expired_blocks: int
    num_purged_blocks: int
    num_oom: int
    num_moves: int


def measure(
    tree: PrefixTree, spans: SpanAllocator, *, counters: Counters, bytes_per_token: int, num_moves: int
) -> StoreUsage:
    """The numbers of this moment. Under the structure lock."""
    num_used = spans.num_slots - spans.num_free
    with counters.lock:
        return StoreUsage(
            num_slots=spans.num_slots,
            node_slots=tree.num_node_slots,
            private_slots=num_used - tree.num_node_slots,
            free_slots=spans.num_free,
            pinned_slots=sum(node.span.length for node in tree.pinned()),
            largest_free_slots=spans.largest_free,
            max_used_slots=counters.max_used_slots,
            num_nodes=tree.num_nodes,
            num_blocks=tree.num_node_slots // tree.block_size,
            used_bytes=num_used * bytes_per_token,
            tenant_bytes={tenant: slots * bytes_per_token for tenant, slots in tree.tenant_slots.items()},
            num_lookups=counters.num_lookups,
            hit_tokens=counters.hit_tokens,
            miss_tokens=counters.miss_tokens,
            num_collisions=counters.num_collisions,
            num_evicted_blocks=counters.num_evicted_blocks,
            num_expired_blocks=counters.num_expired_blocks,
            num_purged_blocks=counters.num_purged_blocks,
            num_oom=counters.num_oom,
            num_moves=num_moves,
        )
