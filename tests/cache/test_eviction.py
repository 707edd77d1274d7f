"""Who leaves, in which order, how much, and what stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cache.harness import BLOCK, SCOPE, World, prompt

from kvreuse.errors import ConfigError
from kvreuse.types import MissReason, Scope

POLICIES = ["lru", "lfu", "size_weighted_lru"]


def eviction_order(world: World, prompts: dict[str, list[int]]) -> list[str]:
    """Names of prompts in the order in which their last blocks leave, one slot wanted more each time."""
    order: list[str] = []
    total = world.cache.usage().num_slots
    with world.cache.acquire([1], scope=SCOPE) as lease:
        for num_tokens in range(1, total + 1):
            before = {name: world.cached(tokens) for name, tokens in prompts.items()}
            assert world.cache.reserve(lease, num_tokens, num_computed_tokens=0)
            order += [name for name, tokens in prompts.items() if before[name] and not world.cached(tokens)]
            world.check()
    return order


def fill(world: World, uses: list[tuple[str, int]], prompts: dict[str, list[int]]) -> None:
    for name, count in uses:
        for _ in range(count):
            world.clock.now += 1
            world.run(prompts[name])


PROMPTS = {name: prompt(i, 2) for i, name in enumerate("abc", start=1)}


@pytest.mark.parametrize(
    ("policy", "uses", "expected"),
    [
        ("lru", [("a", 1), ("b", 1), ("c", 1)], "abc"),
        ("lru", [("a", 3), ("b", 1), ("c", 1), ("b", 1)], "acb"),
        ("lfu", [("a", 3), ("b", 1), ("c", 2)], "bca"),
        ("lfu", [("a", 1), ("b", 1), ("a", 1), ("c", 1)], "bca"),
        ("size_weighted_lru", [("a", 1), ("b", 1), ("c", 1)], "abc"),
        ("size_weighted_lru", [("a", 5), ("b", 1), ("c", 1)], "bca"),
    ],
)
def test_the_policy_decides_the_order(policy: str, uses: list[tuple[str, int]], expected: str) -> None:
    world = World(num_blocks=8, policy=policy)
    fill(world, uses, PROMPTS)
    assert "".join(eviction_order(world, PROMPTS)) == expected


def test_of_two_equally_old_the_larger_leaves_first_by_default() -> None:
    prompts = {"small": prompt(1, 1), "large": prompt(2, 6)}
    world = World(num_blocks=8, lru_weights=(1.0, 0.0))
    for lease in [world.start(tokens) for tokens in prompts.values()]:
        world.cache.release(lease)
    with world.start(prompt(3, 6, extra=0)):
        assert [world.cached(tokens) for tokens in prompts.values()] == [1, 1]
    world.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_children_leave_before_parents_and_tails_before_heads(policy: str) -> None:
    world, stem = World(num_blocks=8, policy=policy), prompt(1, 2, extra=0)
    left, right = [*stem, *prompt(2, 2)], [*stem, *prompt(3, 2)]
    world.run(left)
    world.run(right)
    sizes = []
    with world.cache.acquire([1], scope=SCOPE) as lease:
        for num_blocks in range(2, 9):
            assert world.cache.reserve(lease, num_blocks * BLOCK, num_computed_tokens=0)
            sizes.append((world.cached(left), world.cached(right)))
            world.check()
    assert sizes == [(4, 4), (3, 4), (2, 4), (2, 3), (2, 2), (1, 1), (0, 0)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_insert_over_budget_evicts_only_what_is_missing(policy: str) -> None:
    world = World(num_blocks=16, policy=policy)
    for first in range(8):
        world.run(prompt(first + 1, 2, extra=0))
        world.clock.now += 1
    world.run([*prompt(8, 2, extra=0), 5])
    world.check()
    before = world.cache.usage()
    assert before.free_slots == BLOCK
    with world.start(prompt(90, 3, extra=0)):
        after = world.cache.usage()
        assert after.num_evicted_blocks - before.num_evicted_blocks == 2
        assert after.free_slots == 0
        world.check()
    assert world.cached(prompt(8, 2)) == 2


@pytest.mark.parametrize("num_uses", [4, 16, 100])
def test_a_flood_of_one_off_prompts_does_not_push_out_a_hot_template(num_uses: int) -> None:
    world, template = World(num_blocks=64), prompt(1, 8, extra=0)
    for variant in range(num_uses):
        world.run([*template, *prompt(100 + variant, 1)])
        world.clock.now += 1
    for one_off in range(10 * 64 // 4):
        world.run(prompt(1000 + one_off, 4))
        world.clock.now += 1
    assert world.cache.usage().num_evicted_blocks >= 9 * 64
    assert world.cached(template) == 8
    world.check()


def run_in_turn(world: World, prompts: list[list[int]], *, rounds: int) -> int:
    """Cached tokens of the last round."""
    hits = 0
    for _ in range(rounds):
        hits = 0
        for tokens in prompts:
            world.clock.now += 1
            hits += world.run(tokens)
    return hits


def test_prompts_that_return_after_more_than_the_pool_holds_keep_a_part_of_themselves_where_lru_keeps_none() -> None:
    prompts = [prompt(first, 16, extra=0) for first in range(1, 25)]
    worlds = {policy: World(num_blocks=256, policy=policy) for policy in ("lru", "size_weighted_lru")}
    hits = {policy: run_in_turn(world, prompts, rounds=40) for policy, world in worlds.items()}
    assert hits["lru"] == 0
    assert hits["size_weighted_lru"] >= 128 * BLOCK
    for world in worlds.values():
        world.check()


def test_prompts_with_little_that_is_new_outlive_long_ones_where_only_they_return() -> None:
    hits = Counter[str]()
    for policy in ("lru", "size_weighted_lru"):
        world = World(num_blocks=64, policy=policy)
        for turn in range(200):
            world.clock.now += 1
            world.run(prompt(10_000 + turn, 20))
            world.run(prompt(turn, 2))
            if turn >= 150:
                hits[policy] += world.run(prompt(turn - 8, 2)) // BLOCK
            elif turn >= 8:
                world.run(prompt(turn - 8, 2))
        world.check()
    assert hits["lru"] == 0
    assert hits["size_weighted_lru"] >= 80


@pytest.mark.parametrize(("weights", "expected"), [((0.0, 1.0), "abc"), ((1.0, 0.0), "bca")])
def test_the_weights_choose_between_age_and_what_uses_promise(weights: tuple[float, float], expected: str) -> None:
    world = World(num_blocks=8, lru_weights=weights)
    fill(world, [("a", 20), ("b", 1), ("c", 1)], PROMPTS)
    assert "".join(eviction_order(world, PROMPTS)) == expected


def test_a_returning_head_and_the_new_blocks_behind_it_do_not_share_their_uses() -> None:
    world, head = World(num_blocks=8, policy="lfu"), prompt(1, 3, extra=0)
    world.run(head)
    for first in (2, 3, 4):
        world.run(prompt(first, 4))
    assert world.cached(head) == 0
    world.run([*head, *prompt(9, 3)])
    world.run(prompt(5, 4))
    assert world.cached([*head, *prompt(9, 3)]) == 3
    world.check()


def test_a_template_that_nobody_uses_any_more_leaves_in_the_end() -> None:
    world, template = World(num_blocks=16), prompt(1, 4, extra=0)
    for variant in range(10):
        world.run([*template, *prompt(100 + variant, 1)])
    for one_off in range(2000):
        world.run(prompt(1000 + one_off, 4))
    assert world.cached(template) == 0
    world.check()


def test_a_block_that_returns_after_its_eviction_counts_as_reused() -> None:
    world = World(num_blocks=8, policy="lfu")
    back, others = prompt(1, 2), [prompt(first, 4) for first in (2, 3)]
    for tokens in (back, *others):
        world.run(tokens)
    assert world.cached(back) == 0
    world.run(back)
    for first in (4, 5, 6):
        world.run(prompt(first, 4))
    assert world.cached(back) == 2
    world.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_is_neither_evicted_nor_moved(policy: str) -> None:
    world, tokens = World(num_blocks=12, policy=policy), prompt(1, 3)
    world.run(prompt(50, 2))
    world.run(tokens)
    with world.cache.acquire(tokens, scope=SCOPE) as pin:
        runs = pin.runs(pin.num_committed_tokens)
        for one_off in range(40):
            world.clock.now += 1
            world.run(prompt(100 + one_off, 2 + one_off % 4))
            world.check()
        world.cache.compact()
        assert pin.runs(pin.num_committed_tokens) == runs
        world.check_lease(pin, tokens[: 3 * BLOCK])
    world.check()


def test_when_eviction_cannot_suffice_nothing_is_evicted() -> None:
    world = World(num_blocks=8)
    with world.start(prompt(2, 3, extra=0)) as running, world.cache.acquire([1], scope=SCOPE) as lease:
        world.run(prompt(1, 3))
        before = world.cache.usage()
        assert not world.cache.reserve(lease, 5 * BLOCK + 1, num_computed_tokens=0)
        assert world.cache.usage().num_blocks == before.num_blocks
        assert world.cache.usage().num_evicted_blocks == 0
        assert world.cache.usage().num_oom == 1
        assert world.cached(prompt(1, 3)) == 3
        assert world.cache.reserve(lease, 5 * BLOCK, num_computed_tokens=0)
        world.check_lease(running, prompt(2, 3, extra=0))
        world.check()
    world.check()


def test_evicted_and_expired_blocks_are_named_as_such() -> None:
    world = World(num_blocks=4, ttl_s=60.0)
    world.run(prompt(1, 2))
    world.run(prompt(2, 3))
    with world.cache.acquire(prompt(1, 2), scope=SCOPE) as lease:
        assert lease.miss_reason is MissReason.EVICTED
    world.clock.now += 61
    with world.cache.acquire(prompt(2, 3), scope=SCOPE) as lease:
        assert (lease.num_cached_tokens, lease.miss_reason) == (0, MissReason.EXPIRED)
    assert world.cache.usage().num_blocks == 0
    assert world.cache.usage().num_expired_blocks == 3
    world.check()


def test_a_block_lives_on_while_it_is_used_and_expires_after_its_ttl() -> None:
    world, tokens = World(ttl_s=60.0), prompt(1, 2)
    for _ in range(3):
        world.run(tokens)
        world.clock.now += 59
    assert world.cache.expire() == 0
    world.clock.now += 2
    assert world.cache.peek(tokens, scope=SCOPE) == 0
    assert world.cache.usage().num_blocks == 2
    assert world.cache.expire() == 2
    assert world.cache.usage().num_blocks == 0
    world.check()


def test_an_old_branch_expires_and_its_used_stem_stays() -> None:
    world, stem = World(ttl_s=60.0), prompt(1, 2, extra=0)
    world.run([*stem, *prompt(2, 2)])
    world.clock.now += 50
    world.run([*stem, *prompt(3, 2)])
    world.clock.now += 20
    assert world.cache.expire() == 2
    assert world.cached([*stem, *prompt(2, 2)]) == 2
    assert world.cached([*stem, *prompt(3, 2)]) == 4
    world.check()


def test_a_pinned_template_does_not_expire() -> None:
    world, tokens = World(ttl_s=60.0), prompt(1, 2)
    world.run(tokens)
    with world.cache.acquire(tokens, scope=SCOPE):
        world.clock.now += 1000
        assert world.cache.expire() == 0
        assert world.run(tokens) == 2 * BLOCK
    world.check()


def test_purge_drops_one_tenant_at_once_and_leaves_the_others() -> None:
    world, tokens = World(), prompt(1, 2)
    left, right = Scope(tenant="left"), Scope(tenant="right", adapter="x")
    for scope in (left, right, Scope(tenant="right")):
        world.run(tokens, scope=scope)
    assert world.cache.purge(tenant="right") == 4
    assert [world.cached(tokens, scope=scope) for scope in (left, right)] == [2, 0]
    with world.cache.acquire(tokens, scope=right) as lease:
        assert lease.miss_reason is MissReason.COLD
    assert dict(world.cache.usage().tenant_bytes) == {"left": 2 * BLOCK * 10}
    assert world.cache.purge() == 2
    assert world.cache.usage().free_slots == world.cache.usage().num_slots
    world.check()


def test_purged_blocks_in_use_serve_their_request_and_leave_with_it() -> None:
    world, tokens = World(), prompt(1, 3)
    world.run(tokens)
    with world.start([*tokens, 1, 2, 3, 4]) as lease:
        assert world.cache.purge() == 4
        assert world.cached(tokens) == 0
        world.check_lease(lease, [*tokens, 1, 2, 3, 4])
        assert world.prefill(lease, [*tokens, *range(1, 9)])
        world.check()
        assert world.run(tokens) == 0
        world.check()
    assert world.cached(tokens) == 3
    assert world.cache.usage().num_blocks == 3
    assert world.cache.usage().private_slots == 0
    world.check()


def test_a_tenant_over_its_quota_evicts_its_own_and_nobody_elses() -> None:
    quota: dict[str, Any] = {"tenant_quota_bytes": 4 * BLOCK * 10}
    world, small, big = World(**quota), Scope(tenant="small"), Scope(tenant="big")
    world.run(prompt(1, 2), scope=small)
    for first in range(2, 8):
        world.run(prompt(first, 2), scope=big)
        assert world.cache.usage().tenant_bytes["big"] <= quota["tenant_quota_bytes"]
        world.check()
    assert world.cached(prompt(1, 2), scope=small) == 2
    assert [world.cached(prompt(first, 2), scope=big) for first in range(2, 8)] == [0, 0, 0, 0, 2, 2]
    with world.start(prompt(9, 5), scope=big) as lease:
        assert lease.num_committed_tokens == 0
    assert world.cached(prompt(7, 2), scope=big) == 2
    world.check()


def test_bytes_are_accounted_exactly() -> None:
    world = World(num_blocks=16)
    with world.start(prompt(1, 3, extra=2), scope=Scope(tenant="t")) as lease:
        usage = world.cache.usage()
        assert (usage.node_slots, usage.private_slots, usage.pinned_slots) == (3 * BLOCK, 2, 3 * BLOCK)
        assert usage.free_slots == 16 * BLOCK - 3 * BLOCK - 2
        assert usage.used_bytes == (3 * BLOCK + 2) * 10
        assert dict(usage.tenant_bytes) == {"t": 3 * BLOCK * 10}
        world.check()
        world.cache.release(lease)
    usage = world.cache.usage()
    assert (usage.private_slots, usage.pinned_slots, usage.max_used_slots) == (0, 0, 3 * BLOCK + 2)
    world.check()


@pytest.mark.parametrize(
    "settings",
    [{"policy": "fifo"}, {"lru_weights": (0.0, 0.0)}, {"lru_weights": (-1.0, 2.0)}, {"num_blocks": 0}],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        World(**settings)
