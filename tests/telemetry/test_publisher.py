"""Windows of metrics: what is in one, that outages cost nothing but what is counted, and the limits of CloudWatch."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.stub import ANY, Stubber
from moto.server import ThreadedMotoServer

from kvreuse.config import Config
from kvreuse.telemetry import cloudwatch
from kvreuse.telemetry.catalog import CATALOG
from kvreuse.telemetry.cloudwatch import CloudWatch, requests
from kvreuse.telemetry.emf import emf_record
from kvreuse.telemetry.observing import make_publisher
from kvreuse.telemetry.publisher import Datum, Publisher
from kvreuse.telemetry.request_log import RequestLog
from kvreuse.telemetry.stats import Stats
from kvreuse.types import CacheFacts, MissReason, Tier

HIT = CacheFacts(prompt_tokens=100, cached_tokens=90, tier=Tier.DEVICE, lookup_ms=1, queue_ms=2, ttft_ms=20)
MISS = CacheFacts(prompt_tokens=100, miss_reason=MissReason.COLD, lookup_ms=1, queue_ms=0, ttft_ms=200)
GAUGES = {"running": 3.0, "waiting": 1.0, "up": 1.0, "store_num_slots": 100.0, "store_free_slots": 5.0,
          "store_num_oom": 0.0}  # fmt: skip
NAMED: dict[str, Any] = {"namespace": "kvreuse", "dimensions": {"EndpointName": "e", "VariantName": "v"}}


def record(stats: Stats, *facts: CacheFacts) -> None:
    for one in facts:
        stats.record_request(one, num_output_tokens=11, duration_s=1.0, finish_reason="eos")


class Collected:
    """A publisher whose windows are kept, with a clock that is set by hand."""

    def __init__(self, **gauges: float) -> None:
        self.stats = Stats()
        self.gauges = {**GAUGES, **gauges}
        self.now_s = 0.0
        self.windows: list[dict[str, Datum]] = []
        self.publisher = Publisher(self.stats, lambda: self.gauges, [self.keep], clock=lambda: self.now_s)

    def keep(self, data: Sequence[Datum], at: float) -> None:
        self.windows.append({datum.name: datum for datum in data})

    def publish(self, after_s: float = 60.0) -> dict[str, Datum]:
        self.now_s += after_s
        self.publisher.publish()
        return self.windows[-1]


def value(window: dict[str, Datum], name: str) -> float:
    ((value, count),) = window[name].values.items()
    assert count == 1
    return value


# --- windows


def test_a_window_holds_what_happened_in_it_and_not_before() -> None:
    collected = Collected()
    record(collected.stats, MISS, HIT)
    window = collected.publish()
    assert value(window, "KV_CACHE_HIT_RATE") == pytest.approx(0.45)
    assert value(window, "KV_CACHE_HITS") == value(window, "KV_CACHE_MISSES") == 1
    assert value(window, "KV_CACHE_MISSES_COLD") == 1
    assert value(window, "KV_TIER_TOKENS_DEVICE") == value(window, "SAVED_PREFILL_TOKENS") == 90
    assert value(window, "KV_LOOKUP_SHARE") == pytest.approx(0.001)
    record(collected.stats, HIT)
    window = collected.publish()
    assert value(window, "KV_CACHE_HIT_RATE") == pytest.approx(0.9)
    assert value(window, "KV_CACHE_MISSES") == 0
    assert "KV_CACHE_MISSES_COLD" not in window


def test_the_time_saved_is_what_the_tokens_took_when_they_missed() -> None:
    collected = Collected()
    record(collected.stats, MISS, HIT)
    assert value(collected.publish(), "SAVED_PREFILL_MS") == pytest.approx(90 * 200 / 100)


def test_an_idle_window_has_no_rates_and_no_times_but_counts_of_zero() -> None:
    window = Collected().publish()
    assert {"KV_CACHE_HIT_RATE", "KV_LOOKUP_SHARE", "TTFT", "KV_AUDITS"}.isdisjoint(window)
    assert [value(window, name) for name in ("KV_CACHE_HITS", "KV_CACHE_OOM", "FAILURES")] == [0, 0, 0]


def test_percentiles_of_times_survive_to_a_few_percent() -> None:
    collected = Collected()
    for ms in range(1, 1001):
        record(collected.stats, CacheFacts(prompt_tokens=1, ttft_ms=ms))
    values = collected.publish()["TTFT"].values
    ordered = [value for value, count in sorted(values.items()) for _ in range(count)]
    assert len(ordered) == 1000
    assert [ordered[499], ordered[989]] == pytest.approx([500, 990], rel=0.026)


def test_gauges_are_looked_at_several_times_per_window() -> None:
    collected = Collected()
    for running in (1, 64, 1):
        collected.gauges["running"] = running
        collected.publisher.sample()
    window = collected.publish()
    assert window["RUNNING"].values == {1: 3, 64: 1}
    assert max(window["KV_MEMORY_USAGE"].values) == 0.95


def test_engine_counters_become_rates_and_differences() -> None:
    collected = Collected(store_num_evicted_blocks=10, store_num_oom=1)
    collected.publish()
    collected.gauges |= {"store_num_evicted_blocks": 130, "store_num_oom": 4}
    window = collected.publish(after_s=60)
    assert (value(window, "KV_CACHE_EVICTION_RATE"), value(window, "KV_CACHE_OOM")) == (2.0, 3.0)


def test_transfers_and_audits_are_published_where_they_happen() -> None:
    collected = Collected()
    assert "KV_AUDITS" not in collected.publish()
    collected.stats.record_transfer(Tier.DISK, 0.5)
    collected.gauges |= {"audits": 3, "audit_mismatches": 1}
    window = collected.publish()
    assert list(window["KV_TRANSFER_MS"].values) == [pytest.approx(500, rel=0.026)]
    assert (value(window, "KV_AUDITS"), value(window, "KV_AUDIT_MISMATCHES")) == (3, 1)


# --- the limits of CloudWatch


@pytest.mark.parametrize(("num_data", "num_values"), [(1, 1), (1, 151), (1001, 1), (900, 150), (2500, 149)])
def test_every_request_is_within_the_limits_and_nothing_is_lost(num_data: int, num_values: int) -> None:
    data = [Datum(f"M{i}", "Count", {float(v): v + 1 for v in range(num_values)}) for i in range(num_data)]
    sent = list(requests(data, 1e9, **NAMED))
    for request in sent:
        assert len(request["MetricData"]) <= 1000
        assert len(json.dumps(request, default=str)) < 10**6
        assert all(len(metric["Values"]) == len(metric["Counts"]) <= 150 for metric in request["MetricData"])
    metrics = [metric for request in sent for metric in request["MetricData"]]
    assert sum(sum(metric["Counts"]) for metric in metrics) == num_data * num_values * (num_values + 1) // 2


def test_values_that_are_no_numbers_are_left_out() -> None:
    data = [Datum("A", "Count", {float("nan"): 1, 2.0: 1}), Datum("B", "Count", {float("inf"): 1})]
    (request,) = requests(data, 1e9, **NAMED)
    assert [(m["MetricName"], m["Values"]) for m in request["MetricData"]] == [("A", (2.0,))]


def test_the_service_model_accepts_every_metric_of_the_catalog() -> None:
    client = boto3.client("cloudwatch", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="x")
    data = [Datum(metric.name, metric.unit, {1.0: 1}) for metric in CATALOG]
    units = set(client.meta.service_model.shape_for("StandardUnit").enum)
    assert {metric.unit for metric in CATALOG} <= units
    with Stubber(client) as stubber:
        stubber.add_response("put_metric_data", {}, {"Namespace": "kvreuse", "MetricData": ANY})
        sink = CloudWatch(on_drop=pytest.fail, connect=lambda: client, **NAMED)
        sink(data, 1e9)
        stubber.assert_no_pending_responses()
    assert not sink.queue


# --- outages


class Flaky:
    """A client that fails as it is told to, and remembers what it took."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.taken: list[dict[str, Any]] = []
        self.num_calls = 0

    def put_metric_data(self, **request: Any) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        self.taken.append(request)


