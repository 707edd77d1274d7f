"""Who has which slots: contiguous spans of one pool, best fit, neighbours coalesced on free.

Knows slot numbers. Knows nothing of tokens, nodes or tensors, and moves no data. Not thread-safe by itself.

    slots   0        8            20      26           num_slots
            [ span A )[  free     )[ B    )[   free    )
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.cache.node import Node

__all__ = ["Span", "SpanAllocator"]


class Span:
    """Slots [start, start + length). Only its allocator changes it. owner: the node in it, None for a private span."""

    __slots__ = ("length", "owner", "start")

    def __init__(self, start: int, length: int) -> None:
        self.start = start
        self.length = length
        self.owner: Node | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def __repr__(self) -> str:
        return f"Span[{self.start}, {self.end})"


class SpanAllocator:
    """Every slot is free or in exactly one span. O(log n) per call in the number of distinct hole lengths."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        self.num_slots = num_slots
        self.num_free = 0
        self._used: dict[int, Span] = {}  # by start
        self._hole_lengths: dict[int, int] = {}  # by start
        self._hole_starts: dict[int, int] = {}  # by end
        self._bins: dict[int, list[int]] = {}  # length -> starts of the holes of that length
        self._places: dict[int, int] = {}  # start -> its place in its bin
        self._lengths: list[int] = []  # the keys of _bins, sorted
        if num_slots:
            self._add_hole(0, num_slots)

    @property
    def largest_free(self) -> int:
        """Length of the longest hole."""
        return self._lengths[-1] if self._lengths else 0

    def allocate(self, length: int, *, at: int | None = None) -> Span | None:
        """A span from the smallest hole that fits, or from the hole that begins `at`. None when there is none."""
        self._check_positive(length)
        start = self._best_fit(length) if at is None else at
        if start is None or self._hole_lengths.get(start, 0) < length:
            return None
        hole = self._take_hole(start)
        span = self._used[start] = Span(start, length)
        self._add_hole(span.end, hole - length)
        return span

    def grow(self, span: Span, extra: int) -> bool:
        """Lengthen in place by `extra` slots. False (nothing changed) when the slots behind it are not free."""
        self._check_owned(span)
        hole = self.hole_after(span)
        if extra > hole:
            return False
        if extra > 0:
            self._take_hole(span.end)
            span.length += extra
            self._add_hole(span.end, hole - extra)
        return True

    def free(self, span: Span) -> None:
        """Give all its slots back. Raises ValueError for a span that is not ours or was freed before."""
        self._check_owned(span)
        del self._used[span.start]
        self._free_range(span.start, span.length)

    def shrink(self, span: Span, length: int) -> None:
        """Give back all but its first `length` slots; 0 frees it."""
        if length == 0:
            self.free(span)
        elif length < span.length:
            self.free(self.split(span, length)[1])

    def split(self, span: Span, length: int) -> tuple[Span, Span]:
        """(front, rest): `span` keeps the first `length` slots, a new span holds the others (both non-empty)."""
        self._check_owned(span)
        if not 0 < length < span.length:
            raise ValueError(f"cannot split {span} at {length}")
        rest = Span(span.start + length, span.length - length)
        span.length = length
        self._used[rest.start] = rest
        return span, rest

    def cut(self, span: Span, length: int) -> tuple[Span, Span | None]:
        """Like split, but the rest may be empty: None."""
        return (span, None) if length == span.length else self.split(span, length)

    def join(self, front: Span, rest: Span) -> None:
        """`front` takes the slots of `rest`, which begins where it ends; `rest` is gone."""
        self._check_owned(front)
        self._check_owned(rest)
        if front.end != rest.start:
            raise ValueError(f"{front} and {rest} are not neighbours")
        del self._used[rest.start]
        front.length += rest.length

    def hole_before(self, span: Span) -> int:
        """Number of free slots that end where the span begins."""
        start = self._hole_starts.get(span.start)
        return 0 if start is None else span.start - start

    def hole_after(self, span: Span) -> int:
        """Number of free slots that begin where the span ends."""
        return self.hole_at(span.end)

    def hole_at(self, start: int) -> int:
        """Number of free slots of the hole that begins at `start`."""
        return self._hole_lengths.get(start, 0)

    def largest_holes(self, max_holes: int) -> list[int]:
        """Starts of the longest holes, longest first."""
        return list(islice((start for length in reversed(self._lengths) for start in self._bins[length]), max_holes))

    def used_at(self, start: int) -> Span | None:
        """The span that begins at `start`."""
        return self._used.get(start)

    def slide(self, span: Span, distance: int) -> None:
        """Renumber the span by `distance` slots (negative: down) into the hole beside it; the caller moves the data."""
        self._check_owned(span)
        before, after = self.hole_before(span), self.hole_after(span)
        if not -before <= distance <= after:
            raise ValueError(f"{span} cannot slide by {distance}")
        hole_start, hole_end = span.start - before, span.end + after
        self.free(span)
        self._take_hole(hole_start)
        span.start += distance
        self._used[span.start] = span
        self._add_hole(hole_start, span.start - hole_start)
        self._add_hole(span.end, hole_end - span.end)

    def used_spans(self) -> list[Span]:
        """All spans by address."""
        return [self._used[start] for start in sorted(self._used)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless spans and holes tile the pool and no two holes touch."""
        pieces = [(start, span.length, True) for start, span in self._used.items()]
        pieces += [(start, length, False) for start, length in self._hole_lengths.items()]
        position, was_hole = 0, False
        for start, length, used in sorted(pieces):
            _require(start == position and length > 0, f"gap or overlap at slot {position}")
            _require(used or not was_hole, f"two holes touch at slot {start}")
            position, was_hole = start + length, not used
        _require(position == self.num_slots, "the pieces do not fill the pool")
        _require(all(span.start == start for start, span in self._used.items()), "a span is filed under another start")
        _require(self.num_free == sum(self._hole_lengths.values()), "num_free is wrong")
        _require(self._hole_starts == {s + n: s for s, n in self._hole_lengths.items()}, "hole ends are wrong")
        binned = {start: length for length, starts in self._bins.items() for start in starts}
        _require(binned == self._hole_lengths and self._lengths == sorted(self._bins), "bins are wrong")

    def _best_fit(self, length: int) -> int | None:
        at = bisect_left(self._lengths, length)
        return self._bins[self._lengths[at]][-1] if at < len(self._lengths) else None

    def _free_range(self, start: int, length: int) -> None:
        end = start + length
        if end in self._hole_lengths:
            end += self._take_hole(end)
        before = self._hole_starts.get(start)
        if before is not None:
            self._take_hole(before)
            start = before
        self._add_hole(start, end - start)

    def _add_hole(self, start: int, length: int) -> None:
        if length == 0:
            return
        self._hole_lengths[start] = length
        self._hole_starts[start + length] = start
        self.num_free += length
        if length not in self._bins:
            self._bins[length] = []
            insort(self._lengths, length)
        self._places[start] = len(self._bins[length])
        self._bins[length].append(start)

    def _take_hole(self, start: int) -> int:
        length = self._hole_lengths.pop(start)
        del self._hole_starts[start + length]
        self.num_free -= length
        starts = self._bins[length]
        place, last = self._places.pop(start), starts.pop()
        if last != start:
            starts[place], self._places[last] = last, place
        if not starts:
            del self._bins[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length

    def _check_owned(self, span: Span) -> None:
        if self._used.get(span.start) is not span:
            raise ValueError(f"{span} is not in use here")

    @staticmethod
    def _check_positive(length: int) -> None:
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)
