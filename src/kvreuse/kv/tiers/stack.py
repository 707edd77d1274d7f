"""The tiers below the pool as the engine sees them: offer a block, ask what is down there, fetch a run of blocks.

Everything that touches storage happens on worker threads with bounded queues; what does not fit in a queue is dropped
and counted. Knows blocks, times and tiers. Knows nothing of sequences or slots.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvreuse.kv.codec import BlockCodec
from kvreuse.kv.tiers.base import StorageTier, TierUsage
from kvreuse.kv.tiers.block import Block
from kvreuse.kv.tiers.costs import Costs
from kvreuse.types import Tier

__all__ = ["Fetched", "Forecast", "TierStack"]

log = logging.getLogger("kvreuse.tiers")

MAX_QUEUED_BYTES = 256 * 2**20
MAX_QUEUED_FETCHES = 64
NEGATIVE_TTL_S = 5.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """`num_blocks` leading blocks are, or may be, below; loading them takes about `load_ms`."""

    num_blocks: int
    load_ms: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that arrived, in order from the first that was asked for, raw, and the slowest tier they came from."""

    blocks: tuple[Block, ...]
    tier: Tier


class TierStack:
    """Tiers from fast to slow. write: "through" puts every offered block in every tier, "on_evict" only in the first
    one, whose own evictions go to the next; "off" only reads."""

    def __init__(
        self,
        tiers: Sequence[StorageTier],
        codec: BlockCodec,
        *,
        encoding: str = "raw",
        write: str = "through",
        num_workers: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = list(tiers)
        self._codec = codec
        self._encoding = encoding
        self.write = write
        self._clock = clock
        self.costs = Costs()
        self.num_dropped = 0
        self._queued_bytes = 0
        self._absent: dict[bytes, float] = {}  # first keys that nobody had, until when
        self._offered: dict[bytes, None] = {}  # what was put lately, oldest first
        self._num_purges = 0
        self._purged: dict[str | None, int] = {}  # tenant, or None for all -> the last purge of it
        self._lock = threading.Lock()
        self._puts: queue.SimpleQueue[tuple[Block, int] | None] = queue.SimpleQueue()
        self._fetches: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED_FETCHES)
        self._threads = [threading.Thread(target=self._put_loop, name="kvreuse-demote", daemon=True)]
        self._threads += [
            threading.Thread(target=self._fetch_loop, name=f"kvreuse-promote-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def wants(self, key: bytes) -> bool:
        """Whether an offer of this block would be worth the copy."""
        with self._lock:
            return self.write != "off" and key not in self._offered

    def offer(self, block: Block) -> None:
        """Queue a raw block to be stored. Dropped, and counted, when too much waits already."""
        with self._lock:
            if self._queued_bytes + block.num_bytes > MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._queued_bytes += block.num_bytes
            self._offered[block.key] = None
            self._absent.pop(block.key, None)
            num_purges = self._num_purges
            if len(self._offered) > 2**16:
                del self._offered[next(iter(self._offered))]
        self._puts.put((block, num_purges))

    def forecast(self, keys: Sequence[bytes]) -> Forecast:
        """What a fetch of these keys would bring. Does no I/O."""
        with self._lock:
            if not keys or self._absent.get(keys[0], 0.0) > self._clock():
                return Forecast(0, 0.0)
        num_blocks, load_ms = 0, 0.0
        for tier in self._tiers:
            found = tier.find(keys[num_blocks:])
            if found:
                load_ms += self.costs.load_ms(tier.tier, num_blocks=found)
                num_blocks += found
        return Forecast(num_blocks, load_ms)

    def fetch(self, keys: Sequence[bytes], token_bytes: Sequence[bytes], on_done: Callable[[Fetched], None]) -> bool:
        """Load the leading blocks that are there; on_done is called on a worker. False: too many fetches wait."""
        try:
            self._fetches.put_nowait(lambda: on_done(self._load(keys, token_bytes)))
        except queue.Full:
            return False
        return True

    def purge(self, tenant: str | None) -> int:
        """Drop what one tenant, or everybody, has in any tier or on its way there; returns entries."""
        with self._lock:
            self._offered.clear()
            self._num_purges += 1
            self._purged[tenant] = self._num_purges
        return sum(tier.purge(tenant) for tier in self._tiers)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these entries everywhere, soon and on a worker: they are wrong."""
        with suppress(queue.Full):
            self._fetches.put_nowait(lambda: self._discard(keys))

    def _discard(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            for key in keys:
                tier.discard(key)

    def usage(self) -> dict[Tier, TierUsage]:
        return {tier.tier: tier.usage() for tier in self._tiers}

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until everything that was offered is stored. False: it took too long."""
        deadline_s = time.monotonic() + timeout_s
        while self._queued_bytes and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return not self._queued_bytes

    def close(self) -> None:
        """End the workers; what still waits to be stored is stored first."""
        self._puts.put(None)
        for _ in self._threads[1:]:
            self._fetches.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        for tier in self._tiers:
            tier.close()

    def _put_loop(self) -> None:
        while (item := self._puts.get()) is not None:
            block, num_purges = item
            try:
                if not self._is_purged(block, num_purges):
                    self._store(block)
                if self._is_purged(block, num_purges):
                    self._discard([block.key])
            finally:
                with self._lock:
                    self._queued_bytes -= block.num_bytes

    def _is_purged(self, block: Block, num_purges: int) -> bool:
        """Whether its tenant was purged after the block was offered."""
        with self._lock:
            return max(self._purged.get(block.tenant, 0), self._purged.get(None, 0)) > num_purges

    def _store(self, block: Block) -> None:
        payload, encoding = self._codec.pack(block.payload, self._encoding)
        packed = Block(
            key=block.key, tenant=block.tenant, token_bytes=block.token_bytes, payload=payload, encoding=encoding
        )
        if self.write == "through":
            for tier in self._tiers:
                tier.put(packed)
        else:
            self._demote(packed, level=0)

    def _demote(self, block: Block, *, level: int) -> None:
        if level < len(self._tiers):
            stored = self._tiers[level].put(block, on_evict=lambda evicted: self._demote(evicted, level=level + 1))
            if not stored:
                self._demote(block, level=level + 1)

    def _fetch_loop(self) -> None:
        while (job := self._fetches.get()) is not None:
            job()

    def _load(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> Fetched:
        blocks: list[Block] = []
        slowest = Tier.NONE
        while len(blocks) < len(keys):
            number, before = len(blocks), len(blocks)
            for tier in self._tiers:
                started_s = time.perf_counter()
                run = self._unpacked(tier.load_run(keys[number:], token_bytes[number:]))
                self.costs.loaded(tier.tier, num_blocks=len(run), took_ms=(time.perf_counter() - started_s) * 1e3)
                if run:
                    blocks += run
                    number = len(blocks)
                    slowest = max(slowest, tier.tier, key=list(Tier).index)
            if len(blocks) == before:
                break
        if not blocks:
            self._remember_absent(keys[0])
        return Fetched(tuple(blocks), slowest)

    def _unpacked(self, run: Sequence[Block]) -> list[Block]:
        blocks = []
        for block in run:
            try:
                raw = self._codec.unpack(block.payload, block.encoding)
            except (ValueError, KeyError):
                log.warning("a block from a lower tier does not unpack; it is dropped")
                self._discard([block.key])
                break
            blocks.append(
                Block(key=block.key, tenant=block.tenant, token_bytes=block.token_bytes, payload=raw, encoding="raw")
            )
        return blocks

    def _remember_absent(self, key: bytes) -> None:
        now = self._clock()
        with self._lock:
            self._absent = {k: until for k, until in self._absent.items() if until > now}
            self._absent[key] = now + NEGATIVE_TTL_S
