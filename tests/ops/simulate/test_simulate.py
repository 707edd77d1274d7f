"""The simulated fleet: what routing, scaling, warm-up and a remote tier do to the hit rate, and that the sums agree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.simulate.fleet import FleetEvent, Outcome, simulate
from kvreuse.ops.simulate.instance import Costs, Instance, RemoteTier, Settings
from kvreuse.ops.simulate.routing import ROUTINGS, Router, home, prefix_key
from kvreuse.ops.trace import Trace, TraceRequest, read_trace
from tests.ops.traffic import BLOCK, DATA, MOONCAKE, templates, write_templates

COSTS = Costs(step_s=0.001, prefill_token_s=1e-5, decode_s=1e-5)
SMALL_POOL = 12 * 20 * BLOCK  # 12 of 40 templates


def run(trace: Trace, routing: str = "PREFIX_AWARE", *, num_instances: int = 4, **settings: Any) -> Outcome:
    named = {name: settings.pop(name) for name in ("events", "is_warmed", "remote", "window_s") if name in settings}
    route = {name: settings.pop(name) for name in ("prefix_length", "threshold") if name in settings}
    sizes = {"pool_tokens": SMALL_POOL, "block_size": trace.block_size, "costs": COSTS, **settings}
    router = Router(routing, block_size=trace.block_size, **{"prefix_length": 16 * BLOCK * 4, **route})
    return simulate(trace, Settings(**sizes), router, num_instances=num_instances, **named)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return templates(tmp_path)


def test_one_instance_with_room_for_all_misses_each_template_once_and_what_is_new(trace: Trace) -> None:
    outcome = run(trace, num_instances=1, pool_tokens=10**7)
    assert outcome.hit_rate == pytest.approx(20 * (600 - 40) / (24 * 600))
    assert outcome.num_computed_tokens == round((1 - outcome.hit_rate) * trace.num_prompt_tokens)


def test_prefix_routing_hits_where_random_routing_does_not(trace: Trace) -> None:
    by_prefix, by_chance = run(trace), run(trace, "RANDOM")
    assert by_prefix.hit_rate > 2 * by_chance.hit_rate
    assert by_prefix.num_computed_tokens < by_chance.num_computed_tokens


def test_the_hit_rate_falls_with_instances_under_random_routing_and_rises_under_prefix_routing(tmp_path: Path) -> None:
    trace = templates(tmp_path, num_templates=30, num_requests=400)
    roomy = 10**6
    by_chance = [run(trace, "RANDOM", num_instances=n, pool_tokens=roomy).hit_rate for n in (1, 4, 16)]
    by_prefix = [run(trace, num_instances=n).hit_rate for n in (1, 4, 16)]
    assert by_chance == sorted(by_chance, reverse=True)
    assert by_prefix == sorted(by_prefix)


def test_a_prefix_length_that_reaches_into_own_text_scatters_a_template(trace: Trace) -> None:
    assert run(trace, prefix_length=24 * BLOCK * 4).hit_rate < run(trace).hit_rate / 2


def test_overflow_keeps_the_busiest_prefix_from_queueing(tmp_path: Path) -> None:
    trace = templates(tmp_path, num_templates=1, gap_ms=1)
    slow = Costs(step_s=0.005, prefill_token_s=5e-5)
    stuck = run(trace, threshold=1024, costs=slow)
    spread = run(trace, threshold=4, costs=slow)
    assert stuck.load_skew == 4.0  # all on one of four
    assert spread.ttft_mean_s < stuck.ttft_mean_s / 2


def test_a_scale_out_dips_and_a_warm_one_dips_less(tmp_path: Path) -> None:
    trace = templates(tmp_path, num_templates=40, num_requests=2400)
    scale_out = {"events": [FleetEvent(60.0, 2)], "num_instances": 2, "pool_tokens": 10**6, "window_s": 10.0}
    cold, warm = run(trace, **scale_out), run(trace, **scale_out, is_warmed=True)
    assert cold.windows[6] < cold.windows[5] - 0.05
    assert warm.windows[6] > cold.windows[6] + 0.05
    assert cold.windows[-1] == pytest.approx(warm.windows[-1], abs=0.02)


def test_a_restart_forgets_and_a_remote_tier_remembers(tmp_path: Path) -> None:
    trace = templates(tmp_path, num_requests=800)
    restart = {"events": [FleetEvent(30.0, 0)], "num_instances": 1, "pool_tokens": 10**6}
    plain = run(trace, num_instances=1, pool_tokens=10**6)
    restarted = run(trace, **restart)
    shared = run(trace, **restart, remote=RemoteTier())
    assert restarted.hit_rate < plain.hit_rate
    assert shared.hit_rate == pytest.approx(plain.hit_rate, abs=0.005)


def test_a_remote_tier_is_no_larger_than_it_is_told() -> None:
    tier = RemoteTier(2)
    tier.put([1, 2, 3])
    assert (tier.num_leading([1, 2, 3]), tier.num_leading([2])) == (2, 1)  # the tail goes first


def test_what_is_in_flight_on_a_leaving_instance_is_finished(trace: Trace) -> None:
    outcome = run(trace, events=[FleetEvent(20.0, -3)])
    assert (outcome.num_failed, outcome.num_requests) == (0, 600)


def test_a_prompt_longer_than_the_pool_fails_and_the_others_do_not() -> None:
    fits = TraceRequest(0.0, 2 * BLOCK, 4, (1, 2), "a")
    huge = TraceRequest(0.5, 40 * BLOCK, 4, tuple(range(100, 140)), "b")
    outcome = run(Trace([fits, huge, fits], BLOCK), num_instances=1, pool_tokens=10 * BLOCK)
    assert outcome.num_failed == 1


def test_time_passes_as_the_costs_say() -> None:
    request = TraceRequest(5.0, 10 * BLOCK, 11, tuple(range(10)), "a")
    costs = Costs(step_s=0.1, prefill_token_s=0.001, decode_s=0.01)
    instance = Instance(Settings(pool_tokens=10**5, block_size=BLOCK, costs=costs), number=0)
    flight = instance.submit(request, at_s=5.0)
    instance.advance(1e9)
    assert flight.ttft_s == pytest.approx(0.1 + 0.32)
    assert flight.end_s == pytest.approx(5.0 + 0.42 + 10 * 0.11)
    assert instance.num_in_flight == 0
    instance.cache.check_integrity()


def test_decoding_takes_memory_as_it_goes() -> None:
    request = TraceRequest(0.0, 2 * BLOCK, 5 * BLOCK, (1, 2), "a")
    instance = Instance(Settings(pool_tokens=100 * BLOCK, block_size=BLOCK, costs=COSTS), number=0)
    flight = instance.submit(request, at_s=0.0)
    instance.advance(1e9)
    assert flight.end_s is not None
    assert len(flight.sequence.token_ids) * BLOCK // 4 in range(7 * BLOCK - BLOCK // 4, 7 * BLOCK + 1)
    instance.cache.check_integrity()


def test_a_partial_block_is_kept_by_nobody() -> None:
    request = TraceRequest(0.0, 2 * BLOCK + BLOCK - 1, 1, (1, 2, 3), "a")
    instance = Instance(Settings(pool_tokens=100 * BLOCK, block_size=BLOCK, costs=COSTS), number=0)
    flights = [instance.submit(request, at_s=0.0)]
    instance.advance(1e9)
    flights.append(instance.submit(request, at_s=instance.now_s))
    instance.advance(1e9)
    assert [flight.hit_tokens for flight in flights] == [0, 2 * BLOCK]
    assert instance.cache.usage().num_blocks == 2


def test_two_runs_agree(trace: Trace) -> None:
    assert run(trace, "RANDOM") == run(trace, "RANDOM")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_serves_everything(trace: Trace, routing: str) -> None:
    assert run(trace, routing).num_failed == 0


def test_a_new_instance_takes_only_its_share_of_keys() -> None:
    before = {key: home(key, range(7)) for key in range(4000)}
    moved = {key for key, number in before.items() if home(key, range(8)) != number}
    assert all(home(key, range(8)) == 7 for key in moved)
    assert len(moved) == pytest.approx(500, rel=0.2)
    assert max(Counter(before.values()).values()) < 1.2 * 4000 / 7


@pytest.mark.parametrize(("prefix_length", "block"), [(1024, 8), (64, 1), (65536, 3)])
def test_the_key_is_what_the_prefix_length_covers(prefix_length: int, block: int) -> None:
    request = TraceRequest(0.0, 100, 1, tuple(range(1, 4)) if prefix_length > 60000 else tuple(range(1, 20)), "s")
    assert prefix_key(request, prefix_length=prefix_length, block_size=BLOCK) == block


def test_the_command_compares_routings_in_a_table_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    write_templates(path, num_requests=200)
    flags = [
        "--instances",
        "3",
        "--event",
        "5:+1",
        "--event",
        "8:restart",
        "--warm-up",
        "--prefix-length",
        "2048",
        "--json",
        str(out),
    ]
    assert main(["simulate", str(path), *flags]) == 0
    said = json.loads(out.read_text("utf-8"))
    assert list(said) == list(ROUTINGS)
    assert said["PREFIX_AWARE"]["hit_rate"] > said["RANDOM"]["hit_rate"]
    assert capsys.readouterr().out.count("\n") == 1 + len(ROUTINGS)


def test_costs_are_taken_from_a_measurement(tmp_path: Path) -> None:
    path, bench, out = tmp_path / "trace.jsonl", tmp_path / "bench.json", tmp_path / "out.json"
    write_templates(path, num_templates=1, num_requests=1)
    measured = {"ttft_cold_ms": 1100, "ttft_hit_ms": 100, "settings": {"prefix_tokens": 1000, "own_tokens": 32}}
    bench.write_text(json.dumps(measured), "utf-8")
    assert main(["simulate", str(path), "--bench", str(bench), "--routing", "RANDOM", "--json", str(out)]) == 0
    ttft_s = json.loads(out.read_text("utf-8"))["RANDOM"]["ttft_mean_s"]
    assert ttft_s == pytest.approx(0.1 - 0.032 + 24 * BLOCK * 0.001)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--event", "x"], "x is not SECONDS:+N"),
        (["--bench", "missing.json"], "cannot read missing.json"),
        (["--instances", "0"], "0 is not an integer from 1"),
    ],
)
def test_a_wrong_flag_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    write_templates(path, num_requests=2)
    assert main(["simulate", str(path), *flags]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"hash_ids": [1]}', '{"x": 1}', '{"requests": [{}]}', "[1, 2]"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n", "utf-8")
    with pytest.raises(ConfigError):
        read_trace(str(path))


def test_prompts_are_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    shared = "one two three four five six seven eight " * 10
    lines = [{"inputs": shared + str(n), "parameters": {"max_new_tokens": 3}} for n in range(3)]
    path.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
    trace = read_trace(str(path), rate=2.0)
    first, second, _ = trace.requests
    assert (second.arrival_s, second.num_new_tokens) == (0.5, 3)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[-1] != second.blocks[-1]


def test_turns_of_one_conversation_are_one_session(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = [[0, 1, 2], [0, 5, 6], [0, 1, 2, 3], [0, 5, 6, 7], [0, 1, 2, 3, 4]]
    rows = [
        {"timestamp": n, "input_length": len(ids) * 512, "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate(turns)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    a, b, a2, b2, a3 = [request.session for request in read_trace(str(path)).requests]
    assert a == a2 == a3 != b == b2


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the real traces are not on this machine")
def test_on_real_traffic_prefix_routing_hits_twice_as_often_as_random_routing() -> None:
    trace = read_trace(str(MOONCAKE))
    part = Trace([r for r in trace.requests if r.arrival_s < 900], trace.block_size)
    big = {"num_instances": 8, "pool_tokens": 10**6, "costs": Costs(step_s=0.008, prefill_token_s=6e-5)}
    by_prefix, by_chance = run(part, threshold=64, prefix_length=4096, **big), run(part, "RANDOM", **big)
    assert by_prefix.hit_rate > 2 * by_chance.hit_rate
    assert by_prefix.num_failed == by_chance.num_failed == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not on this machine")
def test_a_block_size_that_a_trace_does_not_name_follows_from_it() -> None:
    assert read_trace(str(DATA / "traces" / "tau_airline_qwen3_blk16.jsonl.gz")).block_size == 16
