"""Do all records of the store agree? For tests, and for an engine that is idle.

Knows every invariant. Changes nothing. Under the structure lock, with no acquire running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvreuse.cache.eviction import Evictor
from kvreuse.cache.hashing import HASH_BYTES, TOKEN_BYTES
from kvreuse.cache.lease import Lease
from kvreuse.cache.node import Node
from kvreuse.cache.spans import require
from kvreuse.cache.tree import PrefixTree

__all__ = ["check_store"]


def check_store(tree: PrefixTree, evictor: Evictor, *, leases: Collection[Lease]) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    tree.spans.check_integrity()
    living = _check_nodes(tree)
    pins = Counter(node for lease in leases for node in lease.chain())
    doomed = {node for node in pins if node.is_doomed}
    require(not doomed & living, "a purged node can still be found")
    require(set(pins) <= living | doomed, "a lease holds a node that is lost")
    _check_slots(tree, living | doomed, leases)
    for node in living | doomed:
        require(node.pins == pins[node], "pins and leases disagree")
        is_evictable = not node.pins and not node.children
        require(not is_evictable or evictor.knows(node), "an evictable leaf is not known to be one")
    for lease in leases:
        num_blocks = sum(node.num_blocks for node in lease.chain())
        require(num_blocks * tree.block_size == lease.num_committed_tokens, "a chain has a hole")
        require(lease.chain_runs() == lease.node_runs, "the runs of a lease are not those of its chain")


def _check_nodes(tree: PrefixTree) -> set[Node]:
    """Every node that a root reaches is indexed and well formed, and no others are indexed."""
    seen: set[Node] = set()
    for root in tree.roots(None):
        require(bool(root.children), "a root has no children")
        for node in root.below():
            parent = node.parent
            assert parent is not None
            require(parent.children.get(node.first_hash) is node, "parent and child disagree")
            require(node.depth == parent.depth + parent.num_blocks, "a node has the wrong depth")
            require(node.scope == root.scope, "a node is in the wrong scope")
            require(node.num_blocks * HASH_BYTES == len(node.hashes) > 0, "a node holds a partial hash")
            num_slots = node.num_blocks * tree.block_size
            require(len(node.tokens) == num_slots * TOKEN_BYTES, "a node has too many or too few tokens")
            require(node.span.length == num_slots, "a span is longer or shorter than its node")
            require(tree.find(node.first_hash) is node, "a node is not in the index")
            seen.add(node)
    require(len(seen) == tree.num_nodes, "the index holds a node that no root reaches")
    return seen


def _check_slots(tree: PrefixTree, nodes: set[Node], leases: Collection[Lease]) -> None:
    """Spans in use are those of nodes and leases, and the tenants' accounts say the same."""
    owned = [node.span for node in nodes] + [lease.private for lease in leases if lease.private is not None]
    require(set(owned) == set(tree.spans.used_spans()), "a span has no owner or a lost one")
    require(len(owned) == len(set(owned)), "a span has two owners")
    per_tenant: Counter[str] = Counter()
    for node in nodes:
        require(node.span.owner is node, "a span names another owner")
        per_tenant[node.scope.tenant] += node.span.length
    require(dict(per_tenant) == dict(tree.tenant_slots), "the tenants' accounts are wrong")
