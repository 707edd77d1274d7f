"""A figure that was measured several times.

Knows numbers. Knows nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Spread", "percentile", "spread_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, least and most of `count` measurements."""

    median: float
    low: float
    high: float
    count: int

    def shown(self, digits: int = 1) -> str:
        """The median, and behind it the least and the most where there was more than one measurement."""
        middle = f"{self.median:,.{digits}f}"
        return f"{middle} ({self.low:,.{digits}f}–{self.high:,.{digits}f})" if self.count > 1 else middle


def spread_of(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    if not values:
        return None
    return Spread(median=median(values), low=min(values), high=max(values), count=len(values))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value of rank ceil(percent / 100 x count): one that was measured, nothing in between. None of nothing."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1] if ordered else None
