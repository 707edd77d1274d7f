"""What happened in a window of time: the difference of two snapshots, and samples of gauges between them.

Knows counts, values and seconds. Knows nothing of what is published or where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvreuse.telemetry.stats import StatsSnapshot, rounded

__all__ = ["Values", "Window"]

Values = Mapping[float, int]  # value -> how often


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """`before` and `after`: totals at its two ends; of the engine's too. `samples`: of gauges in between."""

    before: StatsSnapshot
    after: StatsSnapshot
    engine_before: Mapping[str, float]
    engine_after: Mapping[str, float]
    samples: Mapping[str, Values]
    duration_s: float

    def count(self, name: str, label: str | None = None) -> float:
        """How much a counter of Stats rose, over all its labels or with the one label."""
        return sum(
            value - self.before.counters.get(key, 0)
            for key, value in self.after.counters.items()
            if key[0] == name and label in (None, *key[1])
        )

    def engine(self, name: str) -> float:
        """How much a counter of the engine rose."""
        return max(0.0, self.engine_after.get(name, 0.0) - self.engine_before.get(name, 0.0))

    def seconds(self, name: str) -> float:
        """How much the sum of a histogram rose."""
        old = self.before.histograms
        return sum(
            h.sum - (old[key].sum if key in old else 0.0) for key, h in self.after.histograms.items() if key[0] == name
        )

    def values_ms(self, name: str) -> Values:
        """What a histogram observed, over all its labels."""
        places: Counter[int] = Counter()
        for key, histogram in self.after.histograms.items():
            if key[0] == name:
                places.update(histogram.fine)
                if key in self.before.histograms:
                    places.subtract(self.before.histograms[key].fine)
        return {rounded(place) * 1000: count for place, count in sorted(places.items()) if count}
