"""The plain records of the prefix tree: a node, a question to the tree and how far it got.

Knows hashes, token bytes and spans. Knows nothing of locks and of how nodes are found.
"""

from __future__ import annotations

from kvreuse.cache.hashing import HASH_BYTES
from kvreuse.cache.spans import Span
from kvreuse.types import Scope

__all__ = ["Node", "Query", "Walk", "common_prefix"]


class Node:
    """Blocks [depth, depth + num_blocks) of a prefix, in one span. The root of a scope has no blocks and no span.

    num_uses, level, last_used_s, last_turnover: see policy. pins: leases whose chain this node is part of.
    stamp: number of its newest heap entry. is_doomed: purged, but pinned: leaves with its last pin.
    """

    __slots__ = (
        "children", "depth", "hashes", "is_doomed", "last_turnover", "last_used_s", "level", "num_uses",
        "parent", "pins", "scope", "span", "stamp", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, *, scope: Scope, depth: int, hashes: bytes, tokens: bytes) -> None:
        self.parent = parent
        self.scope = scope
        self.depth = depth
        self.hashes = hashes
        self.tokens = tokens
        self.span = Span(0, 0)
        self.children: dict[bytes, Node] = {}  # by first hash, the most recently released last
        self.pins = 0
        self.num_uses = 0
        self.level = 0
        self.last_used_s = 0.0
        self.last_turnover = 0.0
        self.stamp = 0
        self.is_doomed = False

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def first_hash(self) -> bytes:
        return self.hashes[:HASH_BYTES]

    @property
    def is_root(self) -> bool:
        return self.parent is None


class Query:
    """A prompt as the tree sees it: hashes and token bytes of its blocks, of which `limit` may match."""

    __slots__ = ("hashes", "joined", "limit", "scope", "tokens")

    def __init__(self, hashes: list[bytes], tokens: bytes, *, scope: Scope, limit: int) -> None:
        self.hashes = hashes
        self.joined = b"".join(hashes[:limit])
        self.tokens = tokens
        self.scope = scope
        self.limit = limit


class Walk:
    """How far a query got: `num_blocks` matched, ending with `node`; `inside` is a next node of which only
    `num_inside` blocks match. `runs`: (start, length) of the matched nodes' slots.
    """

    __slots__ = ("inside", "is_collision", "node", "num_blocks", "num_inside", "runs", "stale")

    def __init__(self, node: Node | None = None, num_blocks: int = 0) -> None:
        self.node = node
        self.num_blocks = num_blocks
        self.runs: list[tuple[int, int]] = []
        self.inside: Node | None = None
        self.num_inside = 0
        self.is_collision = False
        self.stale: Node | None = None  # a next node whose TTL ran out


def common_prefix(left: bytes, right: bytes, *, unit: int) -> int:
    """Number of leading units of `unit` bytes that are equal."""
    length = min(len(left), len(right))
    differing = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return length // unit if not differing else ((differing & -differing).bit_length() - 1) // (8 * unit)