DOWN = EndpointConnectionError(endpoint_url="https://monitoring")


def refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "PutMetricData")


def test_ten_minutes_without_cloudwatch_lose_nothing_and_are_made_up_for() -> None:
    client, collected = Flaky(), Collected()
    sink = CloudWatch(on_drop=collected.stats.record_dropped, connect=lambda: client, **NAMED)
    client.error = DOWN
    for minute in range(10):
        sink([Datum("A", "Count", {float(minute): 1})], minute * 60.0)
    assert client.num_calls == 10  # one try per window, however much waits
    client.error = None
    sink([Datum("A", "Count", {10.0: 1})], 600.0)
    assert [request["MetricData"][0]["Values"] for request in client.taken] == [(float(i),) for i in range(11)]
    assert [request["MetricData"][0]["Timestamp"].timestamp() for request in client.taken][:2] == [0, 60]
    assert "DROPPED_METRICS" not in collected.publish()


def test_an_endless_outage_keeps_a_bounded_queue_and_counts_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    client, collected = Flaky(), Collected()
    client.error = DOWN
    sink = CloudWatch(on_drop=collected.stats.record_dropped, connect=lambda: client, **NAMED)
    with caplog.at_level(logging.WARNING):
        for minute in range(600):
            sink([Datum("A", "Count", {1.0: 1}), Datum("B", "Count", {1.0: 1})], minute * 60.0)
    assert len(sink.queue) == cloudwatch.MAX_QUEUED
    assert value(collected.publish(), "DROPPED_METRICS") == 2 * (600 - cloudwatch.MAX_QUEUED)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("code", "num_left"),
    [("InvalidParameterValue", 0), ("ValidationError", 0), ("AccessDenied", 1), ("Throttling", 1),
     ("InvalidClientTokenId", 1), ("InternalServiceFault", 1)],
)  # fmt: skip
def test_what_can_never_be_accepted_does_not_block_the_queue(code: str, num_left: int) -> None:
    client, dropped = Flaky(), list[int]()
    client.error = refusal(code)
    sink = CloudWatch(on_drop=dropped.append, connect=lambda: client, **NAMED)
    sink([Datum("A", "Count", {1.0: 1})], 0.0)
    assert (len(sink.queue), sum(dropped)) == (num_left, 1 - num_left)


