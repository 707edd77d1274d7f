"""Counts what happened in this process: requests, tokens, hits, times.

Knows CacheFacts and numbers. Knows nothing of how they are published, of HTTP or of the engine.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvreuse.types import CacheFacts, Tier

__all__ = ["HISTOGRAMS", "Histogram", "Labels", "Stats", "StatsSnapshot", "quantile", "rounded"]

Labels = tuple[str, ...]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_SECONDS = (0.00001, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
# name -> upper bounds of its buckets, in seconds; +Inf is implied
HISTOGRAMS: dict[str, Sequence[float]] = {
    "ttft_s": _SECONDS,
    "itl_s": _SHORT_SECONDS,
    "duration_s": _SECONDS,
    "queue_s": _SECONDS,
    "lookup_s": _SHORT_SECONDS,
    "transfer_s": _SECONDS,
}
_FINE_STEP = math.log(1.05)
_LEAST = 1e-6


@dataclass(slots=True)
class Histogram:
    """`counts[i]` values were <= `bounds[i]` and above the bound before; the last count is what was above all.

    fine: the same values by their place on a scale of 5 % steps (see `rounded`), so that percentiles survive.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    fine: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.fine[round(math.log(max(value, _LEAST)) / _FINE_STEP)] += 1

    def copy(self) -> Histogram:
        return Histogram(self.bounds, list(self.counts), self.sum, self.fine.copy())


def rounded(place: int) -> float:
    """The value that stands for `place` on the fine scale: at most 2.5 % from what was observed, at least 1e-6."""
    return math.exp(place * _FINE_STEP)


def quantile(fine: Mapping[int, int], share: float) -> float | None:
    """The value below which `share` of the observed ones lie, None when there are none."""
    left = share * sum(fine.values())
    for place in sorted(fine):
        left -= fine[place]
        if left <= 0:
            return rounded(place)
    return None


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """A consistent copy. Keys are (name, label values)."""

    counters: dict[tuple[str, Labels], float]
    histograms: dict[tuple[str, Labels], Histogram]


class Stats:
    """Thread-safe aggregator; every method returns at once and never raises on sound input."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[tuple[str, Labels]] = Counter()
        self._histograms: dict[tuple[str, Labels], Histogram] = {}

    def record_request(
        self, facts: CacheFacts, *, num_output_tokens: int, duration_s: float, finish_reason: str
    ) -> None:
        """Count one request that ended with an answer, an abort included. `duration_s` is from submission to end.

        The inter-token latency is the mean over this request: (duration - TTFT) / (tokens - 1).
        """
        ttft_s = facts.ttft_ms / 1000
        is_hit = "hit" if facts.cached_tokens else "miss"
        with self._lock:
            self._count("requests", (finish_reason,))
            self._count("prompt_tokens", (), facts.prompt_tokens)
            self._count("generated_tokens", (), num_output_tokens)
            if facts.cached_tokens:
                self._count("hits")
                self._count("cached_tokens", (facts.tier.value,), facts.cached_tokens)
                self._count("saved_s", (), facts.cached_tokens * self._cold_s_per_token())
            elif num_output_tokens:
                self._count("cold_tokens", (), facts.prompt_tokens)
                self._count("cold_s", (), ttft_s - facts.queue_ms / 1000)
            if facts.miss_reason is not None:
                self._count("misses", (facts.miss_reason.value,))
            self._observe("duration_s", (), duration_s)
            self._observe("queue_s", (), facts.queue_ms / 1000)
            self._observe("lookup_s", (), facts.lookup_ms / 1000)
            if num_output_tokens:
                self._observe("ttft_s", (is_hit,), ttft_s)
            if num_output_tokens > 1:
                self._observe("itl_s", (), max(0.0, duration_s - ttft_s) / (num_output_tokens - 1))

    def record_failure(self, error_type: str) -> None:
        """Count one request that ended without an answer. `error_type` is the `type` of its error."""
        with self._lock:
            self._count("failures", (error_type,))

    def record_response(self, *, route: str, status: int) -> None:
        """Count one HTTP response. `route` is one of the server's own, never a caller's path."""
        with self._lock:
            self._count("responses", (route, str(status)))

    def record_transfer(self, tier: Tier, duration_s: float) -> None:
        """Count one load of cached blocks from a slower tier."""
        with self._lock:
            self._observe("transfer_s", (tier.value,), duration_s)

    def record_dropped(self, num_metrics: int) -> None:
        """Count what could not be published."""
        with self._lock:
            self._count("dropped_metrics", (), num_metrics)

    def snapshot(self) -> StatsSnapshot:
        with self._lock:
            return StatsSnapshot(dict(self._counters), {key: h.copy() for key, h in self._histograms.items()})

    def _cold_s_per_token(self) -> float:
        """What a prompt token takes when nothing is cached, as measured since the start; 0 until one was."""
        return self._counters["cold_s", ()] / max(self._counters["cold_tokens", ()], 1)

    def _count(self, name: str, labels: Labels = (), amount: float = 1) -> None:
        self._counters[name, labels] += amount  # type: ignore[assignment]  # Counter also adds floats

    def _observe(self, name: str, labels: Labels, value: float) -> None:
        if (name, labels) not in self._histograms:
            self._histograms[name, labels] = Histogram(HISTOGRAMS[name])
        self._histograms[name, labels].observe(value)
