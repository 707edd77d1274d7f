"""How blocks leave: leaf first, from the tail, in the order of the policy; TTL, quota and purge.

Knows the tree and the policy. Knows nothing of leases or of why room is wanted. All under the structure lock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from kvreuse.cache.node import Node
from kvreuse.cache.tree import PrefixTree
from kvreuse.types import MissReason

__all__ = ["Evictor", "OnEvict"]

OnEvict = Callable[[bytes, bytes, int, str], None]

_MIN_TO_SWEEP = 1024

_Entry = tuple[float, int, Node]  # last_used_s, stamp, node


class _Level:
    """The unpinned leaves of a level. An entry counts only while it is its node's newest and the node is still one."""

    def __init__(self) -> None:
        self._oldest: list[_Entry] = []  # a heap
        self._newest: list[_Entry] = []  # a stack
        self._max_entries = _MIN_TO_SWEEP

    def push(self, entry: _Entry) -> None:
        heappush(self._oldest, entry)
        self._newest.append(entry)
        if max(len(self._oldest), len(self._newest)) > self._max_entries:
            self._newest = [entry for entry in self._newest if is_current(entry)]
            self._oldest = sorted(self._newest)
            self._max_entries = 2 * len(self._newest) + _MIN_TO_SWEEP

    def ends(self) -> list[_Entry]:
        """The entries that were used first and last: two, one or none."""
        while self._oldest and not is_current(self._oldest[0]):
            heappop(self._oldest)
        while self._newest and not is_current(self._newest[-1]):
            self._newest.pop()
        first, last = self._oldest[:1], self._newest[-1:]
        return first if first == last else first + last

    def __contains__(self, node: Node) -> bool:
        return any(entry[2] is node and is_current(entry) for entry in self._oldest)


def is_current(entry: _Entry) -> bool:
    node = entry[2]
    return node.stamp == entry[1] and not node.pins and not node.children and bool(node.hashes)


class Evictor:
    """Chooses among the unpinned leaves, by the policy. Counts what leaves in `counts`."""

    def __init__(self, tree: PrefixTree, *, counts: Counter[str], on_evict: OnEvict | None) -> None:
        self._tree = tree
        self._counts = counts
        self._on_evict = on_evict
        self._levels: defaultdict[int, _Level] = defaultdict(_Level)
        self._num_stamps = 0

    def offer(self, node: Node) -> None:
        """The node may have become an unpinned leaf, or its key may have changed."""
        if node.parent is None or node.children or node.pins:
            return
        if node.is_doomed:
            self._drop(node, node.num_blocks, None)
            return
        self._num_stamps += 1
        node.stamp = self._num_stamps
        self._levels[node.level].push((node.last_used_s, node.stamp, node))

    def knows(self, node: Node) -> bool:
        """Has the node a current entry?"""
        return node in self._levels[node.level]

    def evict(self, num_slots: int) -> int:
        """Free at least num_slots (and less than a block more) by policy; returns how many, fewer only for want of
        unpinned blocks.
        """
        freed, block_size = 0, self._tree.block_size
        while freed < num_slots and (node := self._first()) is not None:
            wanted = min(node.num_blocks, -((freed - num_slots) // block_size))
            if self._drop(node, wanted, MissReason.EVICTED):
                freed += wanted * block_size
        return freed

    def keep_quota(self, tenant: str, num_slots: int, *, max_slots: int) -> bool:
        """May the tenant keep num_slots more? Evicts its own unpinned blocks when that helps, and nothing else."""
        excess = self._tree.tenant_slots[tenant] + num_slots - max_slots
        if excess <= 0:
            return True
        unpinned = [node for root in self._tree.roots(tenant) for node in root.below() if not node.pins]
        if sum(node.span.length for node in unpinned) < excess:
            return False
        everybodys, self._levels = self._levels, defaultdict(_Level)
        try:
            for node in unpinned:
                self.offer(node)
            freed = self.evict(excess)
        finally:
            self._levels = everybodys
        for node in unpinned:
            if node.hashes:
                self.offer(node)
        return freed >= excess

    def expire(self, node: Node, *, fresh_after: float) -> int:
        """Drop what is older than fresh_after in the subtree of the node; returns blocks. What is pinned or above
        something that stays is left.
        """
        num_blocks = 0
        for stale in reversed([node, *node.below()]):
            is_old_leaf = stale.parent is not None and not stale.children and stale.last_used_s < fresh_after
            size = stale.num_blocks
            if is_old_leaf and self._drop(stale, size, MissReason.EXPIRED):
                num_blocks += size
        return num_blocks

    def purge(self, roots: Iterable[Node]) -> int:
        """Make everything below the roots unfindable and drop what nobody pins; returns blocks found."""
        num_blocks = 0
        for root in roots:
            self._tree.drop_root(root)
            for node in reversed(list(root.below())):
                num_blocks += node.num_blocks
                if not self._drop(node, node.num_blocks, None):
                    self._tree.doom(node)
        return num_blocks

    def _first(self) -> Node | None:
        """The least recently used, unless another's key is smaller by the policy's margin or more."""
        entries = [entry for level in self._levels.values() for entry in level.ends()]
        if not entries:
            return None
        keys = self._tree.policy.keys([entry[2] for entry in entries])
        oldest, smallest = entries.index(min(entries)), keys.index(min(keys))
        return entries[oldest if keys[oldest] - keys[smallest] < self._tree.policy.margin else smallest][2]

    def _drop(self, node: Node, num_blocks: int, reason: MissReason | None) -> bool:
        """Every block that leaves the store leaves here. False: the node was pinned meanwhile.

        reason: None for a purged block, which leaves no trace: asking for it again is a cold miss.
        """
        cut = self._tree.cut(node, num_blocks)
        if cut is None:
            return False
        hashes, tokens, span = cut
        self._tree.spans.free(span)  # nobody can take it before the structure lock is free
        if self._on_evict is not None and reason is MissReason.EVICTED:
            self._on_evict(hashes, tokens, span.start, node.scope.tenant)
        self._counts[f"num_{reason or 'purged'}_blocks"] += num_blocks
        if reason is not None:
            self._tree.policy.remember(node, hashes, reason)
        if not node.hashes and node.parent is not None:
            self.offer(node.parent)
        return True
