"""Do all records of the store agree? For tests, and for an engine that is idle.

Knows every invariant. Changes nothing. Under the structure lock, with no acquire running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvreuse.cache.eviction import Evictor
from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES
from kvreuse.cache.lease import Lease, join_run
from kvreuse.cache.node import Node
from kvreuse.cache.spans import SpanAllocator
from kvreuse.cache.tree import PrefixTree

__all__ = ["check_store"]


def check_store(tree: PrefixTree, spans: SpanAllocator, evictor: Evictor, *, leases: Iterable[Lease]) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    spans.check_integrity()
    leases = list(leases)
    living = _check_nodes(tree)
    pins = Counter(node for lease in leases for node in lease.chain())
    doomed = {node for node in pins if node.is_doomed}
    _require(not doomed & living, "a purged node can still be found")
    for node in living | doomed:
        _require(node.pins == pins[node], "pins and leases disagree")
    _require(set(tree.pinned()) == set(pins), "the pinned sets and the leases disagree")
    _check_slots(tree, spans, living | doomed, leases)
    for lease in leases:
        _check_lease(lease, tree.block_size)
    for node in living:
        is_candidate = not node.pins and not node.children
        _require(not is_candidate or evictor.knows(node), "an evictable leaf is not in the heap")


def _check_nodes(tree: PrefixTree) -> set[Node]:
    """Every node that a root reaches is indexed and well formed, and no others are indexed."""
    seen: set[Node] = set()
    stack = list(tree.roots(None))
    _require(all(root.children for root in stack), "a root has no children")
    while stack:
        parent = stack.pop()
        for first, node in parent.children.items():
            _require(node.parent is parent and node.first_hash == first, "parent and child disagree")
            _require(node.depth == parent.depth + parent.num_blocks, "a node has the wrong depth")
            _require(node.scope == parent.scope, "a node is in the wrong scope")
            _require(node.num_blocks * HASH_BYTES == len(node.hashes) > 0, "a node holds a partial hash")
            num_slots = node.num_blocks * tree.block_size
            _require(len(node.tokens) == num_slots * TOKEN_BYTES, "a node has too many or too few tokens")
            _require(node.span.length == num_slots, "a span is longer or shorter than its node")
            _require(tree.find(first) is node, "a node is not in the index")
            seen.add(node)
            stack.append(node)
    _require(seen == set(tree.nodes()), "the index holds a node that no root reaches")
    return seen


def _check_slots(tree: PrefixTree, spans: SpanAllocator, nodes: set[Node], leases: list[Lease]) -> None:
    """Spans in use are those of nodes and leases, and the accounts say the same."""
    owned = [node.span for node in nodes] + [lease.private for lease in leases if lease.private is not None]
    _require(set(map(id, owned)) == set(map(id, spans.used_spans())), "a span has no owner or a lost one")
    _require(len(owned) == len(set(map(id, owned))), "a span has two owners")
    _require(tree.num_node_slots == sum(node.span.length for node in nodes), "num_node_slots is wrong")
    per_tenant: Counter[str] = Counter()
    for node in nodes:
        per_tenant[node.scope.tenant] += node.span.length
    _require(dict(per_tenant) == tree.tenant_slots, "the tenants' accounts are wrong")


def _check_lease(lease: Lease, block_size: int) -> None:
    chain = list(lease.chain())[::-1]
    _require(sum(node.num_blocks for node in chain) * block_size == lease.num_committed_tokens, "a chain has a hole")
    runs: list[tuple[int, int]] = []
    for node in chain:
        join_run(runs, node.span.start, node.span.length)
    _require(runs == lease.node_runs, "the runs of a lease are not those of its chain")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)
