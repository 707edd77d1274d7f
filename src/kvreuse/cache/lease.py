"""What one reader or writer holds: a pinned chain of nodes, and one private span behind it.

Knows positions and slots. Knows nothing of matching or eviction; it belongs to the thread that acquired it.

    position   0              num_committed_tokens        room_end
               [ nodes, pinned )[ private span, own slots )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from kvreuse.cache.node import Node
from kvreuse.cache.spans import Span
from kvreuse.types import MissReason, Scope

__all__ = ["Lease"]


class Lease:
    """Made by PrefixCache.acquire; released on exit of its `with`, or by PrefixCache.release.

    num_cached_tokens: matched at admission, fixed. num_committed_tokens: positions [0, n) live in nodes.
    miss_reason, diverged_at: why not more matched (see MissReason).
    """

    __slots__ = (
        "_on_exit", "diverged_at", "hashes", "is_released", "keeps", "miss_reason", "node_runs", "num_cached_tokens",
        "num_committed_tokens", "private", "scope", "tail", "written",
    )  # fmt: skip

    def __init__(self, scope: Scope, *, hashes: list[bytes], keeps: bool, on_exit: Callable[[Lease], None]) -> None:
        self.scope = scope
        self.num_cached_tokens = 0
        self.num_committed_tokens = 0
        self.miss_reason: MissReason | None = None
        self.diverged_at: int | None = None
        # The rest is the store's.
        self.hashes = hashes
        self.keeps = keeps  # False: commit stores nothing (reuse off, or purged meanwhile)
        self.tail: Node | None = None  # last node of the pinned chain
        self.written: Node | None = None  # the node that this lease made and may extend
        self.private: Span | None = None
        self.node_runs: list[tuple[int, int]] = []
        self.is_released = False
        self._on_exit = on_exit

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_exit(self)

    @property
    def num_private_slots(self) -> int:
        return self.private.length if self.private else 0

    @property
    def room_end(self) -> int:
        """Positions [num_committed_tokens, room_end) have private slots."""
        return self.num_committed_tokens + self.num_private_slots

    def check_open(self) -> None:
        """Raises ValueError when it is released."""
        if self.is_released:
            raise ValueError("the lease is released")

    def chain(self) -> Iterator[Node]:
        """The pinned nodes, deepest first. Under the structure lock."""
        node = self.tail
        while node is not None and not node.is_root:
            yield node
            node = node.parent

    def runs(self, num_tokens: int) -> list[tuple[int, int]]:
        """Physical (start, length) runs that hold positions [0, num_tokens), neighbours joined.

        Raises ValueError when the lease holds fewer positions. Stays right until the next reserve, trim, commit or
        release of this lease; what others do never moves it.
        """
        if not 0 <= num_tokens <= self.room_end:
            raise ValueError(f"{num_tokens} tokens asked of a lease that holds {self.room_end}")
        out: list[tuple[int, int]] = []
        left = num_tokens
        for start, length in self._all_runs():
            if left <= 0:
                break
            join_run(out, start, min(length, left))
            left -= length
        return out

    def slot(self, position: int) -> int:
        """The physical slot of a position. Raises ValueError outside [0, room_end)."""
        if self.private is not None and 0 <= position - self.num_committed_tokens < self.private.length:
            return self.private.start + position - self.num_committed_tokens
        if not 0 <= position < self.num_committed_tokens:
            raise ValueError(f"position {position} is not held, the lease ends at {self.room_end}")
        for start, length in self.node_runs:
            if position < length:
                return start + position
            position -= length
        raise AssertionError("the runs of a lease are shorter than its chain")

    def _all_runs(self) -> Iterator[tuple[int, int]]:
        yield from self.node_runs
        if self.private is not None:
            yield self.private.start, self.private.length


def join_run(runs: list[tuple[int, int]], start: int, length: int) -> None:
    """Append a run, or lengthen the last one when it ends where this begins."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    else:
        runs.append((start, length))
