"""How blocks leave: leaf first, from the tail, in the order of the policy; TTL and purge.

Knows the tree and the policy. Knows nothing of leases or of why room is wanted. All under the structure lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from kvreuse.cache.hashing import HASH_BYTES
from kvreuse.cache.node import Node
from kvreuse.cache.policy import Ghost, GhostHistory, SortKey
from kvreuse.cache.spans import SpanAllocator
from kvreuse.cache.tree import PrefixTree
from kvreuse.cache.usage import Counters
from kvreuse.types import MissReason

__all__ = ["Evictor", "OnEvict"]

OnEvict = Callable[[bytes, bytes, int, str], None]

_MIN_HEAP_TO_SWEEP = 1024

_Entry = tuple[tuple[float, float], int, Node]
_COUNTER_OF = {
    MissReason.EVICTED: "num_evicted_blocks",
    MissReason.EXPIRED: "num_expired_blocks",
    MissReason.COLD: "num_purged_blocks",  # a purged block leaves no trace: asking for it again is a cold miss
}


class Evictor:
    """A lazy heap of unpinned leaves. An entry counts only while it is its node's newest and the node is still one."""

    def __init__(
        self,
        tree: PrefixTree,
        spans: SpanAllocator,
        *,
        sort_key: SortKey,
        counters: Counters,
        ghosts: GhostHistory,
        on_evict: OnEvict | None = None,
    ) -> None:
        self._tree = tree
        self._spans = spans
        self._sort_key = sort_key
        self._counters = counters
        self._ghosts = ghosts
        self._on_evict = on_evict
        self._heap: list[_Entry] = []
        self._num_stamps = 0

    @property
    def num_evictable(self) -> int:
        """Slots that eviction could free now."""
        return self._tree.num_node_slots - sum(node.span.length for node in self._tree.pinned())

    def offer(self, node: Node) -> None:
        """The node may have become an unpinned leaf, or its key may have changed."""
        if node.is_root or node.children or node.pins:
            return
        if node.is_doomed:
            self._drop(node, node.num_blocks, MissReason.COLD)
            return
        if len(self._heap) > _MIN_HEAP_TO_SWEEP and len(self._heap) > 4 * self._tree.num_nodes:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)
        heappush(self._heap, self._entry(node))

    def knows(self, node: Node) -> bool:
        """Has the node a current entry?"""
        return any(entry[2] is node and self._is_current(entry) for entry in self._heap)

    def evict(self, num_slots: int) -> int:
        """Free at least num_slots (and less than a block more) by policy; returns how many, fewer only for want of
        unpinned blocks.
        """
        return self._evict(num_slots, self._heap)

    def evict_tenant(self, tenant: str, num_slots: int) -> int:
        """The same among the blocks of one tenant, or nothing when they are too few."""
        unpinned = [node for root in self._tree.roots(tenant) for node in _below(root) if not node.pins]
        if sum(node.span.length for node in unpinned) < num_slots:
            return 0
        heap = [self._entry(node) for node in unpinned if not node.children]
        heapify(heap)
        freed = self._evict(num_slots, heap)
        for _, _, node in heap:
            self.offer(node)
        return freed

    def expire(self, node: Node, *, fresh_after: float) -> int:
        """Drop what is older than fresh_after in the subtree of the node; returns blocks."""
        stale = [n for n in (*_below(node), node) if n.last_used_s < fresh_after and not n.is_root]
        return self._drop_all(stale, MissReason.EXPIRED)

    def purge(self, roots: Iterable[Node]) -> int:
        """Make everything below the roots unfindable and drop what nobody pins; returns blocks found."""
        num_blocks = 0
        for root in roots:
            doomed = list(_below(root))
            num_blocks += sum(node.num_blocks for node in doomed)
            self._tree.drop_root(root)
            self._drop_all([node for node in doomed if not self._tree.doom(node)], MissReason.COLD)
        return num_blocks

    def _evict(self, num_slots: int, heap: list[_Entry]) -> int:
        freed, block_size = 0, self._tree.block_size
        while freed < num_slots and heap:
            entry = heappop(heap)
            if not self._is_current(entry):
                continue
            node = entry[2]
            wanted = min(node.num_blocks, -((freed - num_slots) // block_size))
            parent = node.parent
            if not self._drop(node, wanted, MissReason.EVICTED):
                continue
            freed += wanted * block_size
            if node.hashes:
                heappush(heap, entry)  # the rest keeps its place: one victim goes before the next is touched
            elif parent is not None and not (parent.is_root or parent.children or parent.pins):
                heappush(heap, self._entry(parent))
        return freed

    def _drop_all(self, nodes: list[Node], reason: MissReason) -> int:
        """Drop the nodes, deeper ones before; what is pinned or above something that stays is left."""
        num_blocks = 0
        for node in sorted(nodes, key=lambda node: -node.depth):
            size, parent = node.num_blocks, node.parent
            if not node.children and self._drop(node, size, reason):
                num_blocks += size
                if parent is not None:
                    self.offer(parent)
        return num_blocks

    def _drop(self, node: Node, num_blocks: int, reason: MissReason) -> bool:
        """Every block that leaves the store leaves here. False: the node was pinned meanwhile."""
        frequency = node.frequency
        cut = self._tree.cut(node, num_blocks)
        if cut is None:
            return False
        hashes, tokens, span = cut
        if self._on_evict is not None and reason is MissReason.EVICTED:
            self._on_evict(hashes, tokens, span.start, node.scope.tenant)
        self._spans.free(span)
        self._counters.add(**{_COUNTER_OF[reason]: num_blocks})
        if reason is not MissReason.COLD:
            ghost = Ghost(reason, frequency)
            for start in range(0, len(hashes), HASH_BYTES):
                self._ghosts.remember(hashes[start : start + HASH_BYTES], ghost)
        return True

    def _entry(self, node: Node) -> _Entry:
        self._num_stamps += 1
        node.stamp = self._num_stamps
        return self._sort_key(node), node.stamp, node

    @staticmethod
    def _is_current(entry: _Entry) -> bool:
        node = entry[2]
        return node.stamp == entry[1] and not node.pins and not node.children and bool(node.hashes)


def _below(root: Node) -> Iterable[Node]:
    """All nodes under the root, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
