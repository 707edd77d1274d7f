"""`make bench`: its parts, the bars, the page and the plots. Nothing is measured here."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench import run as whole
from bench.bars import BARS, bars_table
from bench.parts import PARTS, ROOT, commands, load_results, run_command
from bench.peers import compare
from bench.peers.compare import QUICK
from bench.peers.roster import PEERS
from bench.plot import Bars, Lines, svg
from bench.render import write_page
from bench.spread import Spread, percentile, spread_of
from kvreuse.cli.main import build_parser

DOCS = Path(__file__).parents[1] / "docs" / "bench.md"
# One result of each of kvreuse's own measurements, with the figures that the page shows.
OWN: dict[str, Any] = {
    "suffix-float32": {"hit_ttft_s": [0.19, 0.2, 0.21], "bare_forward_s": [0.18], "ratio": 1.11},
    "templates": {
        "ttft_cold_ms": 3000, "ttft_hit_ms": 200, "throughput_off_tps": 4, "throughput_on_tps": 16,
        "unshared_kv_bytes": 2**30, "peak_kv_bytes": None, "burst_prompt_tokens": 9, "burst_computed_tokens": 3,
    },
    "restart": {
        "ttft_cold_ms": 900, "token_hit_rate_cold": 0, "ttft_after_restart_disk_ms": 90, "token_hit_rate_disk": 0.8,
        "ttft_new_instance_remote_ms": None, "token_hit_rate_remote": None,
    },
    "precision": {"int8": {"bytes_share_of_bf16": 0.53, "top1_agreement": 0.99, "max_logit_difference": 0.125}},
    "policy-tau_bench-8000": {
        "token_hit_rate": 0.61, "lru_token_hit_rate": 0.552, "ceiling_token_hit_rate": None,
        "block_operations_per_s": 250_000,
    },
    "store": {
        "points": [
            {"entries": 10_000, "match_us": 1.0, "commit_us": 2.0, "evict_us": 3.0, "bytes_per_block": 260},
            {"entries": 1_000_000, "match_us": 1.1, "commit_us": 2.1, "evict_us": 3.1, "bytes_per_block": 250},
        ],
        "match_growth": 1.1, "commit_growth": 1.05, "evict_growth": 1.03, "settings": {"threads": 8},
        "threads": [
            {"kind": "match", "buckets": "equal", "one_thread_ops_per_s": 7000, "threads_ops_per_s": 6000},
        ],
    },
    "growth": {"axes": {"prefix tokens": {"points": [[256, 50.0], [8192, 90.0]], "slope": 0.2, "steepest": 0.6}}},
    "http": {
        "levels": [
            {
                "concurrency": 8, "output_tokens_per_s": 40, "latency_p50_ms": 900, "latency_p99_ms": 1500,
                "ttft_p50_ms": 200, "ttft_p99_ms": 400, "token_hit_rate": 0.95,
            }
        ]
    },
}  # fmt: skip


def one_run(peer: str, **changed: Any) -> dict[str, Any]:
    run = {
        "peer": peer, "version": "1.0", "dtype": "float32", "concurrency": 8, "repetition": 0, "num_requests": 2,
        "output_tokens_per_s": 10.0, "ttft_cold_s": [2.0], "ttft_hit_s": [0.2], "cpu_s_per_request": 1.5,
        "peak_rss_bytes": 2**30, "num_equal": 2,
    }  # fmt: skip
    return run | changed


def outcome(*runs: dict[str, Any]) -> dict[str, Any]:
    settings = {"num_threads": 1, "is_quick": True, "run_seconds": 90, "left_out": ["vllm"], "workload": "templates"}
    return {"peers": {"settings": settings, "runs": list(runs)}}


def verdicts(results: dict[str, Any], text: str) -> list[str]:
    return [row[-1] for row in bars_table(results).rows if text in row[0]]


def test_percentiles_are_values_that_were_measured() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], p) for p in (0, 50, 75, 99, 100)] == [1, 2, 3, 4, 4]
    assert percentile([], 50) is None


def test_a_spread_shows_its_limits_only_when_repeated() -> None:
    assert [spread_of(values).shown() for values in ([2.0], [3.0, 1.0, 2.0])] == ["2.0", "2.0 (1.0–3.0)"]


@pytest.mark.parametrize(("own", "expected"), [(15.0, "met"), (14.9, "**not met**")])
def test_the_bar_is_set_by_the_best_of_the_rivals(own: float, expected: str) -> None:
    runs = [one_run("kvreuse", output_tokens_per_s=own), one_run("vllm"), one_run("llamacpp", output_tokens_per_s=4.0)]
    text = "best of vLLM, Transformers and llama.cpp, 8 at a time, float32"
    assert verdicts(outcome(*runs), text) == [expected]


def test_a_peer_that_takes_one_at_a_time_counts_at_every_concurrency_with_its_rate_alone() -> None:
    results = outcome(one_run("kvreuse"), one_run("transformers", concurrency=1, output_tokens_per_s=8.0))
    assert verdicts(results, "best of vLLM, Transformers and llama.cpp, 8 at a time, float32") == ["**not met**"]
    assert verdicts(results, "TTFT p50 of a hit against the best peer, 8 at a time, float32") == ["not measured"]


def test_what_was_not_measured_is_said() -> None:
    assert {row[-1] for row in bars_table({}).rows} == {"not measured"}
    assert len(bars_table({}).rows) == len(BARS)


def test_medians_stand_for_repetitions() -> None:
    runs = [one_run("openvino", output_tokens_per_s=rate) for rate in (10.0, 90.0, 11.0)]
    assert verdicts(
        outcome(one_run("kvreuse", output_tokens_per_s=11.5), *runs), "OpenVINO GenAI, 8 at a time, float32"
    ) == ["met"]


def test_the_page_has_every_table_every_fault_and_a_small_plot_each(tmp_path: Path) -> None:
    failed = {"peer": "llamacpp", "dtype": "float32", "repetition": 0, "concurrency": 32, "error": "it broke"}
    results = outcome(one_run("kvreuse", concurrency=1, single_itl_s=[0.05]), one_run("openvino"), failed)
    results["decode-float32"] = {"shared_step_ms_all": [1.0, 2.0], "unshared_step_ms_all": [4.0], "shared_step_ms": 1.5}
    results["decode-float32"]["unshared_step_ms"] = 4.0
    page = tmp_path / "RESULTS.md"
    write_page(results, facts={"date": "today", "cpu": "one"}, faults={"store": "out of memory"}, page=page)
    text = page.read_text(encoding="utf-8")
    for words in ("* Date: today", "**store failed**: out of memory", "it broke", "Not installed: vLLM", "2.67"):
        assert words in text
    plots = re.findall(r"\]\((plots/[\w-]+\.svg)\)", text)
    assert plots == ["plots/peers-float32.svg", "plots/peers-single.svg", "plots/decode.svg"]
    for plot in plots:
        ET.parse(tmp_path / plot)
        assert (tmp_path / plot).stat().st_size < 100_000


def test_every_measurement_of_kvreuse_has_its_table(tmp_path: Path) -> None:
    write_page(OWN, facts={}, faults={}, page=tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    expected = {
        "suffix": "| float32 | 200.0 (190.0–210.0) | 180.0 | 1.11 |",
        "templates": "| output tokens/s | 4.0 | 16.0 |",
        "restart": "| after a kill, from disk | 90.0 | 80.0% |",
        "precision": "| int8 | 0.530 | 0.990 | 0.125 |",
        "policy": "| tau_bench | 8,000 | 61.00% | 55.20% | - | 250,000 |",
        "store": "| 1,000,000 | 1.10 | 2.10 | 3.10 | 250 |",
        "locks": "| match, equal | 7,000 | 6,000 |",
        "growth": "| prefix tokens | 256 to 8,192 | 50.0 | 90.0 | 0.20 | 0.60 |",
        "http": "| 8 | 40.0 | 900.0 | 1,500.0 | 200.0 | 400.0 | 95.0% |",
    }
    assert [part for part, row in expected.items() if row not in text] == []
    assert re.findall(r"\(plots/(\w+)\.svg\)", text) == list(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bare Transformers forward of the suffix, float32", "**not met**"),
        ("cost of a block to evict", "met"),
        ("growth of a decode step", "met"),
        ("reused on tau_bench, 8,000", "met"),
        ("reuse above LRU", "met"),
        ("block operations", "met"),
        ("reused on mooncake_conversation, 512,000", "not measured"),
    ],
)
def test_the_bars_read_kvreuses_own_figures(text: str, expected: str) -> None:
    assert verdicts(OWN, text) == [expected]


@pytest.mark.parametrize(
    "plot",
    [
        Bars(unit="ms", groups={"a & b": {"x": Spread(median=2, low=1, high=3, count=3)}, "c": {}}),
        Bars(unit="ms", groups={}),
        Lines(x_unit="blocks", unit="us", lines={"match": [(1e4, 1.0), (1e6, 1.2)], "evict": [(1e4, 9.0)]}),
    ],
)
def test_plots_are_well_formed(plot: Bars | Lines) -> None:
    assert ET.fromstring(svg(plot)).tag.endswith("svg")


# make bench


def test_a_part_that_fails_is_quoted_and_its_old_figures_are_gone(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    code = "import sys; print('kvreuse: error: the trace is empty\\nhint: take another', file=sys.stderr); sys.exit(1)"
    assert run_command("store", ["-c", code], folder=tmp_path, num_threads=1) == "the trace is empty"
    assert load_results(tmp_path) == {}


def test_the_figures_of_a_part_are_kept(tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[2], 'w').write('{\"threads\": ' + os.environ['OMP_NUM_THREADS'] + '}')"
    assert run_command("store", ["-c", code], folder=tmp_path, num_threads=3) is None
    assert load_results(tmp_path) == {"store": {"threads": 3}}


def test_an_interrupted_part_ends_in_good_order(tmp_path: Path) -> None:
    part = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try: os.kill(os.getppid(), signal.SIGINT); time.sleep(60)\n"
        "except KeyboardInterrupt: print('stopped its servers')"
    )
    whole_run = (
        "import signal, sys; from pathlib import Path; from bench.parts import run_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "try: run_command('http', ['-c', sys.argv[2]], folder=Path(sys.argv[1]), num_threads=1)\n"
        "except KeyboardInterrupt: sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", whole_run, str(tmp_path), part], cwd=ROOT, check=False)
    assert (done.returncode, (tmp_path / "http.log").read_text()) == (7, "stopped its servers\n")


def test_the_page_can_be_written_again_from_what_was_kept(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"date": "some day"}')
    (tmp_path / "faults.json").write_text('{"http": "no answer"}')
    page = tmp_path / "page.md"
    assert whole.main(["--render", "--results", str(tmp_path), "--page", str(page)]) == 1
    assert "some day" in page.read_text("utf-8")
    assert "**http failed**: no answer" in page.read_text("utf-8")


def test_an_unknown_part_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole.main(["--only", "decode,polcy"])
    assert "did you mean policy?" in capsys.readouterr().err


@pytest.mark.parametrize("part", [part for part in PARTS if part not in {"peers", "suffix"}])
def test_every_part_is_a_command_that_kvreuse_knows(part: str, tmp_path: Path) -> None:
    named = commands(part, num_threads=1, traces=tmp_path, minutes=1, is_quick=False)
    for arguments in named.values():
        assert build_parser("bench")[0].parse_args(arguments[2:]).bench == part


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", parser.format_usage()))


@pytest.mark.parametrize("parser", [whole.make_parser(), compare.make_parser()], ids=["run", "compare"])
def test_every_flag_is_documented(parser: argparse.ArgumentParser) -> None:
    section = DOCS.read_text("utf-8").partition("## The whole comparison: make bench")[2].partition("\n## ")[0]
    assert flags_of(parser) - set(re.findall(r"--[a-z][\w-]*", section)) == set()


def test_every_part_and_every_peer_is_documented() -> None:
    section = DOCS.read_text("utf-8").partition("## The whole comparison: make bench")[2].partition("\n## ")[0]
    assert [part for part in PARTS if f"`{part}`" not in section] == []
    assert [peer.name for peer in PEERS.values() if f"`{peer.name}`" not in section] == []


def test_the_quick_load_is_part_of_what_the_full_one_measures() -> None:
    assert set(QUICK.num_requests) <= set(compare.FULL.num_requests)
