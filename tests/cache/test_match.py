"""What matches, what is pinned, and the reason why not more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from cache.harness import BLOCK, SCOPE, World, prompt

from kvreuse.cache.hashing import block_hashes
from kvreuse.types import MissReason, Scope


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_repeated_prompt_matches_all_whole_blocks_before_its_last_token(num_tokens: int) -> None:
    world, tokens = World(), list(range(num_tokens))
    assert world.run(tokens) == 0
    assert world.run(tokens) == (num_tokens - 1) // BLOCK * BLOCK
    world.check()


@pytest.mark.parametrize("at", range(3 * BLOCK))
def test_prompts_that_differ_at_a_token_share_the_blocks_before_it_only(at: int) -> None:
    world, tokens = World(), prompt(1, 3)
    world.run(tokens)
    other = [*tokens[:at], 7, *tokens[at + 1 :]]
    with world.start(other) as lease:
        assert lease.num_cached_tokens == at // BLOCK * BLOCK
        assert (lease.miss_reason, lease.diverged_at) == ((MissReason.DIVERGED, at) if at else (MissReason.COLD, None))
    assert world.run(tokens) == 3 * BLOCK
    assert world.run(other) == 3 * BLOCK
    world.check()


def test_two_extenders_of_one_prefix_do_not_see_each_other() -> None:
    world, shared = World(), prompt(1, 3, extra=0)
    world.run([*shared, 0])
    with world.start([*shared, 1, 2, 3, 4, 5]) as left, world.start([*shared, 6, 7, 8, 9, 10]) as right:
        assert left.num_cached_tokens == right.num_cached_tokens == len(shared)
        assert left.runs(len(shared)) == right.runs(len(shared))
        world.check_lease(left, [*shared, 1, 2, 3, 4, 5])
        world.check_lease(right, [*shared, 6, 7, 8, 9, 10])
        world.check()
    world.check()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    world, tokens = World(), prompt(1, 2)
    with world.start(tokens) as lease:
        for token in range(50, 50 + 2 * BLOCK):
            tokens.append(token)
            assert world.prefill(lease, tokens)
    assert world.run([*tokens, 1, 2, 3]) == 4 * BLOCK
    world.check()


def test_blocks_of_one_writer_are_one_run_and_one_node() -> None:
    world, tokens = World(), prompt(1, 6)
    with world.cache.acquire(tokens, scope=SCOPE) as lease:
        assert world.cache.reserve(lease, len(tokens), num_computed_tokens=0)
        world.write(lease, tokens, begin=0)
        for num_tokens in range(0, len(tokens) + 1, 3):
            world.cache.commit(lease, tokens, num_computed_tokens=num_tokens)
            world.check()
        assert len(lease.runs(len(tokens))) == 1
    assert world.cache.usage().num_nodes == 1
    assert world.cache.usage().num_blocks == 6


def test_peek_tells_what_would_match_and_changes_nothing() -> None:
    world, tokens = World(), prompt(1, 4)
    world.run(tokens)
    before = world.cache.usage()
    assert world.cache.peek(tokens, scope=SCOPE) == 4 * BLOCK
    assert world.cache.peek([*tokens[: 2 * BLOCK + 1], 9, 9, 9, 9], scope=SCOPE) == 2 * BLOCK
    assert world.cache.peek([5], scope=SCOPE) == world.cache.peek(tokens, scope=Scope(tenant="t")) == 0
    assert world.cache.usage() == before
    world.check()


def test_hashes_that_the_caller_has_are_used_and_left_alone() -> None:
    world, tokens = World(), prompt(1, 4)
    hashes = block_hashes(tokens[: 2 * BLOCK], scope=SCOPE, block_size=BLOCK)
    whole = block_hashes(tokens, scope=SCOPE, block_size=BLOCK)
    with world.cache.acquire(tokens, scope=SCOPE, hashes=whole) as lease:
        assert world.prefill(lease, [*tokens, *range(BLOCK)])
    assert len(whole) == 4
    assert world.cache.peek(tokens, scope=SCOPE, hashes=whole) == 4 * BLOCK
    assert world.cache.peek(tokens[: 2 * BLOCK + 1], scope=SCOPE, hashes=hashes) == 2 * BLOCK
    world.check()


def test_a_writer_of_blocks_that_are_there_by_now_switches_to_them() -> None:
    world, tokens = World(), prompt(1, 4, extra=2)
    late = world.cache.acquire(tokens, scope=SCOPE)
    assert world.prefill(late, tokens, commit=False)
    world.run(tokens)
    assert world.cache.commit(late, tokens, num_computed_tokens=len(tokens)) == 4
    world.check_lease(late, tokens)
    usage = world.cache.usage()
    assert (usage.num_blocks, usage.node_slots, usage.private_slots) == (4, 4 * BLOCK, 2)
    with world.start(tokens) as other:
        assert other.runs(4 * BLOCK) == late.runs(4 * BLOCK)
    world.check()
    world.cache.release(late)
    world.check()


def test_a_writer_that_knows_more_switches_and_stores_the_rest() -> None:
    world, tokens = World(), prompt(1, 5)
    late = world.cache.acquire(tokens, scope=SCOPE)
    assert world.prefill(late, tokens, commit=False)
    world.run([*tokens[: 2 * BLOCK], 9, 9, 9, 9])
    assert world.cache.commit(late, tokens, num_computed_tokens=len(tokens)) == 5
    world.check_lease(late, tokens)
    world.check()
    world.cache.release(late)
    assert world.run(tokens) == 5 * BLOCK
    assert world.cache.usage().num_blocks == 6
    world.check()


def test_reuse_off_neither_matches_nor_stores() -> None:
    world, tokens = World(), prompt(1, 3)
    world.run(tokens)
    before = world.cache.usage()
    with world.start(tokens, reuse=False) as lease:
        assert (lease.num_cached_tokens, lease.miss_reason) == (0, MissReason.DISABLED)
        assert lease.num_committed_tokens == 0
        world.check()
    after = world.cache.usage()
    assert (after.num_blocks, after.hit_tokens, after.num_lookups) == (3, before.hit_tokens, before.num_lookups)
    world.check()


def reason_of(world: World, tokens: list[int], *, scope: Scope = SCOPE) -> tuple[MissReason | None, int | None]:
    with world.cache.acquire(tokens, scope=scope) as lease:
        return lease.miss_reason, lease.diverged_at


def test_a_full_match_has_no_reason() -> None:
    world = World()
    world.run(prompt(1, 3))
    assert reason_of(world, prompt(1, 3)) == (None, None)
    assert reason_of(world, prompt(1, 2)) == (None, None)
    world.check()


@pytest.mark.parametrize("num_tokens", [1, BLOCK])
def test_a_prompt_without_a_block_before_its_last_token_is_below_min(num_tokens: int) -> None:
    world = World()
    assert reason_of(world, list(range(num_tokens))) == (MissReason.BELOW_MIN, None)
    assert reason_of(world, list(range(BLOCK + 1))) == (MissReason.COLD, None)
    world.check()


def test_a_longer_prompt_than_any_cached_one_is_cold() -> None:
    world = World()
    world.run(prompt(1, 2))
    assert reason_of(world, prompt(1, 4)) == (MissReason.COLD, None)
    world.check()


def test_divergence_names_the_continuation_that_shares_most() -> None:
    world, shared = World(), prompt(1, 2, extra=0)
    for tail in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [8, 8, 8, 8, 8]):
        world.run([*shared, *tail])
    assert reason_of(world, [*shared, 1, 2, 3, 7, 7]) == (MissReason.DIVERGED, 2 * BLOCK + 3)
    assert reason_of(world, [*shared, 1, 2, 7, 7, 7]) == (MissReason.DIVERGED, 2 * BLOCK + 2)
    assert reason_of(world, [*shared, 7, 7, 7, 7, 7]) == (MissReason.DIVERGED, 2 * BLOCK)
    world.check()


def test_only_the_sixteen_continuations_used_last_are_examined() -> None:
    world, shared = World(), prompt(1, 1, extra=0)
    for first in range(20):
        world.run([*shared, first, 1, 1, 1, 1])
    assert reason_of(world, [*shared, 19, 2, 2, 2, 2]) == (MissReason.DIVERGED, BLOCK + 1)
    assert reason_of(world, [*shared, 0, 2, 2, 2, 2]) == (MissReason.DIVERGED, BLOCK)
    world.run([*shared, 0, 1, 1, 1, 1])
    assert reason_of(world, [*shared, 0, 2, 2, 2, 2]) == (MissReason.DIVERGED, BLOCK + 1)
    world.check()


def test_another_model_or_adapter_of_the_same_tenant_is_named_and_not_used() -> None:
    world, tokens = World(), prompt(1, 2)
    world.run(tokens, scope=Scope(model="m", adapter="a", tenant="t"))
    for scope in (Scope(model="m", adapter="b", tenant="t"), Scope(model="n", adapter="a", tenant="t")):
        assert world.cached(tokens, scope=scope) == 0
        assert reason_of(world, tokens, scope=scope) == (MissReason.SCOPE, None)
    world.check()


def test_two_tenants_can_tell_nothing_of_each_other() -> None:
    secret, near = prompt(1, 4), [*prompt(1, 4)[:6], 9, 9, 9, 9]
    told = []
    for is_stored in (False, True):
        world = World()
        if is_stored:
            world.run(secret, scope=Scope(model="m", tenant="victim"))
        scope = Scope(model="m", tenant="spy")
        told.append([reason_of(world, tokens, scope=scope) for tokens in (secret, near)])
        assert world.run(secret, scope=scope) == 0
        world.check()
    assert told[0] == told[1] == [(MissReason.COLD, None)] * 2


def test_a_colliding_first_block_is_a_miss_that_is_counted_and_never_overwritten() -> None:
    world, victim, attacker = World(), prompt(1, 3), prompt(2, 3)
    world.run(victim)
    forged = block_hashes(victim, scope=SCOPE, block_size=BLOCK)
    with world.cache.acquire(attacker, scope=SCOPE, hashes=forged) as lease:
        assert lease.num_cached_tokens == 0
        assert world.cache.usage().num_collisions == 1
        assert world.prefill(lease, attacker)
        world.check_lease(lease, attacker)
        assert lease.num_committed_tokens == 0
    assert world.cache.peek(attacker, scope=SCOPE, hashes=forged) == 0
    assert world.run(victim) == 3 * BLOCK
    world.check()


def test_a_collision_inside_a_node_ends_the_match_there() -> None:
    world, victim = World(), prompt(1, 3)
    world.run(victim)
    attacker = [*victim[:BLOCK], *prompt(2, 2)]
    forged = block_hashes(victim, scope=SCOPE, block_size=BLOCK)
    with world.cache.acquire(attacker, scope=SCOPE, hashes=forged) as lease:
        assert lease.num_cached_tokens == BLOCK
        assert world.cache.usage().num_collisions >= 1
        assert world.prefill(lease, attacker)
    assert world.run(victim) == 3 * BLOCK
    world.check()


@pytest.mark.parametrize("field", ["tenant", "adapter", "model"])
def test_the_same_tokens_under_a_forged_hash_of_another_scope_miss(field: str) -> None:
    world, tokens = World(), prompt(1, 2)
    world.run(tokens)
    forged = block_hashes(tokens, scope=SCOPE, block_size=BLOCK)
    assert world.cache.peek(tokens, scope=Scope(**{field: "other"}), hashes=forged) == 0
    world.check()


def test_hits_and_misses_are_counted_in_tokens() -> None:
    world = World()
    for num_blocks in (2, 2, 4):
        world.run(prompt(1, num_blocks, extra=3))
    usage = world.cache.usage()
    assert usage.num_lookups == 3
    assert usage.hit_tokens == (0 + 2 + 2) * BLOCK
    assert usage.hit_tokens + usage.miss_tokens == (2 + 2 + 4) * BLOCK + 9
    world.check()


def test_a_lease_tells_its_slots_and_refuses_positions_it_does_not_hold() -> None:
    world, tokens = World(), prompt(1, 2)
    with world.start(tokens) as lease:
        runs = lease.runs(len(tokens))
        assert all(a[0] + a[1] != b[0] for a, b in pairwise(runs))
        for bad in (-1, len(tokens)):
            with pytest.raises(ValueError, match="position"):
                lease.slot(bad)
        with pytest.raises(ValueError, match="tokens asked"):
            lease.runs(len(tokens) + 1)
    with pytest.raises(ValueError, match="released"):
        world.cache.reserve(lease, 99, num_computed_tokens=0)
    world.check()


def test_more_tokens_than_have_slots_cannot_be_committed() -> None:
    world, tokens = World(), prompt(1, 2)
    with world.cache.acquire(tokens, scope=SCOPE) as lease, pytest.raises(ValueError, match="cannot commit"):
        world.cache.commit(lease, tokens, num_computed_tokens=BLOCK)
    world.check()


def test_a_forged_hash_of_another_branch_is_a_miss_though_its_tokens_are_the_same() -> None:
    world, left, right = World(), prompt(1, 1, extra=0), prompt(2, 1, extra=0)
    same = [5, 5, 5, 5]
    for tail in (same, [6, 6, 6, 6]):
        world.run([*left, *tail, 0])
    world.run([*right, 0])
    attacker = [*right, *same, 0]
    forged = [
        block_hashes(tokens, scope=SCOPE, block_size=BLOCK)[at] for tokens, at in ((right, 0), ([*left, *same], 1))
    ]
    assert world.cache.peek(attacker, scope=SCOPE, hashes=forged) == BLOCK
    world.check()


def test_a_node_that_a_second_lease_holds_is_not_extended_under_it() -> None:
    world, tokens = World(), prompt(1, 2, extra=0)
    with world.start(tokens) as writer, world.cache.acquire([*tokens, 9], scope=SCOPE) as reader:
        assert reader.num_cached_tokens == len(tokens)
        assert world.prefill(writer, [*tokens, 1, 2, 3, 4])
        assert world.prefill(reader, [*tokens, 5, 6, 7, 8])
        world.check_lease(reader, [*tokens, 5, 6, 7, 8])
        world.check()
    assert world.cached([*tokens, 1, 2, 3, 4]) == world.cached([*tokens, 5, 6, 7, 8]) == 3
    world.check()
