"""The waiting room: arrival order, groups by first block, and who waits for a prefill that is under way.

Pure bookkeeping. Knows hashes and times. Knows nothing of memory or tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

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

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Join in front of all others, in the given order."""
        self._queue = {**dict.fromkeys(sequences), **self._queue}
        for sequence in sequences:
            self._group_sizes[_group(sequence)] += 1

    def remove(self, sequence: Sequence) -> None:
        """Leave; a sequence that is not here is ignored."""
        if sequence in self._queue:
            del self._queue[sequence]
            self._group_sizes[_group(sequence)] -= 1

    def candidates(self, num_resident: Callable[[Sequence], int]) -> list[Sequence]:
        """The oldest few in the order in which to admit them now.

        First who has been passed over for too long, then whose prefix is resident, then the larger group, then arrival.
        `num_resident` tells how many tokens of a sequence's prefix are in the store.
        """
        now = self._clock()
        head = [s for s in islice(self._queue, MAX_CANDIDATES) if not self._is_held(s, now)]
        if len(head) < 2:
            return head
        return sorted(
            head,
            key=lambda s: (
                not self._is_overdue(s, now),
                num_resident(s) == 0,
                -self._group_sizes[_group(s)],
                _group(s) if self._similar is not None else b"",  # equally large groups one after the other
            ),
        )

    def passed_over(self, chosen: Sequence) -> None:
        """`chosen` was admitted: whoever stood before it starts to count the delay."""
        now = self._clock()
        for sequence in self._queue:
            if sequence is chosen:
                break
            if sequence.passed_over_s is None:
                sequence.passed_over_s = now

    def held_until_s(self) -> float | None:
        """When the next sequence may go without its group; None while somebody may go now, or nobody is here."""
        if self._rules.group_min_size <= 1 or not self._queue or any(s.is_let_go for s in self._queue):
            return None
        return min(s.answers.arrival_s for s in self._queue) + self._rules.group_max_wait_s

    def _is_held(self, sequence: Sequence, now: float) -> bool:
        """Whether its group is still to fill. Once let go, a sequence is not held again."""
        rules = self._rules
        is_full = self._group_sizes[_group(sequence)] >= rules.group_min_size
        if is_full or now - sequence.answers.arrival_s >= rules.group_max_wait_s:
            sequence.is_let_go = True
        return not sequence.is_let_go

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        since = sequence.passed_over_s
        return since is not None and now - since > self._rules.max_queue_delay_s


def _group(sequence: Sequence) -> bytes:
    return sequence.group or (sequence.hasher.hashes[0] if sequence.hasher.hashes else b"")


class InFlight:
    """Single flight: which blocks a running prefill is computing, and who waits for them."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Sequence] = {}
        self._hashes: dict[Sequence, list[bytes]] = {}
        self._blocked: dict[bytes, list[Sequence]] = defaultdict(list)
        self._blocked_on: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        """How many sequences wait."""
        return len(self._blocked_on)

    def claim(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """`sequence` is going to compute these blocks."""
        mine = [h for h in hashes if self._owners.setdefault(h, sequence) is sequence]
        self._hashes[sequence] = mine

    def last_claimed(self, hashes: Iterable[bytes]) -> bytes | None:
        """The last of the leading hashes that somebody is computing; None when the first is nobody's."""
        last = None
        for block_hash in hashes:
            if block_hash not in self._owners:
                break
            last = block_hash
        return last

    def block(self, sequence: Sequence, block_hash: bytes) -> None:
        """Let `sequence` wait until `block_hash` is committed or given up."""
        self._blocked[block_hash].append(sequence)
        self._blocked_on[sequence] = block_hash

    def settle(self, owner: Sequence, *, num_blocks: int | None = None) -> list[Sequence]:
        """The owner's claims on its first `num_blocks` blocks (None: all) end. Returns who need not wait any more."""
        claimed = self._hashes.pop(owner, [])
        if num_blocks is not None:
            done = set(owner.hasher.hashes[:num_blocks])
            if rest := [h for h in claimed if h not in done]:
                self._hashes[owner] = rest
            claimed = [h for h in claimed if h in done]
        woken = []
        for block_hash in claimed:
            del self._owners[block_hash]
            woken.extend(self._blocked.pop(block_hash, []))
        for sequence in woken:
            del self._blocked_on[sequence]
        return woken

    def forget(self, sequence: Sequence) -> None:
        """`sequence` does not wait any more (it was aborted)."""
        block_hash = self._blocked_on.pop(sequence, None)
        if block_hash is not None:
            self._blocked[block_hash].remove(sequence)
            if not self._blocked[block_hash]:
                del self._blocked[block_hash]
