"""Renders the counts of this process as Prometheus text.

Knows names, units and label names of every metric. Knows nothing of who asks or how things are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvreuse.telemetry.stats import HISTOGRAMS, Labels, Stats, StatsSnapshot

__all__ = ["METRICS", "MetricSpec", "Prometheus"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `source` is its name in Stats, or in the engine's snapshot where `is_engine`."""

    name: str
    source: str
    doc: str
    labels: Labels = ()
    is_engine: bool = False

    @property
    def kind(self) -> str:
        if self.source in HISTOGRAMS:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def _engine(name: str, source: str, doc: str) -> MetricSpec:
    return MetricSpec(name, source, doc, is_engine=True)


_SIZES = {"0_5": "half as large", "1": "of this size", "2": "twice as large", "4": "four times as large"}
METRICS = (
    MetricSpec("kvreuse_requests_total", "requests", "Requests that were answered", ("finish_reason",)),
    MetricSpec("kvreuse_failures_total", "failures", "Requests that ended in an error", ("type",)),
    MetricSpec("kvreuse_http_responses_total", "responses", "HTTP responses", ("route", "status")),
    MetricSpec("kvreuse_prompt_tokens_total", "prompt_tokens", "Prompt tokens of answered requests"),
    MetricSpec("kvreuse_cached_prompt_tokens_total", "cached_tokens", "Prompt tokens served from the store", ("tier",)),
    MetricSpec("kvreuse_cache_hits_total", "hits", "Requests that reused at least one block"),
    MetricSpec("kvreuse_saved_prefill_seconds_total", "saved_s", "Prefill time saved, from that of misses"),
    MetricSpec("kvreuse_generated_tokens_total", "generated_tokens", "Tokens generated"),
    MetricSpec("kvreuse_cache_misses_total", "misses", "Requests of which not every block hit", ("reason",)),
    MetricSpec("kvreuse_time_to_first_token_seconds", "ttft_s", "From arrival to the first token", ("cache",)),
    MetricSpec("kvreuse_inter_token_latency_seconds", "itl_s", "Mean time between tokens of a request"),
    MetricSpec("kvreuse_request_duration_seconds", "duration_s", "From arrival to the last token"),
    MetricSpec("kvreuse_queue_time_seconds", "queue_s", "From arrival to the first step"),
    MetricSpec("kvreuse_lookup_time_seconds", "lookup_s", "Time to match the prompt with the store"),
    MetricSpec("kvreuse_transfer_time_seconds", "transfer_s", "Loads of blocks from a slower tier", ("tier",)),
    MetricSpec("kvreuse_dropped_metrics_total", "dropped_metrics", "Metrics that no publisher could send"),
    _engine("kvreuse_up", "up", "1 when the container can serve"),
    _engine("kvreuse_running_requests", "running", "Sequences in the running batch"),
    _engine("kvreuse_waiting_requests", "waiting", "Sequences that wait for a place"),
    _engine("kvreuse_steps_total", "steps", "Forward passes"),
    _engine("kvreuse_preemptions_total", "preempted", "Sequences put back because KV memory was short"),
    _engine("kvreuse_prefilled_tokens_total", "prefilled_tokens", "Prompt tokens computed, not served from the store"),
    _engine("kvreuse_audits_total", "audits", "Hits computed again without reuse and compared"),
    _engine("kvreuse_audit_mismatches_total", "audit_mismatches", "Of these, hits that differed"),
    _engine("kvreuse_kv_slots", "store_num_slots", "Places for one token's KV"),
    _engine("kvreuse_kv_node_slots", "store_node_slots", "Slots that hold shared prefixes"),
    _engine("kvreuse_kv_private_slots", "store_private_slots", "Slots that belong to one running sequence"),
    _engine("kvreuse_kv_pinned_slots", "store_pinned_slots", "Slots of shared prefixes that are in use now"),
    _engine("kvreuse_kv_free_slots", "store_free_slots", "Slots that hold nothing"),
    _engine("kvreuse_kv_max_used_slots", "store_max_used_slots", "Most slots that were ever in use"),
    *(
        _engine(
            f"kvreuse_kv_expected_cached_tokens_{size}x_total",
            f"expected_cached_tokens_{size}x",
            f"Prompt tokens a pool {how_large} would have served",
        )
        for size, how_large in _SIZES.items()
    ),
    _engine("kvreuse_kv_largest_free_slots", "store_largest_free_slots", "Longest run of free slots"),
    _engine("kvreuse_kv_used_bytes", "store_used_bytes", "KV memory in use"),
    _engine("kvreuse_kv_blocks", "store_num_blocks", "Blocks that a prompt can hit"),
    _engine("kvreuse_kv_lookups_total", "store_num_lookups", "Prompts looked up in the store"),
    _engine("kvreuse_kv_evicted_blocks_total", "store_num_evicted_blocks", "Blocks evicted to make room"),
    _engine("kvreuse_kv_expired_blocks_total", "store_num_expired_blocks", "Blocks whose time ran out"),
    _engine("kvreuse_kv_purged_blocks_total", "store_num_purged_blocks", "Blocks dropped on request"),
    _engine("kvreuse_kv_oom_total", "store_num_oom", "Reservations refused because all memory was pinned"),
    _engine("kvreuse_kv_moves_total", "store_num_moves", "Spans moved by compaction"),
    _engine("kvreuse_kv_collisions_total", "store_num_collisions", "Hash collisions, each counted as a miss"),
)


class Prometheus:
    """`engine_snapshot` gives the engine's own gauges and counters by their source name; missing ones are left out."""

    def __init__(self, stats: Stats, engine_snapshot: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats
        self._engine_snapshot = engine_snapshot

    def render(self) -> bytes:
        """Text exposition format 0.0.4."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """A collector of prometheus_client."""
        snapshot, engine = self._stats.snapshot(), self._engine_snapshot()
        for spec in METRICS:
            if spec.kind == "histogram":
                yield _histogram(spec, snapshot)
            elif not spec.is_engine:
                values = {labels: v for (name, labels), v in snapshot.counters.items() if name == spec.source}
                yield _samples(spec, values if values or spec.labels else {(): 0.0})
            elif spec.source in engine:
                yield _samples(spec, {(): engine[spec.source]})


def _samples(spec: MetricSpec, values: Mapping[Labels, float]) -> Metric:
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.doc, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(spec: MetricSpec, snapshot: StatsSnapshot) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.doc, labels=spec.labels)
    bounds = [*(f"{bound:g}" for bound in HISTOGRAMS[spec.source]), "+Inf"]
    for (name, labels), histogram in snapshot.histograms.items():
        if name == spec.source:
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric(labels, buckets, sum_value=histogram.sum)
    return family
