"""Exact numbers of the store: what holds which slots now, and what has happened since the start.

Knows ints. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["StoreUsage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUsage:
    """Slots: num_slots = node_slots + private_slots + free_slots; pinned_slots is the part of node_slots in use.

    tenant_bytes: bytes of nodes by tenant. What has a default is a total since the start.
    """

    num_slots: int
    node_slots: int
    private_slots: int
    free_slots: int
    pinned_slots: int
    largest_free_slots: int
    num_nodes: int
    num_blocks: int
    used_bytes: int
    tenant_bytes: Mapping[str, int]
    max_used_slots: int = 0
    num_lookups: int = 0  # with reuse on
    hit_tokens: int = 0
    miss_tokens: int = 0
    num_collisions: int = 0
    num_evicted_blocks: int = 0
    num_expired_blocks: int = 0
    num_purged_blocks: int = 0
    num_oom: int = 0  # reservations refused
    num_moves: int = 0  # nodes and private spans moved to make room or by compaction
