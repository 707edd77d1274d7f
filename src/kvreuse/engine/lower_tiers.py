"""Between the pool and the tiers below it: copy blocks out when written or evicted, bring them back on a match.

Runs on the engine's thread and never waits: loads happen on the stack's workers and come back through `post`. Knows
slots, blocks and sequences. Knows nothing of queues or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES, pack_tokens
from kvreuse.cache.lease import Lease
from kvreuse.cache.store import PrefixCache
from kvreuse.engine.sequence import Sequence
from kvreuse.kv.codec import BlockCodec
from kvreuse.kv.pool import KVPool
from kvreuse.kv.tiers.entry import Block
from kvreuse.kv.tiers.stack import Fetched, TierStack

if TYPE_CHECKING:
    from kvreuse.engine.scheduler import Scheduled

__all__ = ["LowerTiers"]

# However quick computing would be, storage gets this long before a sequence goes without it.
MIN_PATIENCE_S = 0.05
MIN_MEASURED_TOKENS = 32


class LowerTiers:
    """Demotion and promotion for one pool."""

    def __init__(self, stack: TierStack, *, pool: KVPool, codec: BlockCodec) -> None:
        self.stack = stack
        self._pool = pool
        self._codec = codec
        self.post: Callable[[Callable[[], None]], None] = lambda job: job()
        self.num_promoted_tokens = 0
        self._num_purges = 0

    def drop_arriving(self) -> None:
        """To be called before a purge of the pool: what is on its way up must not come back into it."""
        self._num_purges += 1

    def snapshot(self) -> dict[str, Any]:
        """Gauges and counters, per tier and of the flow between them."""
        flow = {"num_dropped": self.stack.num_dropped, "promoted_tokens": self.num_promoted_tokens}
        return {**self.stack.usage(), **flow}

    def measured(self, batch: Iterable[Scheduled], *, took_ms: float) -> None:
        """Learn from a step what computing costs; one that hardly prefills says nothing."""
        num_tokens = sum(item.num_tokens for item in batch if item.num_tokens > 1)
        if num_tokens >= MIN_MEASURED_TOKENS:
            self.stack.costs.computed(num_tokens=num_tokens, took_ms=took_ms)

    def evicted(self, hashes: bytes, token_bytes: bytes, start: int, tenant: str) -> None:
        """Blocks leave the pool: their slots from `start` on are still as they were."""
        if self.stack.write == "on_evict":
            size = self._codec.block_size
            for number in range(len(hashes) // HASH_BYTES):
                key = hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
                tokens = token_bytes[number * size * TOKEN_BYTES : (number + 1) * size * TOKEN_BYTES]
                self._offer(key, tokens, slot=start + number * size, tenant=tenant)

    def committed(self, sequence: Sequence, lease: Lease, *, since: int) -> None:
        """Positions [since, lease.num_committed_tokens) are whole blocks in the pool now."""
        if self.stack.write == "through":
            size, hashes = self._codec.block_size, sequence.hashes()
            for position in range(since, lease.num_committed_tokens, size):
                if not lease.keeps:  # purged meanwhile
                    break
                tokens = pack_tokens(sequence.token_ids[position : position + size])
                self._offer(hashes[position // size], tokens, slot=lease.slot(position), tenant=lease.scope.tenant)

    def _offer(self, key: bytes, token_bytes: bytes, *, slot: int, tenant: str) -> None:
        if self.stack.wants(key):
            payload = self._codec.read(self._pool, slot)
            self.stack.offer(Block(key=key, tenant=tenant, token_bytes=token_bytes, payload=payload))

    def load(
        self, cache: PrefixCache, sequence: Sequence, *, first_block: int, on_arrival: Callable[[Sequence], None]
    ) -> float | None:
        """Begin to load into `cache` what the tiers have from `first_block` on. None: nothing to wait for.

        Returns for how many seconds to wait at most: then computing is quicker than what is still to come. A sequence
        asks once. on_arrival(sequence) is called on the engine's thread.
        """
        if sequence.has_tried_tiers:
            return None
        sequence.has_tried_tiers = True
        size = self._codec.block_size
        last_block = (len(sequence.token_ids) - 1) // size
        keys = sequence.hashes()[first_block:last_block]
        num_blocks, load_ms = self.stack.forecast(keys)
        if not num_blocks:
            return None
        compute_ms = self.stack.costs.prefill_ms * num_blocks * size
        if load_ms > compute_ms:
            sequence.answers.is_load_slower = True
            return None
        token_bytes = [
            pack_tokens(sequence.token_ids[i * size : (i + 1) * size]) for i in range(first_block, last_block)
        ]

        num_purges = self._num_purges

        def arrived(fetched: Fetched) -> None:
            if fetched.blocks:
                self._install(cache, sequence, first_block, fetched, num_purges=num_purges)
            on_arrival(sequence)

        is_asked = self.stack.fetch(keys, token_bytes, lambda fetched: self.post(lambda: arrived(fetched)))
        return max(compute_ms / 1e3, MIN_PATIENCE_S) if is_asked else None

    def _install(
        self, cache: PrefixCache, sequence: Sequence, first_block: int, fetched: Fetched, *, num_purges: int
    ) -> None:
        """Make nodes of blocks that arrived, so that the sequence and others hit them. They are dropped when there is
        no room, or a purge since num_purges; one from now on finds the lease.
        """
        size = self._codec.block_size
        end = (first_block + len(fetched.blocks)) * size
        with cache.acquire(
            sequence.token_ids, scope=sequence.request.scope, hashes=sequence.hashes(), is_counted=False
        ) as lease:
            begin = lease.num_committed_tokens
            if num_purges != self._num_purges:
                return
            if not first_block * size <= begin < end or not cache.reserve(lease, end, num_computed_tokens=begin):
                return
            for position in range(begin, end, size):
                block = fetched.blocks[position // size - first_block]
                self._codec.write(self._pool, lease.slot(position), block.payload)
            cache.commit(lease, sequence.token_ids, num_computed_tokens=end)
            sequence.answers.promoted_from = fetched.tier
            self.num_promoted_tokens += end - begin
