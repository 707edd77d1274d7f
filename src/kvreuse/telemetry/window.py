"""What happened in a window of time: the difference of two snapshots, and samples of gauges between them.

Knows counts, values and seconds. Knows nothing of what is published or where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvreuse.telemetry.stats import StatsSnapshot, rounded

__all__ = ["Moment", "Values", "Window"]

Values = Mapping[float, int]  # value -> how often


class Moment(NamedTuple):
    """Totals since the start: those of Stats and the engine's own. `at_s` is of a monotonic clock."""

    stats: StatsSnapshot
    engine: Mapping[str, float]
    at_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Its two ends, and samples of gauges in between."""

    begin: Moment
    end: Moment
    samples: Mapping[str, Values]

    @property
    def duration_s(self) -> float:
        return max(self.end.at_s - self.begin.at_s, 1e-3)

    def count(self, name: str, label: str | None = None) -> float:
        """How much a counter of Stats rose, over all its labels or with the one label."""
        return sum(
            value - self.begin.stats.counters.get(key, 0)
            for key, value in self.end.stats.counters.items()
            if key[0] == name and label in (None, *key[1])
        )

    def engine(self, name: str) -> float:
        """How much a counter of the engine rose."""
        return max(0.0, self.end.engine.get(name, 0.0) - self.begin.engine.get(name, 0.0))

    def seconds(self, name: str) -> float:
        """How much the sum of a histogram rose."""
        begin, end = (
            sum(histogram.sum for key, histogram in moment.stats.histograms.items() if key[0] == name)
            for moment in (self.begin, self.end)
        )
        return end - begin

    def values_ms(self, name: str) -> Values:
        """What a histogram observed, over all its labels."""
        places: Counter[int] = Counter()
        for change, moment in ((places.update, self.end), (places.subtract, self.begin)):
            for key, histogram in moment.stats.histograms.items():
                if key[0] == name:
                    change(histogram.fine)
        return {rounded(place) * 1000: count for place, count in sorted(places.items()) if count}
