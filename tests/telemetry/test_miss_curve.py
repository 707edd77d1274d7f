"""The miss curve against a plain LRU cache of every size, and sampled against exact."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreuse.telemetry.miss_curve import MissCurve

B = 4
Prompts = Sequence[Sequence[int]]


def lru_hits(prompts: Prompts, *, num_blocks: int) -> int:
    """Tokens that a cache of so many blocks serves: the leading blocks that are there, never the last token's."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        for block in blocks[: (len(blocks) * B - 1) // B]:
            if block not in cache:
                break
            hits += B
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            while len(cache) > num_blocks:
                cache.popitem(last=False)
    return hits


def chains(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Block names that stand for everything before them."""
    names: dict[tuple[int, ...], int] = {}
    return [[names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))] for path in paths]


def curve_of(prompts: Prompts, **settings: int) -> MissCurve:
    curve = MissCurve(block_size=B, **settings)
    for blocks in prompts:
        curve.add(blocks, num_prompt_tokens=len(blocks) * B)
    return curve


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_every_size_hits_what_an_lru_cache_of_that_size_hits(paths: list[list[int]], num_blocks: int) -> None:
    prompts = chains(paths)
    assert curve_of(prompts).hit_tokens(num_blocks * B) == lru_hits(prompts, num_blocks=num_blocks)


def test_it_stays_exact_when_times_of_use_are_renumbered() -> None:
    chance = random.Random(1)
    prompts = chains([[chance.randrange(40), chance.randrange(5), chance.randrange(5)] for _ in range(1500)])
    curve = curve_of(prompts)
    for num_blocks in (10, 60, 200, 900):
        assert curve.hit_tokens(num_blocks * B) == lru_hits(prompts, num_blocks=num_blocks)


def template_prompts() -> list[list[int]]:
    """300 templates of 12 blocks with 4 own ones, popular ones more often."""
    chance = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(300)]
    drawn = chance.choices(range(300), weights, k=4000)
    return [[t * 100 + i for i in range(12)] + [10**6 + n * 4 + i for i in range(4)] for n, t in enumerate(drawn)]


@pytest.mark.parametrize("num_blocks", [200, 1000, 3000, inf])
def test_a_sample_of_one_block_in_eight_comes_close(num_blocks: float) -> None:
    exact, sampled = (curve_of(template_prompts(), sample_every=every) for every in (1, 8))
    few = 0.05 * sum(len(blocks) * B for blocks in template_prompts())
    assert sampled.hit_tokens(num_blocks * B) == pytest.approx(exact.hit_tokens(num_blocks * B), abs=few)


def test_memory_is_bounded_and_small_sizes_stay_right() -> None:
    exact, bounded = curve_of(template_prompts()), curve_of(template_prompts(), max_blocks=2000)
    assert len(bounded._places) == 2000
    assert bounded.hit_tokens(500 * B) == exact.hit_tokens(500 * B)


def test_a_hotter_spot_than_the_sample_can_see_is_not_lost() -> None:
    prompts = [[1, 1000 + n] for n in range(500)]  # block 1 is never drawn: 1 % 8 != 0
    sampled, exact = curve_of(prompts, sample_every=8), curve_of(prompts)
    assert sampled.hit_tokens(inf) == pytest.approx(exact.hit_tokens(inf), abs=0.05 * 1000 * B)


def test_nothing_seen_is_no_hit() -> None:
    curve = MissCurve(block_size=B)
    curve.add([], num_prompt_tokens=3)
    assert curve.hit_tokens(inf) == 0
