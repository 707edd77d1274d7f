"""Host memory as a tier."""

from __future__ import annotations

import pytest

from kvreuse.kv.tiers.host import HostTier
from tests.kv.tiers.contract import TierContract
from tests.kv.tiers.harness import is_same, load, make_block, put_all


class TestHostTier(TierContract):
    @pytest.fixture
    def opened(self):
        return []

    @pytest.fixture
    def open_tier(self, opened):
        def open_tier(max_bytes):
            opened.append(HostTier(max_bytes=max_bytes))
            return opened[-1]

        return open_tier

    @pytest.fixture
    def stored_bytes(self, opened):
        return lambda: sum(block.num_bytes for block in list(opened[-1]._blocks.values()))

    def test_what_leaves_to_make_room_is_handed_on(self, open_tier):
        tier, left = open_tier(2000), []
        put_all(tier, [make_block(1), make_block(2)])
        assert tier.put(make_block(3), on_evict=left.append)
        assert [is_same(block, make_block(1)) for block in left] == [True]

    def test_a_block_that_is_being_read_is_not_evicted(self, open_tier):
        tier = open_tier(1000)
        put_all(tier, [make_block(1)])
        read, outcomes = tier._read, []
        tier._read = lambda *args: (outcomes.append(tier.put(make_block(2))), read(*args))[1]
        assert is_same(load(tier, make_block(1)), make_block(1))
        assert outcomes == [False]

    def test_a_block_that_is_purged_while_it_is_written_never_appears(self, open_tier):
        tier = open_tier(2000)
        write = tier._write
        tier._write = lambda block: (write(block), tier.purge("a"))
        assert not tier.put(make_block(1, tenant="a"))
        assert load(tier, make_block(1)) is None
        assert tier.usage().num_bytes == 0
