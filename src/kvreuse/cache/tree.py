"""The prefix tree: nodes of whole blocks, found by the hash of their first block in an index of locked buckets.

Knows hashes, token bytes and spans; tells the policy what is used. Knows nothing of leases or tensors.

Locks, in the order in which they are taken:
1. the structure lock (held by the caller of everything here except `walk`): nodes come, go, split, grow, move;
2. bucket locks, one at a time: the index entry of a node, its content, its pins and its use counts. A matcher takes
   only these, so it can never pin what is being changed. What is pinned neither leaves nor moves.
`children` belongs to the structure lock alone: a walk goes through the index.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES
from kvreuse.cache.node import Node, Walk, common_prefix
from kvreuse.cache.policy import Policy
from kvreuse.cache.spans import Span, SpanAllocator, join_run
from kvreuse.types import Scope

__all__ = ["NUM_BUCKETS", "PrefixTree"]

NUM_BUCKETS = 64


class Bucket(NamedTuple):
    """One shard of the index. It, and the nodes filed here, change only under its lock."""

    lock: Lock
    nodes: dict[bytes, Node]


class PrefixTree:
    """Nodes of all scopes over the slots of one allocator."""

    def __init__(self, spans: SpanAllocator, policy: Policy, *, block_size: int) -> None:
        self.spans = spans
        self.policy = policy
        self.block_size = block_size
        self.tenant_slots: Counter[str] = Counter()
        self._roots: dict[str, dict[Scope, Node]] = {}  # by tenant
        self._block_bytes = block_size * TOKEN_BYTES
        self._buckets = [Bucket(Lock(), {}) for _ in range(NUM_BUCKETS)]

    def bucket(self, block_hash: bytes) -> Bucket:
        """Where nodes whose first block has that hash are filed."""
        return self._buckets[block_hash[0] % NUM_BUCKETS]

    @property
    def num_nodes(self) -> int:
        """In the index: doomed ones are not."""
        return sum(len(bucket.nodes) for bucket in self._buckets)

    @property
    def num_node_slots(self) -> int:
        return sum(self.tenant_slots.values())

    def find(self, block_hash: bytes) -> Node | None:
        return self.bucket(block_hash).nodes.get(block_hash)

    def walk(self, at: Walk, *, fresh_after: float, is_pinning: bool) -> Walk:
        """Go on as far as whole nodes match, and pin and use each when `is_pinning`.

        Nodes last used before `fresh_after` end the walk unless they are pinned. Needs no structure lock; with it held
        the nodes named in the result cannot change.
        """
        at.inside, at.num_inside, at.stale, at.is_collision = None, 0, None, False
        while at.num_blocks < at.limit:
            first = at.hashes[at.num_blocks]
            bucket = self.bucket(first)
            with bucket.lock:
                node = bucket.nodes.get(first)
                if node is None:
                    break
                if node.last_used_s < fresh_after and not node.pins:
                    at.stale = node
                    break
                matching = self._matching_blocks(node, at)
                if matching < node.num_blocks:
                    at.inside, at.num_inside = node, matching
                    break
                if is_pinning:
                    node.pins += 1
                    self.policy.reuse(node)
                join_run(at.runs, node.span.start, node.span.length)
                at.node = node
                at.num_blocks += matching
        return at

    def _matching_blocks(self, node: Node, at: Walk) -> int:
        """How many leading blocks of the node the prompt continues with. Tokens decide; a hash alone never does."""
        begin = at.num_blocks
        if node.depth != begin or node.scope != at.scope or (begin > 0 and node.parent is not at.node):
            at.is_collision = True
            return 0
        end = min(begin + node.num_blocks, at.limit)
        tokens = at.tokens[begin * self._block_bytes : end * self._block_bytes]
        hashes = b"".join(at.hashes[begin:end])
        if node.tokens == tokens and node.hashes == hashes:
            return end - begin
        by_token = common_prefix(node.tokens, tokens, unit=self._block_bytes)
        by_hash = common_prefix(node.hashes, hashes, unit=HASH_BYTES)
        at.is_collision = by_token < by_hash
        return min(by_token, by_hash)

    def unpin(self, node: Node) -> None:
        """Drop one pin; the node becomes its parent's most recently used child."""
        first, parent = node.first_hash, node.parent
        assert parent is not None
        with self.bucket(first).lock:
            self.policy.touch(node)
            node.pins -= 1
        parent.children[first] = parent.children.pop(first)

    def roots(self, tenant: str | None) -> list[Node]:
        """The roots of one tenant's scopes, or of all (None)."""
        tenants = self._roots.values() if tenant is None else [self._roots.get(tenant, {})]
        return [root for roots in tenants for root in roots.values()]

    def root(self, scope: Scope) -> Node | None:
        return self._roots.get(scope.tenant, {}).get(scope)

    def make_root(self, scope: Scope) -> Node:
        """The root of the scope, made when there is none."""
        roots = self._roots.setdefault(scope.tenant, {})
        if scope not in roots:
            roots[scope] = Node(parent=None, scope=scope, depth=0, hashes=b"", tokens=b"", span=Span(0, 0))
        return roots[scope]

    def drop_root(self, root: Node) -> None:
        """Forget the root if it is still the one of its scope."""
        roots = self._roots.get(root.scope.tenant, {})
        if roots.get(root.scope) is root:
            del roots[root.scope]
            if not roots:
                del self._roots[root.scope.tenant]

    def add(self, parent: Node, hashes: bytes, tokens: bytes, *, span: Span, num_uses: int) -> Node:
        """A new leaf below `parent`, pinned once. The span is the node's from now on."""
        depth = parent.depth + parent.num_blocks
        node = Node(parent=parent, scope=parent.scope, depth=depth, hashes=hashes, tokens=tokens, span=span, pins=1)
        span.owner = node
        self.policy.begin(node, num_uses=num_uses)
        parent.children[node.first_hash] = node
        bucket = self.bucket(hashes)
        with bucket.lock:
            bucket.nodes[node.first_hash] = node
        self._account(node, span.length)
        return node

    def extend(self, node: Node, hashes: bytes, tokens: bytes, span: Span) -> bool:
        """Append blocks to a leaf that one lease pins, when their slots follow. False: nothing changed."""
        if node.children or node.span.end != span.start:
            return False
        with self.bucket(node.hashes).lock:
            if node.pins != 1:
                return False
            self.spans.join(node.span, span)
            node.hashes += hashes
            node.tokens += tokens
        self._account(node, span.length)
        return True

    def split(self, node: Node, num_blocks: int) -> Node:
        """[0, n) becomes a new upper node [0, num_blocks), which is returned, and `node` = [num_blocks, n) below it.

        The old object is the lower part, so that leases that end in it stay right; both carry its pins. For a moment
        the lower part cannot be found; a matcher that misses it looks again under the structure lock.
        """
        parent, at_hash, at_token = node.parent, num_blocks * HASH_BYTES, num_blocks * self._block_bytes
        assert parent is not None
        old = self.bucket(node.hashes)
        with old.lock:
            upper = replace(node, hashes=node.hashes[:at_hash], tokens=node.tokens[:at_token], children={})
            node.hashes, node.tokens = node.hashes[at_hash:], node.tokens[at_token:]
            node.span = self.spans.split(node.span, num_blocks * self.block_size)
            upper.span.owner, node.span.owner = upper, node
            node.depth += num_blocks
            node.parent = old.nodes[upper.first_hash] = upper
        parent.children[upper.first_hash] = upper
        upper.children[node.first_hash] = node
        new = self.bucket(node.hashes)
        with new.lock:
            new.nodes[node.first_hash] = node
        return upper

    def doom(self, node: Node) -> None:
        """Make a pinned node unfindable; it is cut when its last pin goes."""
        bucket = self.bucket(node.hashes)
        with bucket.lock:
            node.is_doomed = True
            del bucket.nodes[node.first_hash]

    def cut(self, node: Node, num_blocks: int) -> tuple[bytes, bytes, Span] | None:
        """Take the last `num_blocks` blocks from an unpinned leaf: (hashes, token bytes, span), now the caller's.

        None when a matcher pinned it meanwhile. A node without blocks left is gone from the tree.
        """
        parent, first, keep = node.parent, node.first_hash, node.num_blocks - num_blocks
        assert parent is not None
        at_hash, at_token = keep * HASH_BYTES, keep * self._block_bytes
        bucket = self.bucket(first)
        with bucket.lock:
            if node.pins:
                return None
            hashes, tokens, span = node.hashes[at_hash:], node.tokens[at_token:], node.span
            node.hashes, node.tokens = node.hashes[:at_hash], node.tokens[:at_token]
            if keep:
                span = self.spans.split(span, keep * self.block_size)
            else:
                span.owner = None  # no circle of references: a node that left is freed without a collector
                if not node.is_doomed:
                    del bucket.nodes[first]
        if not keep:
            del parent.children[first]
            if parent.parent is None and not parent.children:
                self.drop_root(parent)
        self._account(node, -span.length)
        return hashes, tokens, span

    def _account(self, node: Node, num_slots: int) -> None:
        tenant = node.scope.tenant
        self.tenant_slots[tenant] += num_slots
        if not self.tenant_slots[tenant]:
            del self.tenant_slots[tenant]
