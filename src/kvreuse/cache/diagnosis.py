"""Why a match ended where it did.

Knows the tree and what left it. Looks only at what the caller's own tenant stored: a scope names its tenant, and hashes
contain the scope. Changes nothing. Under the structure lock.
"""

from __future__ import annotations

from itertools import islice

from kvreuse.cache.hashing import TOKEN_BYTES, extend_hashes
from kvreuse.cache.node import Node, Walk, common_prefix
from kvreuse.cache.tree import PrefixTree
from kvreuse.types import MissReason

__all__ = ["why_not_more"]

# The most recently used only: a template may have any number of continuations.
_MAX_EXAMINED = 16


def why_not_more(tree: PrefixTree, walk: Walk) -> tuple[MissReason, int | None]:
    """The reason why the block after the walk's end did not match and, for DIVERGED, the first token that differs."""
    reason = tree.policy.reason(walk.hashes[walk.num_blocks])
    if reason is not None:
        return reason, None
    reached, begin = walk.node or tree.root(walk.scope), walk.num_blocks * tree.block_size
    num_common = _longest_common(reached, walk.tokens[begin * TOKEN_BYTES :]) if reached and reached.children else -1
    if num_common > 0 or (num_common == 0 and walk.num_blocks > 0):
        return MissReason.DIVERGED, begin + num_common
    if walk.num_blocks == 0 and _is_elsewhere(tree, walk):
        return MissReason.SCOPE, None
    return MissReason.COLD, None


def _longest_common(reached: Node, rest: bytes) -> int:
    """Tokens that `rest` shares with a continuation of `reached`."""
    longest, longer = 0, b""
    for child in islice(reversed(reached.children.values()), _MAX_EXAMINED):
        if child.tokens.startswith(longer):
            longest = common_prefix(child.tokens, rest, unit=TOKEN_BYTES)
            longer = rest[: (longest + 1) * TOKEN_BYTES]
    return longest


def _is_elsewhere(tree: PrefixTree, walk: Walk) -> bool:
    """Is the first block cached under another model or adapter of the same tenant?"""
    packed = walk.tokens[: tree.block_size * TOKEN_BYTES]
    for root in islice(tree.roots(walk.scope.tenant), _MAX_EXAMINED):
        if root.scope == walk.scope:
            continue
        hashes: list[bytes] = []
        extend_hashes(hashes, packed, scope=root.scope, block_size=tree.block_size)
        node = root.children.get(hashes[0])
        if node is not None and node.tokens.startswith(packed):
            return True
    return False
