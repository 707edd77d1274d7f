"""How blocks leave: leaf first, from the tail, in the order of the policy; TTL and purge.

Knows the tree and the policy. Knows nothing of leases or of why room is wanted. All under the structure lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from kvreuse.cache.hashing import HASH_BYTES
from kvreuse.cache.node import Node
from kvreuse.cache.policy import Ghost, Uses
from kvreuse.cache.spans import SpanAllocator
from kvreuse.cache.tree import PrefixTree
from kvreuse.cache.usage import Counters
from kvreuse.types import MissReason

__all__ = ["Evictor", "OnEvict"]

OnEvict = Callable[[bytes, bytes, int, str], None]

_MIN_TO_SWEEP = 1024

_Entry = tuple[float, int, Node]  # last_used_s, stamp, node
# key, which end, level, entry: of a level may go what was used first and what was used last, in this order when the
# keys are equal
_Candidate = tuple[float, int, int, _Entry]
_COUNTER_OF = {
    MissReason.EVICTED: "num_evicted_blocks",
    MissReason.EXPIRED: "num_expired_blocks",
    MissReason.COLD: "num_purged_blocks",  # a purged block leaves no trace: asking for it again is a cold miss
}


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
    """Chooses among the unpinned leaves, by the policy."""

    def __init__(
        self,
        tree: PrefixTree,
        spans: SpanAllocator,
        *,
        uses: Uses,
        counters: Counters,
        on_evict: OnEvict | None = None,
    ) -> None:
        self._tree = tree
        self._spans = spans
        self._uses = uses
        self._counters = counters
        self._on_evict = on_evict
        self._levels: defaultdict[int, _Level] = defaultdict(_Level)
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
        self._file(node, self._levels)

    def knows(self, node: Node) -> bool:
        """Has the node a current entry?"""
        return node in self._levels[node.level]

    def evict(self, num_slots: int) -> int:
        """Free at least num_slots (and less than a block more) by policy; returns how many, fewer only for want of
        unpinned blocks.
        """
        return self._evict(num_slots, self._levels)

    def keep_quota(self, tenant: str, num_slots: int, *, max_slots: int) -> bool:
        """May the tenant keep num_slots more? Evicts its own unpinned blocks when that helps, and nothing else."""
        excess = self._tree.tenant_slots.get(tenant, 0) + num_slots - max_slots
        if excess <= 0:
            return True
        unpinned = [node for root in self._tree.roots(tenant) for node in _below(root) if not node.pins]
        if sum(node.span.length for node in unpinned) < excess:
            return False
        levels: defaultdict[int, _Level] = defaultdict(_Level)
        for node in unpinned:
            if not node.children:
                self._file(node, levels)
        freed = self._evict(excess, levels)
        for node in unpinned:
            if node.hashes:
                self.offer(node)
        return freed >= excess

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

    def _evict(self, num_slots: int, levels: defaultdict[int, _Level]) -> int:
        freed, block_size = 0, self._tree.block_size
        candidates: list[_Candidate] = []
        firsts: dict[int, list[_Entry]] = {}
        changed = set(levels)
        while freed < num_slots:
            for number in changed:
                ends = levels[number].ends()
                firsts[number] = ends[:1]
                for at, entry in enumerate(ends):
                    heappush(candidates, (self._uses.key(entry[2]), at, number, entry))
            if not candidates:
                break
            key, _, number, entry = heappop(candidates)
            changed = {number}
            if not is_current(entry):
                continue
            node = self._oldest_unless_worse(firsts.values(), entry, key)
            changed.add(node.level)
            wanted = min(node.num_blocks, -((freed - num_slots) // block_size))
            parent = node.parent
            if self._drop(node, wanted, MissReason.EVICTED):
                freed += wanted * block_size
            if not (node.hashes or parent is None or parent.is_root or parent.children or parent.pins):
                self._file(parent, levels)
                changed.add(parent.level)
        return freed

    def _oldest_unless_worse(self, firsts: Iterable[list[_Entry]], entry: _Entry, key: float) -> Node:
        """The least recently used of all, when the entry's key is smaller by no more than the policy's margin."""
        oldest = min(filter(None, firsts), default=[entry])[0]
        is_oldest = oldest is entry or self._uses.key(oldest[2]) - key < self._uses.policy.margin
        return (oldest if is_oldest else entry)[2]

    def _file(self, node: Node, levels: defaultdict[int, _Level]) -> None:
        self._num_stamps += 1
        node.stamp = self._num_stamps
        levels[node.level].push((node.last_used_s, node.stamp, node))

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
        cut = self._tree.cut(node, num_blocks)
        if cut is None:
            return False
        hashes, tokens, span = cut
        if self._on_evict is not None and reason is MissReason.EVICTED:
            self._on_evict(hashes, tokens, span.start, node.scope.tenant)
        self._spans.free(span)
        self._counters.add(**{_COUNTER_OF[reason]: num_blocks})
        if reason is not MissReason.COLD:
            ghost = Ghost(reason, node.num_uses, node.level, node.last_turnover)
            for start in range(0, len(hashes), HASH_BYTES):
                self._uses.ghosts.remember(hashes[start : start + HASH_BYTES], ghost)
        return True


def _below(root: Node) -> Iterable[Node]:
    """All nodes under the root, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
