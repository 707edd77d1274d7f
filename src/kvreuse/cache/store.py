"""The prefix cache: match, pin, reserve, commit, release. The only face of this package that others need.

Knows token ids, slots and scopes. Knows nothing of tensors: `move_slots` copies what a slot holds.

Threads: any thread may call anything; a lease belongs to one thread at a time. For locks and their order see tree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from threading import Lock, RLock

from kvreuse.cache.diagnosis import why_not_more
from kvreuse.cache.eviction import Evictor, OnEvict
from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES, extend_hashes, pack_tokens
from kvreuse.cache.integrity import check_store
from kvreuse.cache.lease import Lease, pinned_nodes
from kvreuse.cache.node import Walk
from kvreuse.cache.outline import Outline, draw
from kvreuse.cache.placement import Placer
from kvreuse.cache.policy import make_policy
from kvreuse.cache.spans import SpanAllocator, join_run
from kvreuse.cache.tree import PrefixTree
from kvreuse.cache.usage import StoreUsage
from kvreuse.errors import ConfigError
from kvreuse.types import MissReason, Scope

__all__ = ["PrefixCache"]


class PrefixCache:
    """Reuses the KV of whole blocks of `block_size` tokens, one slot per token, bytes_per_token bytes per slot.

    ttl_s: seconds without use after which a block is dropped. tenant_quota_bytes: what one tenant may keep in nodes.
    on_evict(hashes, token_bytes, first_slot, tenant): blocks leave for want of room, their slots still as they were.
    move_slots(src, dst, length): copies slots, overlapping ranges like memmove. Raises ConfigError for bad settings.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        block_size: int,
        bytes_per_token: int,
        move_slots: Callable[[int, int, int], None],
        policy: str = "size_weighted_lru",
        lru_weights: tuple[float, float] = (0.3, 0.7),
        ttl_s: float = 14400.0,
        tenant_quota_bytes: int | None = None,
        on_evict: OnEvict | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_slots < 1 or block_size < 1 or bytes_per_token < 1:
            raise ConfigError("num_slots, block_size and bytes_per_token must be at least 1")
        self.block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._ttl_s = ttl_s
        self._quota_slots = None if tenant_quota_bytes is None else tenant_quota_bytes // bytes_per_token
        self._clock = clock
        self._structure = RLock()
        self._registry = Lock()  # of the open leases and what is counted as they are opened; no lock is taken under it
        self._leases: set[Lease] = set()
        self._counts: Counter[str] = Counter()  # by field of StoreUsage
        self._policy = make_policy(
            policy, lru_weights, num_slots=num_slots, num_blocks=num_slots // block_size, clock=clock
        )
        self._spans = SpanAllocator(num_slots)
        self._tree = PrefixTree(self._spans, self._policy, block_size=block_size)
        self._evictor = Evictor(self._tree, counts=self._counts, on_evict=on_evict)
        self._placer = Placer(self._tree, self._evictor, counts=self._counts, move_slots=move_slots)

    def acquire(
        self, token_ids: Sequence[int], *, scope: Scope, reuse: bool = True, hashes: list[bytes] | None = None,
        is_counted: bool = True,
    ) -> Lease:  # fmt: skip
        """Match and pin the longest run of whole cached blocks from position 0 that leaves the last token out.

        hashes: block_hashes(token_ids) when the caller has them; not kept and not changed. is_counted: False for a
        look that is no request's.
        """
        walk = self._walk(token_ids, scope, hashes) if reuse else None
        lease = Lease(scope=scope, keeps=reuse, on_exit=self.release)
        with self._registry:
            self._leases.add(lease)
        if walk is None:
            lease.miss_reason = MissReason.DISABLED
            return lease
        lease.hashes, lease.node_runs = walk.hashes, walk.runs
        self._go_on(lease, walk)
        if walk.limit == 0:
            lease.miss_reason = MissReason.BELOW_MIN
        elif walk.num_blocks < walk.limit:
            with self._structure:
                self._match_rest(lease, walk)
                if walk.num_blocks < walk.limit:
                    lease.miss_reason, lease.diverged_at = why_not_more(self._tree, walk)
        hit = lease.num_cached_tokens = lease.num_committed_tokens
        if is_counted:
            with self._registry:
                self._counts["num_lookups"] += 1
                self._counts["hit_tokens"] += hit
                self._counts["miss_tokens"] += len(token_ids) - hit
        return lease

    def peek(self, token_ids: Sequence[int], *, scope: Scope, hashes: list[bytes] | None = None) -> int:
        """How many tokens would match now. Pins nothing, changes nothing."""
        walk = self._walk(token_ids, scope, hashes)
        self._tree.walk(walk, fresh_after=self._fresh_after(), is_pinning=False)
        return (walk.num_blocks + walk.num_inside) * self.block_size

    def reserve(self, lease: Lease, num_tokens: int, *, num_computed_tokens: int) -> bool:
        """Give the lease private slots for positions [num_committed_tokens, num_tokens). False: not now.

        Positions below num_computed_tokens keep their content wherever the span goes. In order: grow in place or move
        to a hole; evict by policy just what is missing; slide unpinned nodes together.
        """
        num_slots = num_tokens - lease.num_committed_tokens
        if num_slots <= lease.num_private_slots:
            return True
        num_live = min(max(num_computed_tokens - lease.num_committed_tokens, 0), lease.num_private_slots)
        with self._structure:
            lease.check_open()
            has_room = self._placer.reserve(lease, num_slots, num_live=num_live, leases=self._open_leases)
            num_used = self._spans.num_slots - self._spans.num_free
            self._counts["max_used_slots"] = max(self._counts["max_used_slots"], num_used)
            self._counts["num_oom"] += not has_room
        return has_room

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Give back the private slots of positions from num_tokens on."""
        with self._structure:
            keep = max(num_tokens - lease.num_committed_tokens, 0)
            if lease.private is not None:
                self._spans.shrink(lease.private, keep)
                lease.private = lease.private if keep else None

    def commit(self, lease: Lease, token_ids: Sequence[int], *, num_computed_tokens: int) -> int:
        """Make nodes of the whole blocks among the computed tokens; returns how many blocks that were.

        token_ids: the sequence from position 0, at least num_computed_tokens long. Blocks that another writer has
        committed meanwhile are shared instead, and the lease's own slots for them freed. Stores nothing with reuse off,
        after a purge, or over the tenant's quota.
        """
        size, begin, end = self.block_size, lease.num_committed_tokens, num_computed_tokens
        if not begin <= end <= min(lease.room_end, len(token_ids)) and lease.keeps:
            raise ValueError(f"cannot commit {end} tokens: {begin} are committed, {lease.room_end} have slots")
        end -= end % size
        if not lease.keeps or end <= begin:
            return 0
        if (known := len(lease.hashes) * size) < end:
            extend_hashes(lease.hashes, pack_tokens(token_ids[known:end]), scope=lease.scope, block_size=size)
        with self._structure:
            lease.check_open()
            if self._tree.find(lease.hashes[begin // size]) is not None:
                self._share(lease, token_ids, end)
            if lease.keeps and lease.num_committed_tokens < end:
                self._store(lease, pack_tokens(token_ids[lease.num_committed_tokens : end]), end)
        return (lease.num_committed_tokens - begin) // size

    def release(self, lease: Lease) -> None:
        """Free the private span and unpin the chain. Does nothing the second time."""
        with self._structure:
            if lease.is_released:
                return
            self.trim(lease, 0)
            lease.is_released = True
            for node in list(lease.chain()):
                self._tree.unpin(node)
                self._evictor.offer(node)
            lease.tail = lease.written = None
            with self._registry:
                self._leases.discard(lease)

    def purge(self, *, tenant: str | None = None) -> int:
        """Drop everything (None) or all of one tenant; returns blocks. At once unfindable; pinned slots are freed with
        their pins, and what is being computed now is not stored.
        """
        with self._structure:
            num_blocks = self._evictor.purge(self._tree.roots(tenant))
            for lease in self._open_leases():  # afterwards, for those that were matching meanwhile
                if tenant is None or lease.scope.tenant == tenant:
                    lease.keeps = False
            return num_blocks

    def expire(self) -> int:
        """Drop what was not used for ttl_s and is not pinned; returns blocks."""
        with self._structure:
            return sum(self._evictor.expire(r, fresh_after=self._fresh_after()) for r in self._tree.roots(None))

    def compact(self) -> int:
        """Slide what is unpinned together; returns how many slots were copied."""
        with self._structure:
            return self._placer.compact()

    def usage(self) -> StoreUsage:
        """The numbers of this moment."""
        with self._structure, self._registry:
            tree, spans, size = self._tree, self._spans, self._bytes_per_token
            num_used, node_slots = spans.num_slots - spans.num_free, tree.num_node_slots
            return StoreUsage(
                num_slots=spans.num_slots,
                node_slots=node_slots,
                private_slots=num_used - node_slots,
                free_slots=spans.num_free,
                pinned_slots=sum(node.span.length for node in pinned_nodes(self._leases)),
                largest_free_slots=spans.largest_free,
                num_nodes=tree.num_nodes,
                num_blocks=node_slots // self.block_size,
                used_bytes=num_used * size,
                tenant_bytes={tenant: slots * size for tenant, slots in tree.tenant_slots.items()},
                **self._counts,
            )

    def outline(self, max_nodes: int, names: Mapping[str, Sequence[int]]) -> Outline:
        """A picture for people; its work is bounded by max_nodes and the number of spans. `names` call prefixes."""
        return draw(self._tree, names, lock=self._structure, max_nodes=max_nodes, now_s=self._clock())

    def check_integrity(self) -> None:
        """Raises AssertionError when any two records of the store disagree. No acquire may be running."""
        with self._structure:
            check_store(self._tree, self._evictor, leases=self._open_leases())

    def _walk(self, token_ids: Sequence[int], scope: Scope, hashes: list[bytes] | None) -> Walk:
        packed, size, known = pack_tokens(token_ids), self.block_size, list(hashes or ())
        extend_hashes(known, packed[len(known) * size * TOKEN_BYTES :], scope=scope, block_size=size)
        return Walk(hashes=known, tokens=packed, scope=scope, limit=max(len(token_ids) - 1, 0) // size)

    def _open_leases(self) -> list[Lease]:
        with self._registry:
            return list(self._leases)

    def _go_on(self, lease: Lease, walk: Walk) -> None:
        """The lease holds all whole nodes that match."""
        self._tree.walk(walk, fresh_after=self._fresh_after(), is_pinning=True)
        lease.tail, lease.num_committed_tokens = walk.node, walk.num_blocks * self.block_size

    def _match_rest(self, lease: Lease, walk: Walk) -> None:
        """Go on where whole nodes ended, now with the structure lock: into part of a node."""
        self._go_on(lease, walk)
        if walk.stale is not None:
            self._evictor.expire(walk.stale, fresh_after=self._fresh_after())
        if walk.inside is not None and walk.num_inside:
            self._tree.split(walk.inside, walk.num_inside)
            self._go_on(lease, walk)
        self._counts["num_collisions"] += walk.is_collision

    def _share(self, lease: Lease, token_ids: Sequence[int], end: int) -> None:
        """Switch to the nodes that hold the same blocks already."""
        begin, size = lease.num_committed_tokens, self.block_size
        walk = Walk(
            hashes=lease.hashes, tokens=pack_tokens(token_ids[:end]), scope=lease.scope, limit=end // size,
            node=lease.tail, num_blocks=begin // size, runs=lease.node_runs,
        )  # fmt: skip
        self._match_rest(lease, walk)
        shared = lease.num_committed_tokens - begin
        if shared and lease.private is not None:
            front, lease.private = self._spans.cut(lease.private, shared)
            self._spans.free(front)
        # Its place in the index is taken by another block: this lease can store no more.
        lease.keeps &= not walk.is_collision

    def _store(self, lease: Lease, packed: bytes, end: int) -> None:
        """Blocks [num_committed_tokens, end) of the private span become a node, or more of the one written before."""
        num_slots, quota = end - lease.num_committed_tokens, self._quota_slots
        if quota is not None and not self._evictor.keep_quota(lease.scope.tenant, num_slots, max_slots=quota):
            return
        new = lease.hashes[lease.num_committed_tokens // self.block_size : end // self.block_size]
        self._policy.num_written_slots += num_slots
        # Blocks that return do not become one node with those behind them, which are new: their chances differ.
        for num_uses, group in groupby(new, key=self._policy.returns):
            hashes = b"".join(group)
            size = len(hashes) // HASH_BYTES * self.block_size * TOKEN_BYTES
            if lease.keeps:
                self._append(lease, hashes, packed[:size], num_uses=num_uses)
            packed = packed[size:]

    def _append(self, lease: Lease, hashes: bytes, packed: bytes, *, num_uses: int) -> None:
        """The next blocks of the private span go to the end of the chain."""
        if self._tree.find(hashes[:HASH_BYTES]) is not None or lease.private is None:  # a collision: the place is taken
            lease.keeps = False
            return
        num_slots, tail = len(packed) // TOKEN_BYTES, lease.tail or self._tree.make_root(lease.scope)
        span, lease.private = self._spans.cut(lease.private, num_slots)
        join_run(lease.node_runs, span.start, num_slots)
        lease.num_committed_tokens += num_slots
        level = self._policy.level(num_uses)
        self._policy.stored(level, len(hashes) // HASH_BYTES)
        is_ours = tail is lease.written and tail.level == level
        if not (is_ours and self._tree.extend(tail, hashes, packed, span)):
            lease.tail = lease.written = self._tree.add(tail, hashes, packed, span=span, num_uses=num_uses)

    def _fresh_after(self) -> float:
        return self._clock() - self._ttl_s
