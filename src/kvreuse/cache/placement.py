"""Room for the private span of a lease: in place, elsewhere, by eviction, by compaction.

Knows slots and who may move. Knows nothing of hashes or policies. All under the structure lock.

What others pin, and their private spans, never move. Unpinned nodes, and what the asking lease alone holds, may slide:

    [ pinned )[ node )    [ node )[ node )      [ private span of another )
    [ pinned )[ node )[ node )[ node )          [ private span of another )    after sliding down
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext

from kvreuse.cache.eviction import Evictor
from kvreuse.cache.lease import Lease, join_run
from kvreuse.cache.node import Node
from kvreuse.cache.spans import Span, SpanAllocator
from kvreuse.cache.tree import PrefixTree

__all__ = ["Placer"]

_MAX_HOLES_TRIED = 16
# Copying a slot is some hundred times cheaper than computing it again, and few evicted slots are asked for again: so
# many may be copied per slot wanted before more is evicted instead.
_MAX_COPIES = 8
# What is evicted beyond the need, in shares of it, before everything is compacted.
_EXTRA_SHARES = (0.125, 0.25, 0.5, 1.0)


class Placer:
    """move_slots(src, dst, length) copies KV; the ranges may overlap. num_moves counts slides, in spans."""

    def __init__(
        self, tree: PrefixTree, spans: SpanAllocator, *, evictor: Evictor, move_slots: Callable[[int, int, int], None]
    ) -> None:
        self.num_moves = 0
        self._tree = tree
        self._spans = spans
        self._evictor = evictor
        self._move_slots = move_slots

    def reserve(self, lease: Lease, num_slots: int, *, num_live: int, others: Collection[Lease]) -> bool:
        """Make the private span num_slots long and keep its first num_live slots' content.

        False: no room now; nothing changed, unless a concurrent match pinned what was about to be evicted.
        """
        short = num_slots - lease.num_private_slots - self._spans.num_free
        if short <= 0 and self._fit(lease, num_slots, num_live):
            return True
        own = {node for node in lease.chain() if node.pins == 1}
        if not self._can_ever_fit(lease, own, num_slots, others=others):
            return False
        self._evictor.evict(short)
        return self._make_room(lease, own, num_slots, num_live=num_live)

    def compact(self) -> int:
        """Slide every unpinned node down; returns how many slots were copied."""
        return sum(self._slide(span, set(), down=True) for span in self._nodes_by_address())

    def _make_room(self, lease: Lease, own: set[Node], num_slots: int, *, num_live: int) -> bool:
        """Enough is free, or can be, in one stretch: compact nearby, else evict a little more, else compact all."""
        shares = iter(_EXTRA_SHARES)
        while not self._clear(lease, num_slots, num_live):
            share = next(shares, None) if self._evictor.num_evictable else None
            if share is None or self._tree.num_node_slots <= _MAX_COPIES * num_slots:
                self._squeeze(lease, own)
                if self._fit(lease, num_slots, num_live):
                    return True
            if not self._evictor.evict(max(1, int((share or 1.0) * num_slots))):
                return False
        return True

    def _fit(self, lease: Lease, num_slots: int, num_live: int) -> bool:
        """Find room without touching anything else's slots."""
        private = lease.private
        if private is None:
            if lease.node_runs:  # behind the chain the sequence stays one physical run
                lease.private = self._spans.allocate(num_slots, at=sum(lease.node_runs[-1]))
            lease.private = lease.private or self._spans.allocate(num_slots)
            return lease.private is not None
        extra = num_slots - private.length
        if self._spans.grow(private, extra):
            return True
        if self._spans.hole_before(private) + self._spans.hole_after(private) >= extra:
            self._move(private, -self._spans.hole_before(private))
            return self._spans.grow(private, extra)
        larger = self._spans.allocate(num_slots)
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

    def _can_ever_fit(self, lease: Lease, own: set[Node], num_slots: int, *, others: Collection[Lease]) -> bool:
        """Would num_slots fit between two things that may not move if all that is unpinned were evicted?"""
        fixed = [node.span for node in self._tree.pinned() if node not in own]
        fixed += [other.private for other in others if other is not lease and other.private is not None]
        begin = 0
        for start, end in [*sorted((span.start, span.end) for span in fixed), (self._spans.num_slots, 0)]:
            if start - begin >= num_slots + sum(node.span.length for node in own if begin <= node.span.start < start):
                return True
            begin = end
        return False

    def _clear(self, lease: Lease, num_slots: int, num_live: int) -> bool:
        """Find room, or make it behind the private span or behind a hole by moving a few unpinned nodes away."""
        if self._fit(lease, num_slots, num_live):
            return True
        if lease.private is not None and self._enlarge(lease.private, num_slots):
            return True
        claim = self._claim_hole(num_slots) if self._spans.num_free >= num_slots else None
        if claim is None:
            return False
        if self._enlarge(claim, num_slots):
            self._settle(lease, claim, num_live)
            return True
        self._spans.free(claim)
        return False

    def _enlarge(self, claim: Span, num_slots: int) -> bool:
        """Grow by moving the nodes behind it into other holes. False: as long as it was."""
        num_before = claim.length
        while claim.length < num_slots:
            missing = num_slots - claim.length
            hole = self._spans.hole_after(claim)
            if hole:
                self._spans.grow(claim, min(hole, missing))
            elif not self._move_away(claim.end, max_slots=missing):
                self._spans.shrink(claim, num_before)
                return False
        return True

    def _claim_hole(self, num_slots: int) -> Span | None:
        """The longest hole that only unpinned nodes keep from being num_slots long."""
        for start in self._spans.largest_holes(_MAX_HOLES_TRIED):
            end = start + self._spans.hole_at(start)
            while end - start < num_slots:
                span = self._spans.used_at(end)
                if span is None or span.owner is None or span.owner.pins:
                    break
                end = span.end + self._spans.hole_after(span)
            else:
                return self._spans.allocate(min(self._spans.hole_at(start), num_slots), at=start)
        return None

    def _move_away(self, start: int, *, max_slots: int) -> bool:
        """Move the node at `start`, or as much of its head as is in the way and fits elsewhere, into another hole."""
        span = self._spans.used_at(start)
        node = None if span is None else span.owner
        size = self._tree.block_size
        max_blocks = min(-(-max_slots // size), self._spans.largest_free // size)
        if node is None or node.pins or not max_blocks:
            return False
        if node.num_blocks > max_blocks:
            node = self._tree.split(node, max_blocks)
        target = self._spans.allocate(node.span.length)
        if target is None:
            return False
        with self._tree.bucket_of(node).lock:
            leaves = target if node.pins else node.span
            if leaves is not target:
                self._move_slots(node.span.start, target.start, target.length)
                node.span, target.owner = target, node
                self.num_moves += 1
        self._spans.free(leaves)
        return leaves is not target

    def _squeeze(self, lease: Lease, own: set[Node]) -> None:
        """Slide all that may move: down, but away from the end of the private span, which must grow."""
        spans = self._nodes_by_address()
        private = lease.private
        if private is None:
            self._slide_all(spans, lease, own, down=True)
            return
        self._slide_all([span for span in spans if span.start < private.start], lease, own, down=True)
        self._move(private, -self._spans.hole_before(private))
        self._slide_all([span for span in reversed(spans) if span.start > private.start], lease, own, down=False)

    def _slide_all(self, spans: Iterable[Span], lease: Lease, own: set[Node], *, down: bool) -> None:
        for span in spans:
            self._slide(span, own, down=down)
        lease.node_runs.clear()
        for node in reversed(list(lease.chain())):
            join_run(lease.node_runs, node.span.start, node.span.length)

    def _slide(self, span: Span, own: set[Node], *, down: bool) -> int:
        """Move a span to the other end of the hole beside it: slots copied, 0 when it must stay."""
        node = span.owner
        with nullcontext() if node is None else self._tree.bucket_of(node).lock:
            if node is not None and not self._may_move(span, own):
                return 0
            return self._move(span, -self._spans.hole_before(span) if down else self._spans.hole_after(span))

    def _move(self, span: Span, distance: int) -> int:
        if distance == 0:
            return 0
        start = span.start
        self._spans.slide(span, distance)
        self._move_slots(start, span.start, span.length)
        self.num_moves += 1
        return span.length

    def _nodes_by_address(self) -> list[Span]:
        return [span for span in self._spans.used_spans() if span.owner is not None]

    @staticmethod
    def _may_move(span: Span, own: set[Node]) -> bool:
        node = span.owner
        return node is not None and (node.pins == 0 or (node.pins == 1 and node in own))
