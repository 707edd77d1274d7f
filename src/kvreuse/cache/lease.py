"""What one reader or writer holds: a pinned chain of nodes, and one private span behind it.

Knows positions and slots. Knows nothing of matching or eviction; it belongs to the thread that acquired it.

    position   0              num_committed_tokens        room_end
               [ nodes, pinned )[ private span, own slots )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvreuse.cache.node import Node
from kvreuse.cache.spans import Span, join_run
from kvreuse.types import MissReason, Scope

__all__ = ["Lease"]


@dataclass(eq=False, kw_only=True, repr=False, slots=True)
class Lease:
    """Made by PrefixCache.acquire; released on exit of its `with`, or by PrefixCache.release.

    num_cached_tokens: matched at admission, fixed. num_committed_tokens: positions [0, n) live in nodes.
    miss_reason, diverged_at: why not more matched (see MissReason).
    """

    scope: Scope
    num_cached_tokens: int = 0
    num_committed_tokens: int = 0
    miss_reason: MissReason | None = None
    diverged_at: int | None = None
    # The rest is the store's.
    on_exit: Callable[[Lease], None]
    hashes: list[bytes] = field(default_factory=list)
    keeps: bool  # False: commit stores nothing (reuse off, or purged meanwhile)
    tail: Node | None = None  # last node of the pinned chain
    written: Node | None = None  # the node that this lease made and may extend
    private: Span | None = None
    node_runs: list[tuple[int, int]] = field(default_factory=list)  # of the chain
    is_released: bool = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.on_exit(self)

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
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def chain_runs(self) -> list[tuple[int, int]]:
        """Where the chain lies now. Under the structure lock."""
        runs: list[tuple[int, int]] = []
        for node in reversed(list(self.chain())):
            join_run(runs, node.span.start, node.span.length)
        return runs

    def runs(self, num_tokens: int) -> list[tuple[int, int]]:
        """Physical (start, length) runs that hold positions [0, num_tokens), neighbours joined.

        Raises ValueError when the lease holds fewer positions. Stays right until the next reserve, trim, commit or
        release of this lease; what others do never moves it.
        """
        if not 0 <= num_tokens <= self.room_end:
            raise ValueError(f"{num_tokens} tokens asked of a lease that holds {self.room_end}")
        out: list[tuple[int, int]] = []
        private = [(self.private.start, self.private.length)] if self.private else []
        for start, length in [*self.node_runs, *private]:
            if num_tokens <= 0:
                break
            join_run(out, start, min(length, num_tokens))
            num_tokens -= length
        return out

    def slot(self, position: int) -> int:
        """The physical slot of a position. Raises ValueError outside [0, room_end)."""
        if not 0 <= position < self.room_end:
            raise ValueError(f"position {position} is not held, the lease ends at {self.room_end}")
        start, length = self.runs(position + 1)[-1]
        return start + length - 1


def pinned_nodes(leases: Iterable[Lease]) -> set[Node]:
    """What the leases pin, doomed nodes included. Under the structure lock; what a match pins meanwhile may lack."""
    pinned: set[Node] = set()
    for lease in leases:
        for node in lease.chain():
            if node in pinned:
                break  # and so are those above it
            pinned.add(node)
    return pinned
