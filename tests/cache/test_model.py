"""Random operations against a naive model: a set of block tuples, and what every live lease wrote."""

from __future__ import annotations

from typing import Any

from cache.harness import BLOCK, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvreuse.cache.lease import Lease
from kvreuse.types import MissReason, Scope

SCOPES = [Scope(), Scope(tenant="t"), Scope(tenant="t", adapter="a")]
# Few distinct tokens, so that prompts share, diverge inside blocks and repeat.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6 * BLOCK)
Key = tuple[Scope, tuple[int, ...]]


class AnyMixOfRequests(RuleBasedStateMachine):
    """`stored` may hold more than the store once something was evicted, never less: reuse must be explained by it."""

    num_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[Lease, list[int]]] = []
        self.stored: set[Key] = set()

    @initialize(policy=st.sampled_from(["lru", "lfu", "size_weighted_lru"]))
    def build(self, policy: str) -> None:
        self.world = World(num_blocks=self.num_blocks, policy=policy, ttl_s=50.0)

    def expected(self, tokens: list[int], scope: Scope) -> int:
        n = 0
        while (n + 1) * BLOCK < len(tokens) and (scope, tuple(tokens[: (n + 1) * BLOCK])) in self.stored:
            n += 1
        return n * BLOCK

    def note(self, lease: Lease, tokens: list[int]) -> None:
        if not lease.keeps:  # purged meanwhile: what it holds can no longer be found
            return
        for end in range(BLOCK, lease.num_committed_tokens + 1, BLOCK):
            self.stored.add((lease.scope, tuple(tokens[:end])))

    @rule(tokens=PROMPTS, scope=st.sampled_from(SCOPES), reuse=st.sampled_from([True, True, True, False]))
    def start(self, tokens: list[int], scope: Scope, reuse: bool) -> None:
        seen = self.world.cache.peek(tokens, scope=scope)
        lease = self.world.cache.acquire(tokens, scope=scope, reuse=reuse)
        assert lease.num_cached_tokens == (seen if reuse else 0)
        self.check_match(lease, tokens)
        self.world.check_lease(lease, tokens[: lease.num_cached_tokens])
        if self.world.prefill(lease, tokens):
            self.live.append((lease, tokens))
            self.note(lease, tokens)
        else:
            self.world.cache.release(lease)

    def check_match(self, lease: Lease, tokens: list[int]) -> None:
        assert lease.num_cached_tokens <= self.expected(tokens, lease.scope)
        is_whole = lease.num_cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
        if len(tokens) > BLOCK and lease.miss_reason is not MissReason.DISABLED:
            assert (lease.miss_reason is None) == is_whole
        if lease.diverged_at is not None:
            assert lease.num_cached_tokens <= lease.diverged_at < len(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK))
    def decode(self, data: st.DataObject, more: list[int]) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        lease, tokens = self.live[at]
        longer = [*tokens, *more]
        if self.world.prefill(lease, longer):
            self.live[at] = lease, longer
            self.note(lease, longer)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.world.cache.release(lease)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.world.clock.now += seconds
        self.world.cache.expire()

    @rule()
    def compact(self) -> None:
        self.world.cache.compact()

    @rule(tenant=st.sampled_from([None, "", "t"]))
    def purge(self, tenant: str | None) -> None:
        self.world.cache.purge(tenant=tenant)
        self.stored = {key for key in self.stored if tenant is not None and key[0].tenant != tenant}

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        for lease, tokens in self.live:
            self.world.check_lease(lease, tokens)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for lease, _ in self.live:
            self.world.cache.release(lease)
        self.world.check()
        usage = self.world.cache.usage()
        assert (usage.private_slots, usage.pinned_slots) == (0, 0)
        with self.world.cache.acquire([1], scope=Scope()) as lease:
            assert self.world.cache.reserve(lease, usage.num_slots, num_computed_tokens=0)
        self.world.check()


class WithPressure(AnyMixOfRequests):
    num_blocks = 10


class WithRoom(AnyMixOfRequests):
    """Nothing is ever evicted, so a match is exactly what the model says (expiry apart)."""

    num_blocks = 2000

    def check_match(self, lease: Lease, tokens: list[int]) -> None:
        super().check_match(lease, tokens)
        if lease.miss_reason not in (MissReason.DISABLED, MissReason.EXPIRED):
            assert lease.num_cached_tokens == self.expected(tokens, lease.scope)

    def wait(self, seconds: Any = 0) -> None:
        """Time stands still."""


SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestWithPressure = WithPressure.TestCase
TestWithPressure.settings = SETTINGS
TestWithRoom = WithRoom.TestCase
TestWithRoom.settings = SETTINGS
