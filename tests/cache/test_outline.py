"""The picture of the store: what it shows, what it never shows, and that it is bounded."""

from __future__ import annotations

import pytest

from kvreuse.cache.outline import NUM_CELLS
from kvreuse.cache.store import PrefixCache
from kvreuse.types import Scope

BLOCK = 4


def make_cache(num_slots: int = 240) -> PrefixCache:
    return PrefixCache(
        num_slots=num_slots, block_size=BLOCK, bytes_per_token=2, move_slots=lambda *_: None, clock=lambda: 100.0
    )


def store(cache: PrefixCache, token_ids: list[int], *, keep: bool = False) -> None:
    lease = cache.acquire(token_ids, scope=Scope())
    assert cache.reserve(lease, len(token_ids), num_computed_tokens=lease.num_cached_tokens)
    cache.commit(lease, token_ids, num_computed_tokens=len(token_ids))
    if not keep:
        cache.release(lease)


def test_the_tree_is_shown_from_the_roots_down_with_sizes_and_pins() -> None:
    cache = make_cache()
    store(cache, [*range(8), *range(20, 24)])
    store(cache, [*range(8), *range(30, 34)], keep=True)
    shared, *below = cache.outline(10, {}).nodes
    assert (shared.parent, shared.depth, shared.num_tokens, shared.num_children) == ("", 0, 8, 2)
    assert [(node.parent, node.depth, node.num_tokens) for node in below] == [(shared.id, 8, 4)] * 2
    assert shared.is_pinned
    assert sorted(node.is_pinned for node in below) == [False, True]


def test_no_more_nodes_are_shown_than_were_asked_for_and_all_are_counted() -> None:
    cache = make_cache()
    for first in range(20):
        store(cache, [first, 1, 2, 3, 4])
    outline = cache.outline(5, {})
    assert (len(outline.nodes), outline.num_nodes) == (5, 20)


@pytest.mark.parametrize("num_slots", [8, 240, 1000])
def test_the_strip_adds_up_to_what_is_in_use(num_slots: int) -> None:
    cache = make_cache(num_slots)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 3, 5][:3], keep=True)
    usage, strip = cache.usage(), cache.outline(5, {}).strip
    pinned, shared, private = (sum(cell[kind] for cell in strip) for kind in range(3))
    assert (pinned, pinned + shared, private) == (usage.pinned_slots, usage.node_slots, usage.private_slots)
    assert len(strip) <= NUM_CELLS


def test_a_span_over_several_cells_is_in_each_of_them() -> None:
    cache = make_cache(480)  # two slots a cell
    store(cache, list(range(12)))
    assert cache.outline(1, {}).strip[:7] == [[0, 2, 0]] * 6 + [[0, 0, 0]]


def test_a_name_is_stable_and_cannot_be_made_from_the_tokens() -> None:
    cache, other = make_cache(), make_cache()
    for one in (cache, other):
        store(one, [1, 2, 3, 4])
    (node,) = cache.outline(1, {}).nodes
    assert node.id == cache.outline(1, {}).nodes[0].id == other.outline(1, {}).nodes[0].id
    query_hash = cache.acquire([1, 2, 3, 4, 5], scope=Scope()).hashes[0]
    assert node.id not in query_hash.hex()


def test_a_node_is_named_after_the_prefix_that_ends_in_it() -> None:
    cache = make_cache()
    store(cache, [*range(8), *range(20, 24)])
    store(cache, [*range(8), *range(30, 34)])
    names = {"support": list(range(10)), "unseen": [9, 9, 9, 9], "short": [1, 2]}
    assert sorted(node.name for node in cache.outline(9, names).nodes) == ["", "", "support"]
