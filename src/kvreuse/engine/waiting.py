"""The waiting room: arrival order, groups by first block, and who waits for a prefill that is under way.

Pure bookkeeping. Knows hashes and times. Knows nothing of memory or tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf

from kvreuse.engine.sequence import Sequence
from kvreuse.engine.similarity import SimilarityGroups

__all__ = ["GroupRules", "InFlight", "WaitingRoom"]

# Choosing looks at this many of the oldest waiting sequences, so a long queue costs no more than a short one.
MAX_CANDIDATES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRules:
    """group_min_size waiting sequences of one prefix are admitted together, or whoever waited group_max_wait_s."""

    group_min_size: int = 1
    group_max_wait_s: float = 0.0
    max_queue_delay_s: float = 1.0
    group_similarity: float | None = None  # None: a group is a first block


class WaitingRoom:
    """Sequences that hold no memory yet."""

    def __init__(self, rules: GroupRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._queue: dict[Sequence, None] = {}  # arrival order, the preempted first
        self._group_sizes: Counter[bytes] = Counter()
        self._similar = None if rules.group_similarity is None else SimilarityGroups(rules.group_similarity)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Join at the end."""
        if self._similar is not None:
            sequence.group = self._similar.group_of(sequence.token_ids)
        self._queue[sequence] = None
        self._group_sizes[_group(sequence)] += 1

    def put_back(self, sequences: Collection[Sequence]) -> None:
        """Join in front of all others, in the given order."""
        self._queue = {**dict.fromkeys(sequences), **self._queue}
        self._group_sizes.update(map(_group, sequences))

    def remove(self, sequence: Sequence) -> None:
        """Leave; a sequence that is not here is ignored."""
        if sequence in self._queue:
            del self._queue[sequence]
            self._group_sizes -= Counter([_group(sequence)])  # forgets groups that are empty now

    def candidates(self, num_resident: Callable[[Sequence], int]) -> list[Sequence]:
        """The oldest few in the order in which to admit them now.

        First who has been passed over for too long, then whose prefix is resident, then the larger group, then arrival.
        `num_resident` tells how many tokens of a sequence's prefix are in the store.
        """
        now = self._clock()
        head = [s for s in islice(self._queue, MAX_CANDIDATES) if not self._is_held(s, now)]
        return sorted(
            head,
            key=lambda s: (
                not self.is_overdue(s),
                num_resident(s) == 0,
                -self._group_sizes[_group(s)],
                s.group,  # equally large groups of similar prompts one after the other
            ),
        )

    def is_overdue(self, sequence: Sequence) -> bool:
        """Whether it was passed over for too long."""
        return self._clock() - sequence.passed_over_s > self._rules.max_queue_delay_s

    def admit(self, chosen: Sequence) -> None:
        """`chosen` leaves to run: whoever stood before it starts to count the delay."""
        now = self._clock()
        for sequence in takewhile(lambda s: s is not chosen, self._queue):
            sequence.passed_over_s = min(sequence.passed_over_s, now)
        self.remove(chosen)

    def next_s(self) -> float:
        """When somebody may be admitted: -inf if somebody may now, inf while nobody is here."""
        if self._queue and self._rules.group_min_size <= 1:
            return -inf
        max_wait_s = self._rules.group_max_wait_s
        return min((-inf if s.is_let_go else s.answers.arrival_s + max_wait_s for s in self._queue), default=inf)

    def _is_held(self, sequence: Sequence, now: float) -> bool:
        """Whether its group is still to fill. Once let go, a sequence is not held again."""
        rules = self._rules
        is_full = self._group_sizes[_group(sequence)] >= rules.group_min_size
        if is_full or now - sequence.answers.arrival_s >= rules.group_max_wait_s:
            sequence.is_let_go = True
        return not sequence.is_let_go


def _group(sequence: Sequence) -> bytes:
    return sequence.group or (sequence.hasher.hashes[0] if sequence.hasher.hashes else b"")


class InFlight:
    """Single flight: which blocks a running prefill is computing, and who waits for them."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Sequence] = {}
        self._blocked_on: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        """How many sequences wait."""
        return len(self._blocked_on)

    def claim(self, sequence: Sequence, *, first_block: int) -> None:
        """`sequence` is going to compute its blocks from `first_block` on, but for those that others compute."""
        for block_hash in sequence.hashes()[first_block:]:
            self._owners.setdefault(block_hash, sequence)

    def block(self, sequence: Sequence, hashes: list[bytes]) -> bool:
        """Let `sequence` wait until the last of the leading hashes that somebody computes is committed or given up.

        False: the first is nobody's.
        """
        claimed = list(takewhile(self._owners.__contains__, hashes))
        if claimed:
            self._blocked_on[sequence] = claimed[-1]
        return bool(claimed)

    def settle(self, owner: Sequence, *, num_blocks: int | None = None) -> list[Sequence]:
        """The owner's claims on its first `num_blocks` blocks (None: all) end. Returns who need not wait any more."""
        done = {h for h in owner.hasher.hashes[:num_blocks] if self._owners.get(h) is owner}
        for block_hash in done:
            del self._owners[block_hash]
        woken = [sequence for sequence, awaited in self._blocked_on.items() if awaited in done] if done else []
        for sequence in woken:
            del self._blocked_on[sequence]
        return woken

    def forget(self, sequence: Sequence) -> None:
        """`sequence` does not wait any more (it was aborted)."""
        self._blocked_on.pop(sequence, None)
