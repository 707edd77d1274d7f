"""A bounded picture of the store for people: who has which slots, and the top of the prefix tree.

Knows spans and nodes. Knows nothing of token ids: no prompt can be told from a picture. A picture, not an account:
spans may change while the strip is drawn, so that drawing holds no lock.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock

from kvreuse.cache.hashing import HASH_BYTES, block_hashes
from kvreuse.cache.node import Node
from kvreuse.cache.spans import Span
from kvreuse.cache.tree import PrefixTree

__all__ = ["NUM_CELLS", "NodeView", "Outline", "draw"]

NUM_CELLS = 240
_KEY = secrets.token_bytes(16)  # a bare hash of a prefix would let its reader test guesses of a prompt


@dataclass(frozen=True, slots=True)
class NodeView:
    """Tokens [depth, depth + num_tokens) of a prefix. `parent` is "" at the top.

    name: that of the known prefix which ends here, or "".
    """

    id: str
    parent: str
    name: str
    depth: int
    num_tokens: int
    num_children: int
    uses: int
    idle_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Outline:
    """strip: for each of NUM_CELLS equal parts of the pool (pinned, shared, private) slots; the rest is free.

    nodes: parents before children, the most recently used first; the `num_nodes` of the whole tree may be more.
    """

    num_slots: int
    strip: list[list[int]]
    nodes: list[NodeView]
    num_nodes: int


def draw(tree: PrefixTree, names: Mapping[str, Sequence[int]], *, lock: RLock, max_nodes: int, now_s: float) -> Outline:
    """The picture of this moment. `lock`: the structure lock; it is held for the tree and to list the spans only.

    names: what to call the node in which these tokens end (the last whole block of them).
    """
    with lock:
        nodes = _draw_tree(tree, names, max_nodes=max_nodes, now_s=now_s)
        used, num_nodes, num_slots = tree.spans.used_spans(), tree.num_nodes, tree.spans.num_slots
    return Outline(num_slots, _draw_strip(used, num_slots=num_slots), nodes, num_nodes)


def _draw_tree(tree: PrefixTree, names: Mapping[str, Sequence[int]], *, max_nodes: int, now_s: float) -> list[NodeView]:
    """The `max_nodes` nodes nearest to the roots."""
    views: list[NodeView] = []
    waiting: deque[tuple[Node, str]] = deque()

    def look_below(node: Node, name: str) -> None:
        room = max_nodes - len(views) - len(waiting)
        for child, _ in zip(reversed(node.children.values()), range(room), strict=False):
            waiting.append((child, name))

    named: dict[bytes, str] = {}
    for root in tree.roots(None):
        look_below(root, "")
        for name, token_ids in names.items():
            for block_hash in block_hashes(token_ids, scope=root.scope, block_size=tree.block_size)[-1:]:
                named[block_hash] = name
    while waiting:
        node, parent = waiting.popleft()
        name = hashlib.blake2b(node.first_hash, key=_KEY, digest_size=4).hexdigest()
        views.append(
            NodeView(
                id=name,
                parent=parent,
                name=_name(node, named),
                depth=node.depth * tree.block_size,
                num_tokens=node.num_blocks * tree.block_size,
                num_children=len(node.children),
                uses=node.num_uses,
                idle_s=now_s - node.last_used_s,
                is_pinned=node.pins > 0,
            )
        )
        look_below(node, name)
    return views


def _name(node: Node, named: Mapping[bytes, str]) -> str:
    if not named:
        return ""
    hashes = (node.hashes[at : at + HASH_BYTES] for at in range(0, len(node.hashes), HASH_BYTES))
    return ", ".join(named[block_hash] for block_hash in hashes if block_hash in named)


def _draw_strip(spans: Sequence[Span], *, num_slots: int) -> list[list[int]]:
    """Slots of each kind in each cell."""
    width = -(-num_slots // NUM_CELLS)
    cells = [[0, 0, 0] for _ in range(-(-num_slots // width))]
    for span in spans:
        owner, start = span.owner, span.start
        left = min(span.length, num_slots - start)  # it may have moved between the two
        kind = 2 if owner is None else 0 if owner.pins else 1
        cell, inside = divmod(start, width)
        while inside + left > width:
            cells[cell][kind] += width - inside
            left -= width - inside
            cell, inside = cell + 1, 0
        cells[cell][kind] += left
    return cells
