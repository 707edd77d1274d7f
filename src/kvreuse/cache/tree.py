"""The prefix tree: nodes of whole blocks, found by the hash of their first block in an index of locked buckets.

Knows hashes, token bytes and spans. Knows nothing of policies, leases or tensors.

Locks, in the order in which they are taken:
1. the structure lock (held by the caller of everything here except `walk` and `count_pinned`): nodes come, go, split,
   grow, move;
2. bucket locks, by rising number: the index entry of a node, its content, its pins and its use counts. A matcher takes
   only these, one at a time, so it can never pin what is being changed. What is pinned neither leaves nor moves.
`children` belongs to the structure lock alone: a walk goes through the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Lock

from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES
from kvreuse.cache.node import Node, Query, Walk, common_prefix
from kvreuse.cache.spans import Span, SpanAllocator
from kvreuse.types import Scope

__all__ = ["NUM_BUCKETS", "PrefixTree"]

NUM_BUCKETS = 64


class Bucket:
    """One shard of the index. Everything in it, and the nodes filed here, change only under its lock."""

    __slots__ = ("lock", "nodes", "pinned")

    def __init__(self) -> None:
        self.lock = Lock()
        self.nodes: dict[bytes, Node] = {}
        self.pinned: set[Node] = set()


class PrefixTree:
    """Nodes of all scopes over the slots of one allocator."""

    def __init__(self, spans: SpanAllocator, *, block_size: int) -> None:
        self._roots: dict[str, dict[Scope, Node]] = {}  # by tenant
        self.num_node_slots = 0
        self.tenant_slots: dict[str, int] = {}
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._spans = spans
        self._buckets = [Bucket() for _ in range(NUM_BUCKETS)]

    def bucket(self, block_hash: bytes) -> Bucket:
        return self._buckets[block_hash[0] % NUM_BUCKETS]

    def bucket_of(self, node: Node) -> Bucket:
        return self._buckets[node.hashes[0] % NUM_BUCKETS]

    @property
    def num_nodes(self) -> int:
        return sum(len(bucket.nodes) for bucket in self._buckets)

    def nodes(self) -> Iterator[Node]:
        """Every node in the index (doomed ones are not)."""
        for bucket in self._buckets:
            yield from bucket.nodes.values()

    def pinned(self) -> list[Node]:
        """Every pinned node, doomed ones included. What is pinned or unpinned meanwhile may be in it or not."""
        out: list[Node] = []
        # Most are empty, and taking the lock of each of them would be most of the work.
        for bucket in [bucket for bucket in self._buckets if bucket.pinned]:
            with bucket.lock:
                out += bucket.pinned
        return out

    def walk(self, query: Query, at: Walk, *, fresh_after: float, use: Callable[[Node], None] | None) -> Walk:
        """Go on from `at` as far as whole nodes match. With `use`, each is pinned and used (called under its lock).

        Nodes last used before `fresh_after` end the walk unless they are pinned. Needs no structure lock; with it held
        the nodes named in the result cannot change.
        """
        at.inside, at.num_inside, at.stale, at.is_collision = None, 0, None, False
        while at.num_blocks < query.limit:
            first = query.hashes[at.num_blocks]
            bucket = self.bucket(first)
            with bucket.lock:
                node = bucket.nodes.get(first)
                if node is None:
                    break
                if node.last_used_s < fresh_after and not node.pins:
                    at.stale = node
                    break
                matching = self._matching_blocks(node, query, at)
                if matching < node.num_blocks:
                    at.inside, at.num_inside = node, matching
                    break
                if use is not None:
                    self._pin(bucket, node)
                    use(node)
                at.runs.append((node.span.start, matching * self.block_size))
                at.node = node
                at.num_blocks += matching
        return at

    def _matching_blocks(self, node: Node, query: Query, at: Walk) -> int:
        """How many leading blocks of the node the query continues with. Tokens decide; a hash alone never does."""
        follows = node.depth == at.num_blocks and node.scope == query.scope
        if not follows or (at.num_blocks > 0 and node.parent is not at.node):
            at.is_collision = True
            return 0
        room = min(node.num_blocks, query.limit - at.num_blocks)
        begin, end = at.num_blocks * self._block_bytes, (at.num_blocks + room) * self._block_bytes
        wanted = query.tokens[begin:end]
        by_token = common_prefix(node.tokens, wanted, unit=self._block_bytes) if node.tokens != wanted else room
        hashes = query.joined[at.num_blocks * HASH_BYTES : (at.num_blocks + room) * HASH_BYTES]
        by_hash = room if node.hashes == hashes else common_prefix(node.hashes, hashes, unit=HASH_BYTES)
        at.is_collision = by_token < min(by_hash, room)
        return min(by_token, by_hash)

    def _pin(self, bucket: Bucket, node: Node) -> None:
        node.pins += 1
        if node.pins == 1:
            bucket.pinned.add(node)

    def pin(self, node: Node, use: Callable[[Node], None]) -> None:
        bucket = self.bucket_of(node)
        with bucket.lock:
            self._pin(bucket, node)
            use(node)

    def unpin(self, node: Node, use: Callable[[Node], None]) -> None:
        """Drop one pin; the node becomes its parent's most recently used child."""
        bucket = self.bucket_of(node)
        with bucket.lock:
            use(node)
            node.pins -= 1
            if node.pins == 0:
                bucket.pinned.discard(node)
        if node.parent is not None:
            siblings, first = node.parent.children, node.first_hash
            siblings[first] = siblings.pop(first)

    def roots(self, tenant: str | None) -> list[Node]:
        """The roots of one tenant's scopes, or of all (None)."""
        if tenant is not None:
            return list(self._roots.get(tenant, {}).values())
        return [root for roots in self._roots.values() for root in roots.values()]

    def root(self, scope: Scope) -> Node | None:
        return self._roots.get(scope.tenant, {}).get(scope)

    def make_root(self, scope: Scope) -> Node:
        """The root of the scope, made when there is none."""
        roots = self._roots.setdefault(scope.tenant, {})
        if scope not in roots:
            roots[scope] = Node(None, scope=scope, depth=0, hashes=b"", tokens=b"")
        return roots[scope]

    def drop_root(self, root: Node) -> None:
        """Forget the root if it is still the one of its scope."""
        roots = self._roots.get(root.scope.tenant, {})
        if roots.get(root.scope) is root:
            del roots[root.scope]
            if not roots:
                del self._roots[root.scope.tenant]

    def find(self, block_hash: bytes) -> Node | None:
        return self.bucket(block_hash).nodes.get(block_hash)

    def add(self, parent: Node, hashes: bytes, tokens: bytes, *, span: Span, use: Callable[[Node], None]) -> Node:
        """A new leaf below `parent`, pinned once and used. The span is the node's from now on."""
        depth = parent.depth + parent.num_blocks
        node = Node(parent, scope=parent.scope, depth=depth, hashes=hashes, tokens=tokens)
        node.span = span
        span.owner = node
        bucket = self.bucket_of(node)
        parent.children[node.first_hash] = node
        with bucket.lock:
            self._pin(bucket, node)
            use(node)
            bucket.nodes[node.first_hash] = node
        self._account(node.scope, span.length)
        return node

    def extend(self, node: Node, hashes: bytes, tokens: bytes, span: Span) -> bool:
        """Append blocks to a leaf that one lease pins, when their slots follow. False: nothing changed."""
        if node.children or node.span.end != span.start:
            return False
        with self.bucket_of(node).lock:
            if node.pins != 1:
                return False
            length = span.length
            self._spans.join(node.span, span)
            node.hashes += hashes
            node.tokens += tokens
        self._account(node.scope, length)
        return True

    def split(self, node: Node, num_blocks: int) -> Node:
        """[0, n) becomes a new upper node [0, num_blocks), which is returned, and `node` = [num_blocks, n) below it.

        The old object is the lower part, so that leases that end in it stay right; both carry its pins.
        """
        parent = node.parent
        assert parent is not None
        at_hash, at_token = num_blocks * HASH_BYTES, num_blocks * self._block_bytes
        upper = Node(parent, scope=node.scope, depth=node.depth, hashes=node.hashes[:at_hash],
                     tokens=node.tokens[:at_token])  # fmt: skip
        second = node.hashes[at_hash : at_hash + HASH_BYTES]
        old, new = self.bucket_of(node), self.bucket(second)
        with ExitStack() as stack:
            for number in sorted({upper.hashes[0] % NUM_BUCKETS, second[0] % NUM_BUCKETS}):
                stack.enter_context(self._buckets[number].lock)
            upper.pins, upper.num_uses, upper.level = node.pins, node.num_uses, node.level
            upper.last_used_s, upper.last_turnover = node.last_used_s, node.last_turnover
            upper.span, node.span = self._spans.split(node.span, num_blocks * self.block_size)
            upper.span.owner, node.span.owner = upper, node
            node.hashes, node.tokens = node.hashes[at_hash:], node.tokens[at_token:]
            node.depth += num_blocks
            node.parent = upper
            old.nodes[upper.first_hash], new.nodes[second] = upper, node
            if node.pins:
                old.pinned.discard(node)
                old.pinned.add(upper)
                new.pinned.add(node)
        parent.children[upper.first_hash] = upper
        upper.children[second] = node
        return upper

    def doom(self, node: Node) -> bool:
        """Make a pinned node unfindable. False when it is not pinned (then it can be cut at once)."""
        bucket = self.bucket_of(node)
        with bucket.lock:
            if node.pins:
                node.is_doomed = True
                del bucket.nodes[node.first_hash]
            return node.is_doomed

    def cut(self, node: Node, num_blocks: int) -> tuple[bytes, bytes, Span] | None:
        """Take the last `num_blocks` blocks from an unpinned leaf: (hashes, token bytes, span), now the caller's.

        None when a matcher pinned it meanwhile. A node without blocks left is gone from the tree.
        """
        parent, keep = node.parent, node.num_blocks - num_blocks
        assert parent is not None and not node.children
        bucket, first = self.bucket_of(node), node.first_hash
        with bucket.lock:
            if node.pins:
                return None
            hashes, tokens, span = node.hashes[keep * HASH_BYTES :], node.tokens[keep * self._block_bytes :], node.span
            if keep:
                node.span, span = self._spans.split(span, keep * self.block_size)
                node.hashes, node.tokens = node.hashes[: keep * HASH_BYTES], node.tokens[: keep * self._block_bytes]
            else:
                node.hashes = node.tokens = b""
                span.owner = None  # no circle of references: a node that left is freed without a collector
                if bucket.nodes.get(first) is node:
                    del bucket.nodes[first]
        if not keep:
            del parent.children[first]
            if parent.is_root and not parent.children:
                self.drop_root(parent)
        self._account(node.scope, -num_blocks * self.block_size)
        return hashes, tokens, span

    def _account(self, scope: Scope, num_slots: int) -> None:
        self.num_node_slots += num_slots
        total = self.tenant_slots.get(scope.tenant, 0) + num_slots
        self.tenant_slots[scope.tenant] = total
        if not total:
            del self.tenant_slots[scope.tenant]
