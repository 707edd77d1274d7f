"""What the next step computes: decode first, then chunked prefill, then admission.

Pure bookkeeping over the prefix cache. Knows token counts and memory. Knows nothing of tensors, text or HTTP.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from kvreuse.cache.lease import Lease
from kvreuse.cache.store import PrefixCache
from kvreuse.engine.lower_tiers import LowerTiers
from kvreuse.engine.sequence import Sequence
from kvreuse.engine.waiting import GroupRules, InFlight, WaitingRoom
from kvreuse.errors import OverloadedError
from kvreuse.telemetry.miss_curve import MissCurve

__all__ = ["Scheduled", "Scheduler", "SchedulerLimits"]

# Slots reserved beyond what is needed now, so that a decoding sequence seldom has to grow.
LOOKAHEAD = 64
# The online miss-ratio curve follows one block in so many, and remembers this many of them.
CURVE_SAMPLING, CURVE_BLOCKS = 8, 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """At most max_batch_size sequences run at a time; a step computes at most max_batch_tokens tokens."""

    max_batch_size: int
    max_batch_tokens: int
    groups: GroupRules = field(default_factory=GroupRules)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` tokens of `sequence`, from num_computed_tokens on, are computed in this step."""

    sequence: Sequence
    lease: Lease
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step reaches the last token, so that the next one can be chosen."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Owns which sequences wait and which run, and the leases of those that run."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        *,
        lower: LowerTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._lower = lower
        self._clock = clock
        self._running: list[Sequence] = []  # admission order: the last is preempted first
        self._waiting = WaitingRoom(limits.groups, clock)
        self._in_flight = InFlight()
        self._loading: dict[Sequence, float] = {}  # who waits for storage, and until when
        self._curve = MissCurve(block_size=cache.block_size, sample_every=CURVE_SAMPLING, max_blocks=CURVE_BLOCKS)
        self.num_preempted = 0
        self.num_prefilled_tokens = 0

    def snapshot(self, *, num_slots: int) -> dict[str, float]:
        """Gauges, counters, and the prompt tokens that a pool of half to four times `num_slots` would have served."""
        sizes = {"0_5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}
        return {
            "running": len(self._running),
            "waiting": len(self._waiting) + len(self._in_flight) + len(self._loading),
            "preempted": self.num_preempted,
            "prefilled_tokens": self.num_prefilled_tokens,
            **{f"expected_cached_tokens_{name}x": self._curve.hit_tokens(f * num_slots) for name, f in sizes.items()},
        }

    def idle_s(self) -> float:
        """For how long there is nothing to compute unless something happens; 0 or less: there is something now."""
        if self._running:
            return 0.0
        return min(self._waiting.next_s(), *self._loading.values(), inf) - self._clock()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        hashes = sequence.hashes()
        if sequence.request.reuse:
            self._curve.add(hashes, num_prompt_tokens=sequence.num_prompt_tokens)
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state it is; its memory and pins are free afterwards."""
        self._waiting.remove(sequence)
        self._in_flight.forget(sequence)
        self._loading.pop(sequence, None)
        if sequence in self._running:
            self._running.remove(sequence)
        self._let_go(sequence)

    def schedule(self) -> tuple[list[Scheduled], list[tuple[Sequence, OverloadedError]]]:
        """The batch of the next step, and the sequences that can never go on."""
        batch: list[Scheduled] = []
        failed: list[tuple[Sequence, OverloadedError]] = []
        budget = self._limits.max_batch_tokens
        for sequence in [s for s, until_s in self._loading.items() if until_s <= self._clock()]:
            self._stop_loading(sequence)
        for sequence in [s for s in self._running if s.num_uncomputed_tokens == 1]:
            if budget and sequence in self._running and self._make_room(sequence, failed):
                budget -= self._schedule(sequence, batch, budget)
        has_room = True
        num_resident = functools.cache(self._num_resident)  # asked once in a step: good enough to choose by
        prefilling = [s for s in self._running if s.num_uncomputed_tokens != 1]
        if prefilling:
            # Who needs little does not wait for who needs much, and the step that serves him is a short one; who needs
            # much still gets a quarter of it.
            half = budget // 2
            num_tokens, has_room = self._admit(batch, half, failed, num_resident=num_resident, is_short=True)
            budget = max(half - num_tokens, (half + 1) // 2) if num_tokens else budget
        for sequence in prefilling:
            if budget:
                budget -= self._schedule(sequence, batch, budget)
        if has_room:
            self._admit(batch, budget, failed, num_resident=num_resident)
        return batch, failed

    def _schedule(self, sequence: Sequence, batch: list[Scheduled], budget: int) -> int:
        assert sequence.lease is not None
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        batch.append(Scheduled(sequence, sequence.lease, num_tokens))
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            self.num_prefilled_tokens += num_tokens
        return num_tokens

    def commit(self, batch: Iterable[Scheduled]) -> None:
        """The step went well: its tokens are computed, its whole blocks can be hit by others."""
        block_size = self._cache.block_size
        for item in batch:
            sequence, lease = item.sequence, item.lease
            sequence.num_computed_tokens += item.num_tokens
            num_blocks = sequence.num_computed_tokens // block_size
            if num_blocks * block_size > lease.num_committed_tokens:
                sequence.hashes()
                since = lease.num_committed_tokens
                self._cache.commit(lease, sequence.token_ids, num_computed_tokens=sequence.num_computed_tokens)
                if self._lower is not None:
                    self._lower.committed(sequence, lease, since=since)
                self._wake(self._in_flight.settle(sequence, num_blocks=num_blocks))

    # -- memory of running sequences --------------------------------------------------------------

    def _make_room(self, sequence: Sequence, failed: list[tuple[Sequence, OverloadedError]]) -> bool:
        """Slots for all of the sequence's tokens, by preempting the newest others if it must be."""
        while not self._reserve(sequence):
            victim = self._running[-1]
            if len(self._running) == 1:
                failed.append(self._give_up(sequence))
                return False
            self.num_preempted += 1
            self.remove(victim)
            self._waiting.put_back([victim])
            if victim is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        lease, num_tokens = sequence.lease, len(sequence.token_ids)
        assert lease is not None
        if lease.room_end >= num_tokens:
            return True
        generous = num_tokens + max(0, min(sequence.num_remaining_tokens - 1, LOOKAHEAD))
        return any(
            self._cache.reserve(lease, wanted, num_computed_tokens=sequence.num_computed_tokens)
            for wanted in dict.fromkeys((generous, num_tokens))
        )

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease)
            sequence.lease = None
            sequence.num_computed_tokens = 0
        self._wake(self._in_flight.settle(sequence))

    def _wake(self, sequences: list[Sequence]) -> None:
        if sequences:
            self._waiting.put_back(sorted(sequences, key=lambda s: (s.answers.arrival_s, s.index)))

    # -- admission --------------------------------------------------------------------------------

    def _admit(
        self,
        batch: list[Scheduled],
        budget: int,
        failed: list[tuple[Sequence, OverloadedError]],
        *,
        num_resident: Callable[[Sequence], int],
        is_short: bool = False,
    ) -> tuple[int, bool]:
        """Start who waits. is_short: only who needs no more than `budget` tokens, while nobody else's turn has come.

        Returns how many tokens are spent, and whether the pool had room for all who were tried.
        """
        left, has_room = budget, True
        if not left or len(self._running) >= self._limits.max_batch_size:
            return 0, has_room
        for sequence in self._waiting.candidates(num_resident):
            if not left or len(self._running) >= self._limits.max_batch_size:
                break
            if is_short and len(sequence.token_ids) - num_resident(sequence) > left:
                if self._waiting.is_overdue(sequence):
                    break
                continue
            if sequence.request.reuse and self._waits(sequence):
                self._waiting.remove(sequence)
                continue
            if not self._start(sequence):
                if not self._running:
                    failed.append(self._give_up(sequence))
                has_room = False
                break
            self._waiting.admit(sequence)
            left -= self._schedule(sequence, batch, left)
        return budget - left, has_room

    def _num_resident(self, sequence: Sequence) -> int:
        if not sequence.request.reuse:
            return 0
        return self._cache.peek(sequence.token_ids, scope=sequence.request.scope, hashes=sequence.hashes())

    def _waits(self, sequence: Sequence) -> bool:
        """Single flight: somebody is computing the next block that this sequence needs, or storage is asked for it."""
        block_size = self._cache.block_size
        first = self._num_resident(sequence) // block_size
        last = (len(sequence.token_ids) - 1) // block_size
        if self._in_flight.block(sequence, sequence.hashes()[first:last]):
            return True
        if self._lower is None:
            return False
        patience_s = self._lower.load(self._cache, sequence, first_block=first, on_arrival=self._stop_loading)
        if patience_s is None:
            return False
        self._loading[sequence] = self._clock() + patience_s
        # Who needs the same blocks waits for this load.
        self._in_flight.claim(sequence, first_block=first)
        return True

    def _stop_loading(self, sequence: Sequence) -> None:
        if self._loading.pop(sequence, None) is not None:
            self._wake([sequence, *self._in_flight.settle(sequence)])

    def _start(self, sequence: Sequence) -> bool:
        request, started_s = sequence.request, self._clock()
        lease = self._cache.acquire(
            sequence.token_ids, scope=request.scope, reuse=request.reuse, hashes=sequence.hashes()
        )
        lookup_s = self._clock() - started_s
        sequence.lease = lease
        sequence.num_computed_tokens = lease.num_cached_tokens
        if not self._reserve(sequence):
            self._let_go(sequence)
            return False
        sequence.answers.admitted(lease, lookup_s=lookup_s)
        if request.reuse:
            self._in_flight.claim(sequence, first_block=lease.num_cached_tokens // self._cache.block_size)
        self._running.append(sequence)
        return True

    def _give_up(self, sequence: Sequence) -> tuple[Sequence, OverloadedError]:
        """Nothing else runs, and still there is no room."""
        self.remove(sequence)
        usage = self._cache.usage()
        return sequence, OverloadedError(
            f"KV_CACHE_OOM: {len(sequence.token_ids)} tokens need KV, the pool holds {usage.num_slots} and "
            f"{usage.pinned_slots} of these are pinned; raise option.kv_cache_memory_ratio, pin less or send less"
        )
