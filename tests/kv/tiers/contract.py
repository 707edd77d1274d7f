"""What every tier does, whatever keeps its blocks. Each tier's tests inherit it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvreuse.kv.tiers.base import StorageTier
from tests.kv.tiers.harness import is_same, load, make_block, put_all

ANY_OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "load", "load", "discard", "purge"]), st.integers(0, 7)),
    max_size=30,
)

# Its fixtures are reset by hand, and every subclass runs it.
INHERITED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


class TierContract:
    """`open_tier` opens one on the test's storage; `stored_bytes` asks the storage itself."""

    is_exact = True  # find knows; otherwise it says "may be"

    @pytest.fixture
    def open_tier(self) -> Callable[..., StorageTier]:
        raise NotImplementedError

    @pytest.fixture
    def stored_bytes(self) -> Callable[[], int]:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, open_tier: Callable[..., StorageTier]) -> Iterator[StorageTier]:
        tier = open_tier(2**20)
        yield tier
        tier.check_integrity()
        tier.close()

    @pytest.fixture
    def entry_bytes(self, open_tier: Callable[..., StorageTier]) -> int:
        """Of a block of make_block's."""
        tier = open_tier(2**20)
        assert tier.put(make_block(0, tenant="0"))
        size = tier.usage().num_bytes
        tier.purge(None)
        tier.close()
        return size

    def test_a_block_comes_back_as_it_was(self, tier: StorageTier) -> None:
        for block in (
            make_block(1),
            make_block(2, tenant="tenant-ü", encoding="int4"),
            make_block(3, num_bytes=1),
            make_block(4, num_bytes=100_001),
        ):
            assert tier.put(block)
            assert is_same(load(tier, block), block)

    def test_a_payload_is_aligned_for_every_type(self, tier: StorageTier) -> None:
        block = make_block(1)
        tier.put(block)
        loaded = load(tier, block)
        assert loaded is not None
        assert loaded.payload.data_ptr() % 16 == 0

    def test_what_was_never_put_is_a_miss(self, tier: StorageTier) -> None:
        assert load(tier, make_block(1)) is None
        assert tier.usage().num_misses == 1

    def test_putting_twice_keeps_one(self, tier: StorageTier) -> None:
        put_all(tier, [make_block(1), make_block(1)])
        assert tier.usage().num_entries == 1

    def test_find_counts_the_leading_keys_that_are_or_may_be_here(self, tier: StorageTier) -> None:
        blocks = [make_block(number) for number in range(5)]
        put_all(tier, [*blocks[:2], *blocks[3:]])
        assert tier.find([block.key for block in blocks]) == (2 if self.is_exact else 5)
        assert tier.find([]) == 0

    def test_a_run_ends_at_the_first_block_that_is_missing(self, tier: StorageTier) -> None:
        blocks = [make_block(number) for number in range(40)]
        put_all(tier, [*blocks[:35], *blocks[36:]])
        run = tier.load_run([block.key for block in blocks], [block.token_bytes for block in blocks])
        assert [block.key for block in run] == [block.key for block in blocks[:35]]

    def test_other_tokens_under_the_same_name_are_a_counted_miss_and_dropped(self, tier: StorageTier) -> None:
        block = make_block(1)
        tier.put(block)
        assert tier.load_run([block.key], [bytes(32)]) == []
        assert tier.usage().num_corrupt == 1
        assert load(tier, block) is None

    def test_a_discarded_block_is_gone(self, tier: StorageTier) -> None:
        put_all(tier, [make_block(1), make_block(2)])
        tier.discard(make_block(1).key)
        assert load(tier, make_block(1)) is None
        assert is_same(load(tier, make_block(2)), make_block(2))

    def test_a_purge_drops_one_tenant_or_everything(self, tier: StorageTier, stored_bytes: Callable[[], int]) -> None:
        put_all(tier, [make_block(number, tenant="ab"[number % 2]) for number in range(5)])
        assert tier.purge("a") == 3
        assert [load(tier, make_block(n, tenant="ab"[n % 2])) is not None for n in range(5)] == [0, 1, 0, 1, 0]
        assert tier.purge("nobody") == 0
        assert tier.purge(None) == 2
        assert (tier.usage().num_entries, tier.usage().num_bytes, stored_bytes()) == (0, 0, 0)

    def test_usage_tells_bytes_by_tenant(self, tier: StorageTier) -> None:
        put_all(tier, [make_block(number, tenant="ab"[number == 0]) for number in range(3)])
        usage = tier.usage()
        assert usage.tenant_bytes == {"a": usage.num_bytes * 2 // 3, "b": usage.num_bytes // 3}
        assert (usage.num_entries, usage.num_puts, usage.is_healthy) == (3, 3, True)

    def test_a_block_larger_than_the_cap_is_refused_and_nothing_leaves_for_it(
        self, open_tier: Callable[..., StorageTier], entry_bytes: int
    ) -> None:
        tier = open_tier(entry_bytes * 2)
        put_all(tier, [make_block(1), make_block(2)])
        assert not tier.put(make_block(3, num_bytes=3 * entry_bytes))
        assert tier.usage().num_entries == 2
        tier.close()

    @settings(max_examples=12, deadline=None, suppress_health_check=INHERITED)
    @given(operations=ANY_OPERATIONS)
    def test_it_behaves_like_a_small_lru_dict_and_never_exceeds_its_cap(
        self, open_tier: Any, stored_bytes: Any, entry_bytes: int, operations: list[tuple[str, int]]
    ) -> None:
        tier, model = open_tier(entry_bytes * 4), OrderedDict[int, None]()
        tier.purge(None)
        for operation, number in operations:
            block = make_block(number, tenant=str(number % 3))
            if operation == "put":
                assert tier.put(block)
                model[number] = None
                model.move_to_end(number)
                if len(model) > 4:
                    model.popitem(last=False)
            elif operation == "load":
                loaded = load(tier, block)
                assert is_same(loaded, block) if number in model else loaded is None
                if number in model:
                    model.move_to_end(number)
            elif operation == "discard":
                tier.discard(block.key)
                model.pop(number, None)
            else:
                tier.purge(block.tenant)
                model = OrderedDict((n, None) for n in model if n % 3 != number % 3)
            assert stored_bytes() <= tier.usage().num_bytes == len(model) * entry_bytes <= tier.max_bytes
            tier.check_integrity()
        tier.close()

    def test_threads_that_write_read_and_purge_at_once_keep_the_accounts_and_the_cap(
        self, open_tier: Callable[..., StorageTier], stored_bytes: Callable[[], int], entry_bytes: int
    ) -> None:
        tier = open_tier(entry_bytes * 5)
        faults: list[str] = []

        def work(seed: int) -> None:
            for step in range(25):
                block = make_block((seed * 7 + step * 3) % 11, tenant=str(seed % 2))
                tier.put(block)
                loaded = load(tier, block)
                if loaded is not None and loaded.token_bytes != block.token_bytes:
                    faults.append("other tokens")
                if step % 9 == seed:
                    tier.purge(block.tenant)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if stored_bytes() > tier.max_bytes:
                faults.append("over the cap")
            threads[0].join(0.005)
        assert faults == []
        tier.check_integrity()
        assert tier.usage().num_errors == tier.usage().num_corrupt == 0
        assert stored_bytes() <= tier.max_bytes
        tier.close()
