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

# Copying a slot is some hundred times cheaper than computing it again, and one in ten evicted slots is asked for again:
# so many slots may be copied per slot wanted before more is evicted instead.
_MAX_COPIES = 8
_MAX_HOLES_TRIED = 64
_NUM_EXTRA_STEPS = 4


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
        if short > self._evictor.num_evictable or not self._can_ever_fit(lease, own, num_slots, others=others):
            return False
        self._evictor.evict(short)
        return self._make_room(lease, own, num_slots, num_live=num_live)

    def compact(self) -> int:
        """Slide every unpinned node down; returns how many slots were copied."""
        return sum(max(0, self._slide(span, set(), down=True)) for span in self._nodes_by_address())

    def _make_room(self, lease: Lease, own: set[Node], num_slots: int, *, num_live: int) -> bool:
        """Enough is free, or can be, in one stretch: compact nearby, else evict a little more, else compact all."""
        num_steps = 0
        while not self._fit(lease, num_slots, num_live):
            if self._join_holes(lease, own, num_slots):
                continue
            if num_steps >= _NUM_EXTRA_STEPS or not self._evictor.num_evictable:
                self._squeeze(lease, own)
                if self._fit(lease, num_slots, num_live):
                    return True
            num_steps += 1
            if not self._evictor.evict(max(1, num_slots // _NUM_EXTRA_STEPS)):
                return False
        return True

    def _fit(self, lease: Lease, num_slots: int, num_live: int) -> bool:
        """Find room without touching anything else's slots."""
        private = lease.private
        if private is None:
            # Behind the chain the sequence stays one physical run.
            behind = sum(lease.node_runs[-1]) if lease.node_runs else self._spans.num_slots
            lease.private = self._spans.allocate(num_slots, at=behind) or self._spans.allocate(num_slots)
            return lease.private is not None
        extra = num_slots - private.length
        if self._spans.grow(private, extra):
            return True
        if self._spans.hole_before(private) + self._spans.hole_after(private) >= extra:
            self._move(private, -self._spans.hole_before(private))
            return self._spans.grow(private, extra)
        larger = self._spans.allocate(num_slots)
        if larger is None:
            return False
        if num_live:
            self._move_slots(private.start, larger.start, num_live)
        self._spans.free(private)
        lease.private = larger
        return True

    def _can_ever_fit(self, lease: Lease, own: set[Node], num_slots: int, *, others: Collection[Lease]) -> bool:
        """Would num_slots fit between two things that may not move if all that is unpinned were evicted?"""
        fixed = [node.span for node in self._tree.pinned() if node not in own]
        fixed += [other.private for other in others if other is not lease and other.private is not None]
        begin = 0
        for span in [*sorted(fixed, key=lambda span: span.start), Span(self._spans.num_slots, 0)]:
            room = span.start - begin
            if room >= num_slots + sum(node.span.length for node in own if begin <= node.span.start < span.start):
                return True
            begin = span.end
        return False

    def _join_holes(self, lease: Lease, own: set[Node], num_slots: int) -> bool:
        """Slide a few neighbours so that the span fits. False: too much would be copied, or something must stay."""
        plan: list[Span] | None = None
        extra = num_slots - lease.num_private_slots
        if lease.private is not None:
            plan = self._walk_up(lease, own, lease.private.end, wanted=extra, max_copies=_MAX_COPIES * num_slots)
            if plan is not None:
                return self._slide_all(reversed(plan), lease, own, down=False)
        max_copies = _MAX_COPIES * num_slots
        for start in self._spans.largest_holes(_MAX_HOLES_TRIED):
            path = self._walk_up(lease, own, start, wanted=num_slots, max_copies=max_copies)
            if path is not None:
                plan, max_copies = path, sum(span.length for span in path) - 1
        return plan is not None and self._slide_all(plan, lease, own, down=True)

    def _walk_up(self, lease: Lease, own: set[Node], start: int, *, wanted: int, max_copies: int) -> list[Span] | None:
        """The spans from `start` upwards that have `wanted` free slots before, between and behind them."""
        path: list[Span] = []
        free = self._spans.hole_at(start)
        end = start + free
        while free < wanted:
            span = self._spans.used_at(end)
            if span is None or not (span is lease.private or self._may_move(span, own)):
                return None
            max_copies -= span.length
            if max_copies < 0:
                return None
            path.append(span)
            hole = self._spans.hole_after(span)
            free += hole
            end = span.end + hole
        return path

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

    def _slide_all(self, spans: Iterable[Span], lease: Lease, own: set[Node], *, down: bool) -> bool:
        """Slide one after the other; False when one of them had to stay."""
        is_done = True
        for span in spans:
            is_done = self._slide(span, own, down=down) >= 0 and is_done
        lease.node_runs.clear()
        for node in reversed(list(lease.chain())):
            join_run(lease.node_runs, node.span.start, node.span.length)
        return is_done

    def _slide(self, span: Span, own: set[Node], *, down: bool) -> int:
        """Move a span to the other end of the hole beside it: slots copied, or -1 when it must stay."""
        node = span.owner
        with nullcontext() if node is None else self._tree.bucket_of(node).lock:
            if node is not None and not self._may_move(span, own):
                return -1
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
