"""What loading from a tier took reaches the metrics."""

from __future__ import annotations

from kvreuse.kv.tiers.stack import Costs
from kvreuse.telemetry.stats import Stats
from kvreuse.types import Tier


def test_every_fetch_that_brought_something_is_counted_by_tier() -> None:
    stats, costs = Stats(), Costs()
    costs.on_load = stats.record_transfer
    costs.loaded(Tier.DISK, num_blocks=2, took_ms=500)
    costs.loaded(Tier.HOST, num_blocks=0, took_ms=9)
    ((key, histogram),) = stats.snapshot().histograms.items()
    assert (key, histogram.count, histogram.sum) == (("transfer_s", ("disk",)), 1, 0.5)
