"""The span allocator against a naive map of slots."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvreuse.cache.spans import Span, SpanAllocator

NUM_SLOTS = 60


class SpansMatchANaiveMap(RuleBasedStateMachine):
    """`self.slots[i]` is the span that owns slot i, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = SpanAllocator(NUM_SLOTS)
        self.slots: list[Span | None] = [None] * NUM_SLOTS
        self.live: list[Span] = []

    def holes(self) -> dict[int, int]:
        holes, start = {}, None
        for i, owner in enumerate([*self.slots, Span(0, 0)]):
            if owner is None and start is None:
                start = i
            elif owner is not None and start is not None:
                holes[start], start = i - start, None
        return holes

    def own(self, span: Span) -> None:
        self.slots = [None if owner is span else owner for owner in self.slots]
        assert all(owner is None for owner in self.slots[span.start : span.end])
        self.slots[span.start : span.end] = [span] * span.length

    @rule(length=st.integers(1, 20))
    def allocate(self, length: int) -> None:
        fitting = [hole for hole in self.holes().values() if hole >= length]
        span = self.spans.allocate(length)
        assert (span is None) == (not fitting)
        if span is not None:
            assert self.holes()[span.start] == min(fitting)
            self.own(span)
            self.live.append(span)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.integers(0, 15))
    def grow(self, data: st.DataObject, extra: int) -> None:
        span = data.draw(st.sampled_from(self.live))
        room = self.holes().get(span.end, 0)
        assert self.spans.grow(span, extra) == (extra <= room)
        self.own(span)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(self.live))
        self.spans.free(span)
        self.live.remove(span)
        self.slots = [None if owner is span else owner for owner in self.slots]
        with pytest.raises(ValueError, match="not in use"):
            self.spans.free(span)

    @precondition(lambda self: any(span.length > 1 for span in self.live))
    @rule(data=st.data())
    def split_and_perhaps_join(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from([span for span in self.live if span.length > 1]))
        end = span.end
        rest = self.spans.split(span, data.draw(st.integers(1, span.length - 1)))
        assert span.end == rest.start and rest.end == end
        if data.draw(st.booleans()):
            self.spans.join(span, rest)
            assert span.end == end
        else:
            self.own(span)
            self.own(rest)
            self.live.append(rest)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), down=st.booleans())
    def slide(self, data: st.DataObject, down: bool) -> None:
        span = data.draw(st.sampled_from(self.live))
        below = next((start for start, length in self.holes().items() if start + length == span.start), span.start)
        target = below if down else span.start + self.holes().get(span.end, 0)
        has_hole = target != span.start
        assert self.spans.slide(span, down=down) == has_hole
        assert span.start == target
        self.own(span)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(1, span.length))
        self.spans.shrink(span, length)
        assert span.length == length
        self.own(span)

    @invariant()
    def agrees(self) -> None:
        self.spans.check_integrity()
        holes = self.holes()
        assert self.spans.num_free == sum(holes.values())
        assert self.spans.largest_free == max(holes.values(), default=0)
        assert sorted(self.spans.largest_holes(99)) == sorted(holes)
        for span in self.live:
            assert self.slots[span.start : span.end] == [span] * span.length


SpansMatchANaiveMap.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSpans = SpansMatchANaiveMap.TestCase


def test_best_fit_leaves_the_long_hole_whole() -> None:
    spans = SpanAllocator(100)
    parts = [spans.allocate(length) for length in (10, 5, 20, 5)]
    for part in (parts[0], parts[2]):
        assert part is not None
        spans.free(part)
    small = spans.allocate(9)
    assert small is not None and small.start == 0
    assert spans.largest_free == 60
    spans.check_integrity()


def test_a_stretch_at_a_given_place_is_given_only_there() -> None:
    spans = SpanAllocator(10)
    first = spans.allocate(4)
    assert first is not None and spans.allocate(3, at=0) is None and spans.allocate(3, at=5) is None
    second = spans.allocate(3, at=4)
    assert second is not None and second.start == 4
    spans.check_integrity()


@pytest.mark.parametrize("length", [0, -1])
def test_an_empty_span_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        SpanAllocator(4).allocate(length)
