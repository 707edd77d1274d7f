"""Who has which slots: contiguous spans of one pool, best fit, neighbours coalesced on free.

Knows slot numbers. Knows nothing of tokens, nodes or tensors, and moves no data. Not thread-safe by itself.

    slots   0        8            20      26           num_slots
            [ span A )[  free     )[ B    )[   free    )
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.cache.node import Node

__all__ = ["Span", "SpanAllocator", "join_run"]


@dataclass(eq=False, slots=True)
class Span:
    """Slots [start, start + length). Only its allocator changes it. owner: the node in it, None for a private span."""

    start: int
    length: int
    owner: Node | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def __repr__(self) -> str:
        return f"Span[{self.start}, {self.end})"


class SpanAllocator:
    """Every slot is free or in exactly one span. O(log n) per call in the number of distinct hole lengths."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = 0
        self._used: dict[int, Span] = {}  # by start
        self._hole_lengths: dict[int, int] = {}  # by start
        self._hole_starts: dict[int, int] = {}  # by end
        self._bins: dict[int, dict[int, None]] = {}  # length -> starts of the holes of that length
        self._lengths: list[int] = []  # the keys of _bins, sorted
        self._add_hole(0, num_slots)

    @property
    def largest_free(self) -> int:
        """Length of the longest hole."""
        return self._lengths[-1] if self._lengths else 0

    def allocate(self, length: int, *, at: int | None = None) -> Span | None:
        """A span from the smallest hole that fits, or from the hole that begins `at`. None when there is none."""
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")
        if at is None:
            fitting = bisect_left(self._lengths, length)
            if fitting == len(self._lengths):
                return None
            at = next(reversed(self._bins[self._lengths[fitting]]))
        elif self.hole_at(at) < length:
            return None
        span = Span(at, length)
        self._place(span, at)
        return span

    def grow(self, span: Span, extra: int) -> bool:
        """Lengthen in place by `extra` slots. False (nothing changed) when the slots behind it are not free."""
        hole = self.hole_at(span.end)
        if extra > hole:
            return False
        if extra > 0:
            self._take_hole(span.end)
            span.length += extra
            self._add_hole(span.end, hole - extra)
        return True

    def free(self, span: Span) -> None:
        """Give all its slots back. Raises ValueError for a span that is not ours or was freed before."""
        if self._used.get(span.start) is not span:
            raise ValueError(f"{span} is not in use here")
        del self._used[span.start]
        start, end = span.start - self.hole_before(span), span.end + self.hole_at(span.end)
        if start < span.start:
            self._take_hole(start)
        if end > span.end:
            self._take_hole(span.end)
        self._add_hole(start, end - start)

    def shrink(self, span: Span, length: int) -> None:
        """Give back all but its first `length` slots; 0 frees it."""
        if length == 0:
            self.free(span)
        elif length < span.length:
            self.free(self.split(span, length))

    def split(self, span: Span, length: int) -> Span:
        """`span` keeps its first `length` slots, a new span holds the others (both non-empty)."""
        rest = Span(span.start + length, span.length - length)
        span.length = length
        self._used[rest.start] = rest
        return rest

    def cut(self, span: Span, length: int) -> tuple[Span, Span | None]:
        """(front, rest), of which the rest may be empty: None."""
        return span, None if length == span.length else self.split(span, length)

    def join(self, front: Span, rest: Span) -> None:
        """`front` takes the slots of `rest`, which begins where it ends; `rest` is gone."""
        del self._used[rest.start]
        front.length += rest.length

    def hole_before(self, span: Span) -> int:
        """Number of free slots that end where the span begins."""
        return span.start - self._hole_starts.get(span.start, span.start)

    def hole_at(self, start: int) -> int:
        """Number of free slots of the hole that begins at `start`."""
        return self._hole_lengths.get(start, 0)

    def largest_holes(self, max_holes: int) -> list[int]:
        """Starts of the longest holes, longest first."""
        return list(islice((start for length in reversed(self._lengths) for start in self._bins[length]), max_holes))

    def used_at(self, start: int) -> Span | None:
        """The span that begins at `start`."""
        return self._used.get(start)

    def slide(self, span: Span, *, down: bool) -> bool:
        """Renumber it to the far end of the hole below (or above) it; the caller moves the data. False: no hole."""
        distance = -self.hole_before(span) if down else self.hole_at(span.end)
        if distance:
            hole_start = span.start - self.hole_before(span)
            self.free(span)
            span.start += distance
            self._place(span, hole_start)
        return distance != 0

    def used_spans(self) -> list[Span]:
        """All spans by address."""
        return [self._used[start] for start in sorted(self._used)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless spans and holes tile the pool and no two holes touch."""
        pieces = [(start, span.length, True) for start, span in self._used.items()]
        pieces += [(start, length, False) for start, length in self._hole_lengths.items()]
        position, was_hole = 0, False
        for start, length, used in sorted(pieces):
            require(start == position and length > 0, f"gap or overlap at slot {position}")
            require(used or not was_hole, f"two holes touch at slot {start}")
            position, was_hole = start + length, not used
        require(position == self.num_slots, "the pieces do not fill the pool")
        require(all(span.start == start for start, span in self._used.items()), "a span is filed under another start")
        require(self.num_free == sum(self._hole_lengths.values()), "num_free is wrong")
        require(self._hole_starts == {s + n: s for s, n in self._hole_lengths.items()}, "hole ends are wrong")
        binned = {start: length for length, starts in self._bins.items() for start in starts}
        require(binned == self._hole_lengths and self._lengths == sorted(self._bins), "bins are wrong")

    def _place(self, span: Span, hole_start: int) -> None:
        """The span takes its slots out of the hole that begins there."""
        hole_end = hole_start + self._take_hole(hole_start)
        self._used[span.start] = span
        self._add_hole(hole_start, span.start - hole_start)
        self._add_hole(span.end, hole_end - span.end)

    def _add_hole(self, start: int, length: int) -> None:
        if length == 0:
            return
        self._hole_lengths[start] = length
        self._hole_starts[start + length] = start
        self.num_free += length
        if length not in self._bins:
            self._bins[length] = {}
            insort(self._lengths, length)
        self._bins[length][start] = None

    def _take_hole(self, start: int) -> int:
        length = self._hole_lengths.pop(start)
        del self._hole_starts[start + length]
        self.num_free -= length
        starts = self._bins[length]
        del starts[start]
        if not starts:
            del self._bins[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length


def join_run(runs: list[tuple[int, int]], start: int, length: int) -> None:
    """Append a run, or lengthen the last one when it ends where this begins."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    else:
        runs.append((start, length))


def require(is_right: bool, what: str) -> None:
    """Raises AssertionError for an invariant that does not hold."""
    if not is_right:
        raise AssertionError(what)
