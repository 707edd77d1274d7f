"""The plain records of the prefix tree: a node, and a prompt on its way down.

Knows hashes, token bytes and spans. Knows nothing of locks and of how nodes are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvreuse.cache.hashing import HASH_BYTES
from kvreuse.cache.spans import Span
from kvreuse.types import Scope

__all__ = ["Node", "Walk", "common_prefix"]


@dataclass(eq=False, kw_only=True, repr=False, slots=True)
class Node:
    """Blocks [depth, depth + num_blocks) of a prefix, in one span. The root of a scope has no blocks and no span.

    num_uses, level, last_used_s, last_turnover: see policy. pins: leases whose chain this node is part of.
    stamp: number of its newest entry among the evictable. is_doomed: purged, but pinned: leaves with its last pin.
    """

    parent: Node | None
    scope: Scope
    depth: int
    hashes: bytes
    tokens: bytes
    span: Span
    children: dict[bytes, Node] = field(default_factory=dict)  # by first hash, the most recently released last
    pins: int = 0
    num_uses: int = 0
    level: int = 0
    last_used_s: float = 0.0
    last_turnover: float = 0.0
    stamp: int = 0
    is_doomed: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def first_hash(self) -> bytes:
        return self.hashes[:HASH_BYTES]

    def below(self) -> Iterator[Node]:
        """All nodes under this one, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(eq=False, kw_only=True, repr=False, slots=True)
class Walk:
    """How far a prompt matches: hashes and token bytes of its blocks, of which at most `limit`.

    `num_blocks` do, ending with `node`; `runs` are the (start, length) of their slots. `inside` is a next node of which
    only `num_inside` blocks match; `stale` a next node whose TTL ran out.
    """

    hashes: list[bytes]
    tokens: bytes
    scope: Scope
    limit: int
    node: Node | None = None
    num_blocks: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    inside: Node | None = None
    num_inside: int = 0
    stale: Node | None = None
    is_collision: bool = False


def common_prefix(left: bytes, right: bytes, *, unit: int) -> int:
    """Number of leading units of `unit` bytes that are equal."""
    length = min(len(left), len(right))
    differing = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return length // unit if not differing else ((differing & -differing).bit_length() - 1) // (8 * unit)
