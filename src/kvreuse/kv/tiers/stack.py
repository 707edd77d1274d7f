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
from dataclasses import dataclass, replace
from functools import partial

from kvreuse.kv.codec import BlockCodec
from kvreuse.kv.tiers.base import StorageTier, TierUsage
from kvreuse.kv.tiers.entry import Block
from kvreuse.types import Tier

__all__ = ["Costs", "Fetched", "TierStack"]

log = logging.getLogger("kvreuse.tiers")

MAX_QUEUED_BYTES = 256 * 2**20
MAX_QUEUED_FETCHES = 64
MAX_REMEMBERED = 2**16
NEGATIVE_TTL_S = 5.0
_WEIGHT = 0.2  # of the newest measurement

Jobs = queue.Queue[Callable[[], None] | None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that arrived, in order from the first that was asked for, raw, and the slowest tier they came from."""

    blocks: tuple[Block, ...]
    tier: Tier


class Costs:
    """Exponentially weighted means, measured as it happens: the break-even between loading and computing.

    load_ms: of a block, by tier; prefill_ms: of a token. Until something was measured: a local disk and network, taken
    optimistically so that a first try measures. on_load: is told of every fetch that brought something, from where and
    how long it took in seconds.
    """

    def __init__(self) -> None:
        self.on_load: Callable[[Tier, float], None] | None = None
        self.load_ms = {Tier.HOST: 0.5, Tier.DISK: 1.0, Tier.REMOTE: 2.0}
        self.prefill_ms = 1.0
        self._has_prefill = False

    def loaded(self, tier: Tier, *, num_blocks: int, took_ms: float) -> None:
        """A fetch from `tier` brought so many blocks; one that brought none says nothing."""
        if num_blocks:
            self.load_ms[tier] += _WEIGHT * (took_ms / num_blocks - self.load_ms[tier])
            if self.on_load is not None:
                self.on_load(tier, took_ms / 1e3)

    def computed(self, *, num_tokens: int, took_ms: float) -> None:
        """A step of prefill computed so many tokens, at least one."""
        weight = _WEIGHT if self._has_prefill else 1.0
        self.prefill_ms += weight * (took_ms / num_tokens - self.prefill_ms)
        self._has_prefill = True


class TierStack:
    """Tiers from fast to slow. write: "through" puts every offered block in every tier, "on_evict" only in the first
    one, whose own evictions go to the next; "off" only reads."""

    def __init__(
        self, tiers: Sequence[StorageTier], codec: BlockCodec, *, encoding: str = "raw", write: str = "through"
    ) -> None:
        self._tiers, self._codec, self._encoding, self.write = list(tiers), codec, encoding, write
        self.costs = Costs()
        self.num_dropped = 0
        self._lock = threading.Lock()  # of what follows
        self._queued: dict[int, Block] = {}  # to be stored, by id(); a purge takes it out
        self._queued_bytes = 0
        self._absent: dict[bytes, float] = {}  # first keys that nobody had, until when
        self._offered: dict[bytes, None] = {}  # what was put lately, oldest first
        self._puts: Jobs = queue.Queue()
        self._fetches: Jobs = queue.Queue(MAX_QUEUED_FETCHES)
        self._workers = [
            (jobs, threading.Thread(target=_work_off, args=(jobs,), name=f"kvreuse-{name}", daemon=True))
            for jobs, name in ((self._puts, "demote"), (self._fetches, "promote-0"), (self._fetches, "promote-1"))
        ]
        for _, thread in self._workers:
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
            self._queued[id(block)] = block
            self._offered[block.key] = None
            self._absent.pop(block.key, None)
            if len(self._offered) > MAX_REMEMBERED:
                del self._offered[next(iter(self._offered))]
        self._puts.put(lambda: self._put(block))

    def forecast(self, keys: Sequence[bytes]) -> tuple[int, float]:
        """How many leading blocks are, or may be, below, and about how many ms loading them takes. Does no I/O."""
        with self._lock:
            if not keys or self._absent.get(keys[0], 0.0) > time.monotonic():
                return 0, 0.0
        num_blocks, load_ms = 0, 0.0
        for tier in self._tiers:
            num_found = tier.find(keys[num_blocks:])
            load_ms += self.costs.load_ms[tier.tier] * num_found
            num_blocks += num_found
        return num_blocks, load_ms

    def fetch(self, keys: Sequence[bytes], token_bytes: Sequence[bytes], on_done: Callable[[Fetched], None]) -> bool:
        """Load the leading blocks that are there; on_done is called on a worker. False: too many fetches wait."""
        with suppress(queue.Full):
            self._fetches.put_nowait(lambda: on_done(self._load(keys, token_bytes)))
            return True
        return False

    def purge(self, tenant: str | None) -> int:
        """Drop what one tenant, or everybody, has in any tier or on its way there; returns entries."""
        with self._lock:
            self._offered.clear()
            self._queued = {n: block for n, block in self._queued.items() if tenant not in (None, block.tenant)}
        return sum(tier.purge(tenant) for tier in self._tiers)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these entries everywhere, soon and on a worker: they are wrong."""
        with suppress(queue.Full):
            self._fetches.put_nowait(lambda: self._discard(keys))

    def usage(self) -> dict[str, TierUsage]:
        return {tier.tier.value: tier.usage() for tier in self._tiers}

    def close(self) -> None:
        """End the workers; what still waits to be stored is stored first."""
        for jobs, _ in self._workers:
            jobs.put(None)
        for _, thread in self._workers:
            thread.join(timeout=10)
        for tier in self._tiers:
            tier.close()

    # -- on the workers ---------------------------------------------------------------------------

    def _put(self, block: Block) -> None:
        try:
            if id(block) in self._queued:
                payload, encoding = self._codec.pack(block.payload, self._encoding)
                self._store(replace(block, payload=payload, encoding=encoding))
            with self._lock:
                is_purged = self._queued.pop(id(block), None) is None
            if is_purged:  # perhaps while it was stored
                self._discard([block.key])
        finally:
            with self._lock:
                self._queued_bytes -= block.num_bytes

    def _store(self, block: Block) -> None:
        if self.write == "through":
            for tier in self._tiers:
                tier.put(block)
        else:
            self._demote(block, level=0)

    def _demote(self, block: Block, *, level: int) -> None:
        for lower, tier in enumerate(self._tiers[level:], level + 1):
            pass_on = partial(self._demote, level=lower) if lower < len(self._tiers) else None
            if tier.put(block, on_evict=pass_on):
                return

    def _discard(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            for key in keys:
                tier.discard(key)

    def _load(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> Fetched:
        blocks: list[Block] = []
        slowest, num_before = Tier.NONE, -1
        while num_before < len(blocks) < len(keys):  # a tier may have what comes after the blocks of a slower one
            num_before = len(blocks)
            for tier in self._tiers:
                started_s, begin = time.perf_counter(), len(blocks)
                blocks += self._unpacked(tier.load_run(keys[begin:], token_bytes[begin:]))
                took_ms, num_blocks = (time.perf_counter() - started_s) * 1e3, len(blocks) - begin
                self.costs.loaded(tier.tier, num_blocks=num_blocks, took_ms=took_ms)
                if num_blocks:
                    slowest = max(slowest, tier.tier, key=list(Tier).index)
        if not blocks:
            now = time.monotonic()
            with self._lock:
                self._absent = {key: until_s for key, until_s in self._absent.items() if until_s > now}
                self._absent[keys[0]] = now + NEGATIVE_TTL_S
        return Fetched(tuple(blocks), slowest)

    def _unpacked(self, run: Sequence[Block]) -> list[Block]:
        blocks = []
        for block in run:
            try:
                raw = self._codec.unpack(block.payload, block.encoding)
            except ValueError:
                log.warning("a block from a lower tier does not unpack; it is dropped")
                self._discard([block.key])
                break
            blocks.append(replace(block, payload=raw, encoding="raw"))
        return blocks


def _work_off(jobs: Jobs) -> None:
    """Do the jobs until there is a None. A job that fails ends this thread, and another goes on with the rest."""
    while (job := jobs.get()) is not None:
        is_done = False
        try:
            job()
            is_done = True
        finally:
            if not is_done:
                threading.Thread(target=_work_off, args=(jobs,), name="kvreuse-tiers", daemon=True).start()
