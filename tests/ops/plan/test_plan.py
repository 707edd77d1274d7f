"""The planner: what a model needs, which fleet reaches a target, and why none does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.plan.hardware import InstanceType, Model, read_instance_types, read_model
from kvreuse.ops.plan.planner import Plan, Planner
from kvreuse.ops.simulate.fleet import simulate
from kvreuse.ops.simulate.instance import Costs, Settings
from kvreuse.ops.simulate.routing import Router
from kvreuse.ops.trace import Trace, read_trace
from tests.ops.traffic import BLOCK, MOONCAKE, templates, write_templates

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
# One byte of weights and of KV per token: an instance holds as many tokens as it has bytes to spare.
TINY = Model(kv_bytes_per_token=2**20, weight_bytes=2**20, num_parameters=10**6)


def instance_type(name: str = "small", *, tokens: int = 10_000, usd: float = 1.0, host_tokens: int = 0) -> InstanceType:
    """With room for so many tokens of TINY in the pool at memory_ratio 0.5."""
    gpu_gib = (tokens * 2 + 1) / 1024 / 0.95
    return InstanceType(
        name=name, gpus=1, gpu_gib=gpu_gib, host_gib=host_tokens * 2 / 1024, disk_gib=0,
        tflops=1.0, gbps=100.0, usd_per_hour=usd,
    )  # fmt: skip


def plan_for(trace: Trace, target: float, *types: InstanceType, **named: Any) -> Plan | None:
    return Planner(trace, **named).plan(target, types or [instance_type()], TINY, memory_ratio=0.5)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return templates(tmp_path)


def test_a_model_is_sized_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
    model = read_model(str(tmp_path), bytes_per_value=2)
    assert model.kv_bytes_per_token == 131_072
    assert model.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)


def test_of_experts_all_take_memory_and_the_chosen_ones_time(tmp_path: Path) -> None:
    experts = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": experts}), "utf-8")
    model = read_model(str(tmp_path), bytes_per_value=2)
    assert model.weight_bytes == pytest.approx(2 * 46.7e9, rel=0.01)
    assert model.num_parameters == pytest.approx(12.9e9, rel=0.05)


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2}, []])
def test_a_config_of_something_else_is_refused(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match="no config of a causal language model"):
        read_model(str(tmp_path), bytes_per_value=2)


def test_the_instance_types_that_come_along_are_sound() -> None:
    types = read_instance_types(None)
    assert all(kind.name.startswith("ml.") and kind.usd_per_hour > 0 for kind in types)


def test_a_table_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "types.json"
    path.write_text(json.dumps({"ml.x": {"cores": 4}}), "utf-8")
    with pytest.raises(ConfigError, match="cores"):
        read_instance_types(str(path))


def test_the_cheapest_fleet_that_reaches_the_target_is_chosen(trace: Trace) -> None:
    small, large = instance_type(tokens=10_000), instance_type("large", tokens=60_000, usd=2.5)
    plan = plan_for(trace, 0.7, small, large)
    assert plan is not None
    assert (plan.instance_type, plan.num_instances) == ("large", 1)
    assert plan.hit_rate >= 0.7
    only_small = plan_for(trace, 0.7, small)
    assert only_small is not None
    assert only_small.num_instances > 2


def test_a_slower_tier_counts_and_is_no_larger_than_needed(trace: Trace) -> None:
    plan = plan_for(trace, 0.7, instance_type(tokens=5_000, host_tokens=10**6))
    assert plan is not None
    assert plan.num_instances == 1
    assert plan.hit_rate_by_tier["device"] < 0.7 <= plan.hit_rate_by_tier["host"]
    assert plan.tier_tokens["host"] < 40_000


def test_a_load_that_one_instance_cannot_carry_takes_more(trace: Trace) -> None:
    roomy = instance_type(tokens=10**6)
    slow = plan_for(trace, 0.7, roomy, rate_factor=500.0)
    calm = plan_for(trace, 0.7, roomy)
    assert slow is not None and calm is not None
    assert slow.num_instances > calm.num_instances
    assert slow.load <= 0.85


def test_a_type_that_cannot_hold_one_prompt_is_not_chosen(trace: Trace) -> None:
    assert plan_for(trace, 0.01, instance_type(tokens=700)) is None


def test_the_prefix_length_covers_what_is_shared_and_not_what_is_not(trace: Trace) -> None:
    assert Planner(trace).prefix_length in {1024, 2048}  # 20 shared blocks are 2,560 bytes


def test_what_was_never_said_before_cannot_be_hit(trace: Trace) -> None:
    planner = Planner(trace)
    assert planner.ceiling == pytest.approx(20 * (600 - 40) / (24 * 600))
    assert plan_for(trace, planner.ceiling + 0.01) is None


def test_the_blame_falls_on_the_prompts_with_most_new_text(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    write_templates(path, num_templates=1, num_requests=50)
    lines = path.read_text("utf-8").splitlines()
    wordy = [
        {
            "timestamp": n,
            "input_length": 60 * BLOCK,
            "output_length": 1,
            "hash_ids": [7] * 16 + [10**8 + n * 50 + i for i in range(44)],
        }
        for n in range(50)
    ]
    path.write_text("\n".join([*lines, *map(json.dumps, wordy)]), "utf-8")
    trace = read_trace(str(path))
    worst = Planner(trace).blame()[0]
    assert worst.num_requests == 50
    assert trace.requests[worst.first_request].num_prompt_tokens == 60 * BLOCK
    assert worst.compulsory_share == pytest.approx(60 / 84 * 44 / 60, abs=0.01)


@pytest.mark.parametrize("pool_blocks", [60, 150, 300])
def test_the_predicted_hit_rate_is_that_of_the_simulated_fleet(trace: Trace, pool_blocks: int) -> None:
    predicted = Planner(trace).demand(4, 2048).hit_rate(pool_blocks * BLOCK)
    settings = Settings(
        pool_tokens=pool_blocks * BLOCK, block_size=BLOCK, policy="lru",
        costs=Costs(step_s=1e-4, prefill_token_s=1e-7, decode_s=0.0),
    )  # fmt: skip
    simulated = simulate(trace, settings, Router("PREFIX_AWARE", block_size=BLOCK, prefix_length=2048), num_instances=4)
    # Answers and requests in flight take a little of a small pool.
    assert predicted == pytest.approx(simulated.hit_rate, abs=0.05)


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the real traces are not on this machine")
def test_on_real_traffic_prediction_and_simulation_differ_by_less_than_two_points() -> None:
    whole = read_trace(str(MOONCAKE))
    trace = Trace([r for r in whole.requests if r.arrival_s < 900], whole.block_size)
    predicted = Planner(trace).demand(8, 4096).hit_rate(10**6)
    settings = Settings(
        pool_tokens=10**6, block_size=trace.block_size, costs=Costs(step_s=0.008, prefill_token_s=6e-5)
    )  # fmt: skip
    router = Router("PREFIX_AWARE", block_size=trace.block_size, threshold=64)
    assert predicted == pytest.approx(simulate(trace, settings, router, num_instances=8).hit_rate, abs=0.02)


def run_plan(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    path, config, out = tmp_path / "trace.jsonl", tmp_path / "config.json", tmp_path / "out.json"
    write_templates(path, num_requests=200)
    config.write_text(json.dumps(LLAMA_8B), "utf-8")
    code = main(["plan", str(path), "--model", str(config), "--max-instances", "4", "--json", str(out), *flags])
    return code, json.loads(out.read_text("utf-8")) if out.exists() else {}


def test_the_command_says_it_as_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    code, said = run_plan(tmp_path, "--target", "0.5", "--plot", str(plot))
    assert code == 0
    assert said["plan"]["hit_rate"] >= 0.5
    assert said["kv_bytes_per_token"] == 131_072
    out = capsys.readouterr().out
    assert f"x {said['plan']['instance_type']}, {said['plan']['usd_per_hour']:.2f} USD" in out
    lines = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2


def test_a_target_out_of_reach_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_plan(tmp_path, "--target", "0.95")
    assert code == 1
    assert said["plan"] is None
    assert said["blame"][0]["compulsory_share"] > 0
    assert "cannot be reached: no cache of any size can" in capsys.readouterr().out


def test_a_target_that_is_no_rate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(tmp_path, "--target", "50")[0] == 1
    assert "the target is 50.0" in capsys.readouterr().err
