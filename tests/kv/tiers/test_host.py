"""Host memory as a tier."""

from __future__ import annotations

import threading

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

    def test_a_block_that_is_purged_while_it_is_written_is_gone_when_the_purge_returns(self, open_tier):
        tier, is_writing, may_go_on = open_tier(2000), threading.Event(), threading.Event()
        write = tier._write
        tier._write = lambda block: (is_writing.set(), may_go_on.wait(30), write(block))
        writer = threading.Thread(target=tier.put, args=(make_block(1, tenant="a"),))
        writer.start()
        is_writing.wait(30)
        purger = threading.Thread(target=tier.purge, args=("a",))
        purger.start()
        assert tier.find([make_block(1).key]) == 0
        may_go_on.set()
        for thread in (writer, purger):
            thread.join()
        assert load(tier, make_block(1)) is None
        assert tier.usage().num_bytes == 0