def test_a_region_that_is_not_set_is_an_outage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    sink = CloudWatch(on_drop=pytest.fail, **NAMED)
    sink([Datum("A", "Count", {1.0: 1})], 0.0)
    assert len(sink.queue) == 1


# --- the thread


def test_the_end_publishes_what_is_left() -> None:
    collected = Collected()
    collected.publisher.start()
    record(collected.stats, HIT)
    collected.publisher.stop(timeout_s=10)
    assert value(collected.windows[-1], "KV_CACHE_HITS") == 1


def test_the_end_does_not_wait_for_a_sink_that_hangs() -> None:
    gate = threading.Event()
    publisher = Publisher(Stats(), lambda: GAUGES, [lambda data, at: gate.wait() and None])
    publisher.start()
    publisher.stop(timeout_s=0.05)
    assert not gate.is_set()
    gate.set()


def test_without_a_sink_there_is_no_thread() -> None:
    before = threading.active_count()
    publisher = make_publisher(Config(), Stats(), lambda: GAUGES)
    publisher.start()
    assert threading.active_count() == before
    publisher.stop(timeout_s=0)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_the_metrics_arrive_in_cloudwatch_under_both_dimensions(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", moto)
    stats = Stats()
    publisher = make_publisher(Config(cloudwatch="on", endpoint_name="shop", variant_name="A"), stats, lambda: GAUGES)
    publisher.start()
    record(stats, HIT)
    publisher.stop(timeout_s=20)
    client = boto3.client("cloudwatch")
    named = [{"Name": "EndpointName", "Value": "shop"}, {"Name": "VariantName", "Value": "A"}]
    listed = client.list_metrics(Namespace="kvreuse", Dimensions=named)["Metrics"]
    client.close()
    assert {"KV_CACHE_HIT_RATE", "KV_MEMORY_USAGE", "TTFT", "RUNNING"} <= {metric["MetricName"] for metric in listed}
    assert all(metric["Dimensions"] == named for metric in listed)


# --- embedded metric format


def test_an_emf_line_names_every_metric_and_holds_its_values() -> None:
    collected = Collected()
    record(collected.stats, HIT, HIT)
    data = list(collected.publish().values())
    line = emf_record(data, 12.5, **NAMED)
    directive = line["_aws"]["CloudWatchMetrics"][0]  # type: ignore[index]
    assert line["_aws"]["Timestamp"] == 12500  # type: ignore[index]
    assert directive["Dimensions"] == [["EndpointName", "VariantName"]]
    assert [metric["Name"] for metric in directive["Metrics"]] == [datum.name for datum in data]
    assert line["EndpointName"] == "e"
    assert line["KV_CACHE_HITS"] == [2]
    assert len(line["TTFT"]) == 2  # type: ignore[arg-type]
    assert len(directive["Metrics"]) <= 100


def test_many_values_are_thinned_to_a_hundred_that_keep_the_percentiles() -> None:
    data = [Datum("A", "Count", {float(v): 10 for v in range(1000)})]
    kept = emf_record(data, 0.0, **NAMED)["A"]
    assert isinstance(kept, list)
    assert len(kept) == 100
    assert [kept[0], kept[50], kept[99]] == pytest.approx([0, 500, 990], abs=15)


def test_emf_lines_are_unprefixed_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    publisher = make_publisher(Config(emf=True), Stats(), lambda: GAUGES)
    publisher.publish()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["RUNNING"] == [3.0]


def test_the_log_hands_every_record_on() -> None:
    seen: list[Any] = []
    RequestLog(io.StringIO(), on_record=seen.append).write({"event": "request"})
    assert seen == [{"event": "request"}]
