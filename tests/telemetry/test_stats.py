"""Counting requests and publishing the counts."""

from __future__ import annotations

import io
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvreuse.telemetry.prometheus import METRICS, Prometheus
from kvreuse.telemetry.request_log import RequestLog
from kvreuse.telemetry.stats import Histogram, Stats
from kvreuse.types import CacheFacts, MissReason, Tier

HIT = CacheFacts(prompt_tokens=100, cached_tokens=96, tier=Tier.DEVICE, lookup_ms=0.1, queue_ms=2, ttft_ms=20)
MISS = CacheFacts(prompt_tokens=100, miss_reason=MissReason.COLD, ttft_ms=200)


def record(stats: Stats, facts: CacheFacts, *, num_output_tokens: int = 11, duration_s: float = 1.02) -> None:
    stats.record_request(facts, num_output_tokens=num_output_tokens, duration_s=duration_s, finish_reason="eos")


def samples(stats: Stats, **engine: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = Prometheus(stats, lambda: engine).render().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_tokens_are_counted_by_where_they_came_from() -> None:
    stats = Stats()
    record(stats, HIT)
    record(stats, MISS)
    found = samples(stats)
    assert found["kvreuse_prompt_tokens_total", ()] == 200
    assert found["kvreuse_cached_prompt_tokens_total", (("tier", "device"),)] == 96
    assert found["kvreuse_generated_tokens_total", ()] == 22
    assert found["kvreuse_cache_misses_total", (("reason", "cold"),)] == 1


def test_first_tokens_of_hits_and_misses_are_told_apart() -> None:
    stats = Stats()
    record(stats, HIT)
    record(stats, MISS)
    found = samples(stats)
    assert found["kvreuse_time_to_first_token_seconds_sum", (("cache", "hit"),)] == pytest.approx(0.02)
    assert found["kvreuse_time_to_first_token_seconds_sum", (("cache", "miss"),)] == pytest.approx(0.2)


def test_inter_token_latency_is_the_mean_after_the_first_token() -> None:
    stats = Stats()
    record(stats, HIT)
    assert samples(stats)["kvreuse_inter_token_latency_seconds_sum", ()] == pytest.approx(0.1)


def test_a_request_of_one_token_has_no_inter_token_latency() -> None:
    stats = Stats()
    record(stats, HIT, num_output_tokens=1)
    assert ("kvreuse_inter_token_latency_seconds_count", ()) not in samples(stats)


def test_the_engines_numbers_are_shown_and_missing_ones_left_out() -> None:
    found = samples(Stats(), up=1, running=3, store_num_evicted_blocks=5)
    assert found["kvreuse_up", ()] == 1
    assert found["kvreuse_running_requests", ()] == 3
    assert found["kvreuse_kv_evicted_blocks_total", ()] == 5
    assert ("kvreuse_waiting_requests", ()) not in found


def test_failures_and_responses_are_counted_by_kind() -> None:
    stats = Stats()
    stats.record_failure("overloaded")
    stats.record_response(route="/ping", status=200)
    found = samples(stats)
    assert found["kvreuse_failures_total", (("type", "overloaded"),)] == 1
    assert found["kvreuse_http_responses_total", (("route", "/ping"), ("status", "200"))] == 1


def test_counts_of_many_threads_add_up() -> None:
    stats = Stats()
    threads = [threading.Thread(target=lambda: [record(stats, HIT) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(stats)["kvreuse_requests_total", (("finish_reason", "eos"),)] == 4000


@given(st.lists(st.floats(min_value=0, max_value=10)))
def test_a_histogram_counts_every_value_in_its_bucket(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 5.0))
    for value in values:
        histogram.observe(value)
    edges = [(-1.0, 0.5), (0.5, 1.0), (1.0, 5.0), (5.0, float("inf"))]
    assert histogram.counts == [sum(low < value <= high for value in values) for low, high in edges]
    assert histogram.sum == pytest.approx(sum(values))


def test_names_follow_the_conventions() -> None:
    for spec in METRICS:
        assert spec.name.startswith("kvreuse_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.name.endswith("_seconds") == (spec.kind == "histogram")
    assert len({spec.name for spec in METRICS}) == len(METRICS)


def test_the_log_writes_whole_lines_from_any_thread() -> None:
    out = io.StringIO()
    log = RequestLog(out)
    threads = [
        threading.Thread(target=lambda: [log.write({"n": 1, "none": None}) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"n": 1}] * 800


def test_a_log_that_cannot_be_written_fails_no_request() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

    RequestLog(Full()).write({"n": 1})
