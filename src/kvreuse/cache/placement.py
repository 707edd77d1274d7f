"""Room for the private span of a lease: in place, elsewhere, by eviction, by compaction.

Knows slots and who may move. Knows nothing of hashes or policies. All under the structure lock.

What others pin, and their private spans, never move. Unpinned nodes, and what the asking lease alone holds, may slide:

    [ pinned )[ node )    [ node )[ node )      [ private span of another )
    [ pinned )[ node )[ node )[ node )          [ private span of another )    after sliding down
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvreuse.cache.eviction import Evictor
from kvreuse.cache.lease import Lease, pinned_nodes
from kvreuse.cache.node import Node
from kvreuse.cache.spans import Span
from kvreuse.cache.tree import PrefixTree

__all__ = ["Placer"]

_MAX_HOLES_TRIED = 16
# Copying a slot is some hundred times cheaper than computing it again, and few evicted slots are asked for again: so
# many may be copied per slot wanted before more is evicted instead.
_MAX_COPIES = 8
# What is evicted beyond the need before everything is compacted: this share of it, doubled until it is all of it again.
_EXTRA_SHARE = 1 / 8


class Placer:
    """move_slots(src, dst, length) copies KV; the ranges may overlap. Counts moved spans in `counts`."""

    def __init__(
        self, tree: PrefixTree, evictor: Evictor, *, counts: Counter[str], move_slots: Callable[[int, int, int], None]
    ) -> None:
        self._tree = tree
        self._spans = tree.spans
        self._evictor = evictor
        self._counts = counts
        self._move_slots = move_slots

    def reserve(self, lease: Lease, num_slots: int, *, num_live: int, leases: Callable[[], list[Lease]]) -> bool:
        """Make the private span num_slots long and keep its first num_live slots' content. leases: tells the open ones.

        False: no room now; nothing changed, unless a concurrent match pinned what was about to be evicted.
        """
        short = num_slots - lease.num_private_slots - self._spans.num_free
        if short <= 0 and self._fit(lease, num_slots, num_live):
            return True
        own = {node for node in lease.chain() if node.pins == 1}
        others = leases()
        fixed = [node.span for node in pinned_nodes(others) - own]
        fixed += [other.private for other in others if other is not lease and other.private is not None]
        if not self._can_ever_fit(fixed, own, num_slots):
            return False
        self._evictor.evict(short)
        return self._make_room(lease, own, num_slots, num_live=num_live)

    def compact(self) -> int:
        """Slide every unpinned node down; returns how many slots were copied."""
        return sum(self._slide_node(span, set(), down=True) for span in self._spans.used_spans())

    def _make_room(self, lease: Lease, own: set[Node], num_slots: int, *, num_live: int) -> bool:
        """Enough is free, or can be, in one stretch: compact nearby, else evict a little more, else compact all."""
        extra = _EXTRA_SHARE * num_slots
        while not self._clear(lease, num_slots, num_live):
            is_costly = extra <= num_slots and self._tree.num_node_slots > _MAX_COPIES * num_slots
            if not is_costly or not self._evictor.evict(max(1, int(extra))):
                self._squeeze(lease, own)
                if self._fit(lease, num_slots, num_live):
                    return True
                if not self._evictor.evict(num_slots):
                    return False
            extra *= 2
        return True

    def _fit(self, lease: Lease, num_slots: int, num_live: int) -> bool:
        """Find room without touching anything else's slots."""
        larger = None
        if lease.private is not None:
            if self._spans.grow(lease.private, num_slots - lease.private.length):
                return True
        elif lease.node_runs:  # behind the chain the sequence stays one physical run
            larger = self._spans.allocate(num_slots, at=sum(lease.node_runs[-1]))
        larger = larger or self._spans.allocate(num_slots)
        if larger is not None:
            self._settle(lease, larger, num_live)
        return larger is not None

    def _settle(self, lease: Lease, larger: Span, num_live: int) -> None:
        """`larger` becomes the private span."""
        if lease.private is not None:
            if num_live:
                self._move_slots(lease.private.start, larger.start, num_live)
            self._spans.free(lease.private)
        lease.private = larger

    def _can_ever_fit(self, fixed: list[Span], own: set[Node], num_slots: int) -> bool:
        """Would num_slots fit between two things that may not move if all that is unpinned were evicted?"""
        begin = 0
        for start, end in [*sorted((span.start, span.end) for span in fixed), (self._spans.num_slots, 0)]:
            if start - begin >= num_slots + sum(node.span.length for node in own if begin <= node.span.start < start):
                return True
            begin = end
        return False

    def _clear(self, lease: Lease, num_slots: int, num_live: int) -> bool:
        """Find room, or make it behind the private span or in a hole by moving the unpinned nodes behind it away."""
        if self._fit(lease, num_slots, num_live):
            return True
        if lease.private is not None and self._enlarge(lease.private, num_slots):
            return True
        holes = self._spans.largest_holes(_MAX_HOLES_TRIED) if self._spans.num_free >= num_slots else []
        start = next((start for start in holes if self._is_clearable(start, start + num_slots)), None)
        claim = None if start is None else self._spans.allocate(self._spans.hole_at(start), at=start)
        if claim is None:
            return False
        if self._enlarge(claim, num_slots):
            self._settle(lease, claim, num_live)
            return True
        self._spans.free(claim)
        return False

    def _is_clearable(self, start: int, end: int) -> bool:
        """Is nothing in [start, end) but holes and unpinned nodes? A hole or a span begins at `start`."""
        while (start := start + self._spans.hole_at(start)) < end:
            span = self._spans.used_at(start)
            if span is None or span.owner is None or span.owner.pins:
                return False
            start = span.end
        return True

    def _enlarge(self, claim: Span, num_slots: int) -> bool:
        """Grow by moving the nodes behind it into other holes. False: as long as it was."""
        num_before = claim.length
        while claim.length < num_slots:
            missing = num_slots - claim.length
            hole = self._spans.hole_at(claim.end)
            if hole:
                self._spans.grow(claim, min(hole, missing))
            elif not self._move_away(claim.end, max_slots=missing):
                self._spans.shrink(claim, num_before)
                return False
        return True

    def _move_away(self, start: int, *, max_slots: int) -> bool:
        """Move the node at `start`, or as much of its head as is in the way and fits elsewhere, into another hole."""
        span, size = self._spans.used_at(start), self._tree.block_size
        node = None if span is None else span.owner
        max_blocks = min(-(-max_slots // size), self._spans.largest_free // size)
        if node is None or node.pins or not max_blocks:
            return False
        if node.num_blocks > max_blocks:
            node = self._tree.split(node, max_blocks)
        left = self._spans.allocate(node.span.length)
        assert left is not None
        with self._tree.bucket(node.hashes).lock:
            is_free = not node.pins
            if is_free:
                self._move_slots(node.span.start, left.start, left.length)
                node.span, left = left, node.span
                node.span.owner = node
                self._counts["num_moves"] += 1
        self._spans.free(left)
        return is_free

    def _squeeze(self, lease: Lease, own: set[Node]) -> None:
        """Slide all that may move: down, but away from the end of the private span, which must grow."""
        spans, private = self._spans.used_spans(), lease.private
        at = len(spans) if private is None else spans.index(private)
        for span in spans[:at]:
            self._slide_node(span, own, down=True)
        if private is not None:
            self._slide(private, down=True)
        for span in reversed(spans[at + 1 :]):
            self._slide_node(span, own, down=False)
        lease.node_runs = lease.chain_runs()

    def _slide_node(self, span: Span, own: set[Node], *, down: bool) -> int:
        """Slide a span unless it is private or its node pinned by others: number of slots copied."""
        node = span.owner
        if node is None:
            return 0
        with self._tree.bucket(node.hashes).lock:
            return 0 if node.pins > (node in own) else self._slide(span, down=down)

    def _slide(self, span: Span, *, down: bool) -> int:
        start = span.start
        if not self._spans.slide(span, down=down):
            return 0
        self._move_slots(start, span.start, span.length)
        self._counts["num_moves"] += 1
        return span.length
