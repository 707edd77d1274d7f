"""The comparison with other servers: its load, its bookkeeping, its page. The peers themselves are not needed."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench import run as whole
from bench.bars import BARS, bars_table
from bench.parts import PARTS, commands, load_results, run_command
from bench.peers import compare
from bench.peers.compare import QUICK, Comparison
from bench.peers.engines import Chunk, EngineSettings, Prompt, TextStream
from bench.peers.load import ask, ask_all
from bench.peers.process import PeerError, running, usage
from bench.peers.prompts import OWN_TOKENS, Load, templated, unrelated
from bench.peers.reference import agrees, references
from bench.peers.roster import PEERS, Launch, environment
from bench.peers.serve import Broker, handler
from bench.plot import Bars, Lines, svg
from bench.render import write_page
from bench.spread import Spread, percentile, spread_of
from kvreuse.cli.main import build_parser
from kvreuse.ops.bench.server import free_port
from kvreuse.ops.bench.workload import load_tokenizer

DOCS = Path(__file__).parents[1] / "docs" / "bench.md"
SETTINGS = EngineSettings(model="", dtype="float32", num_threads=1)
LOAD = Load(num_templates=3, prefix_tokens=(160, 128), max_tokens=4, num_requests={1: 6, 2: 12})


def count_up(pipe: Connection, _: EngineSettings) -> None:
    """An engine whose tokens are the numbers from 1; a prompt that says "short" gets one too few."""
    pipe.send("Counter 1.0")
    while True:
        prompt: Prompt = pipe.recv()
        num_tokens = prompt.max_tokens - ("short" in prompt.text)
        for token in range(1, num_tokens + 1):
            is_last = token == num_tokens
            pipe.send(Chunk(number=prompt.number, text=f"{prompt.text}{token} ", num_tokens=1, is_last=is_last))


def breaks(pipe: Connection, _: EngineSettings) -> None:
    """An engine that cannot start."""
    pipe.close()


@contextmanager
def served() -> Iterator[str]:
    broker = Broker(count_up, SETTINGS)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(broker))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        broker.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


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


# The servers made of libraries


def test_a_character_of_several_tokens_comes_as_a_whole() -> None:
    stream = TextStream(Prompt(number=1, text="", max_tokens=4), lambda ids: bytes(ids).decode(errors="replace"))
    texts = [stream.add([byte]).text for byte in "aéb".encode()]
    assert texts == ["a", "", "é", "b"]


def test_the_last_chunk_is_the_one_that_completes_the_answer() -> None:
    stream = TextStream(Prompt(number=1, text="", max_tokens=3), lambda ids: "x" * len(ids))
    assert [stream.add(ids).is_last for ids in ([1], [2, 3])] == [False, True]


def test_a_stream_holds_every_token_in_order(url: str) -> None:
    answer = ask(url, "n", max_tokens=3)
    assert (answer.text, answer.num_tokens) == ("n1 n2 n3 ", 3)
    assert answer.started_at + answer.ttft_s <= answer.ended_at


def test_answers_at_the_same_time_do_not_mix(url: str) -> None:
    answers = ask_all(url, [f"{name}" for name in "abcdefgh"], concurrency=8, max_tokens=2, limit_s=60)
    assert [answer.text for answer in answers] == [f"{name}1 {name}2 " for name in "abcdefgh"]


def test_a_run_over_its_time_sends_nothing_more(url: str) -> None:
    assert [answer.text for answer in ask_all(url, list("abcd"), concurrency=2, max_tokens=1, limit_s=0)] == [
        "a1 ",
        "b1 ",
    ]


def test_an_answer_of_another_length_is_an_error(url: str) -> None:
    with pytest.raises(PeerError, match="answered 2 tokens"):
        ask(url, "short", max_tokens=3)


def test_a_peer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PeerError, match="broke a connection"):
        ask(f"http://127.0.0.1:{free_port()}", "n", max_tokens=1)


def test_an_engine_that_does_not_start_is_noticed() -> None:
    with pytest.raises(EOFError):
        Broker(breaks, SETTINGS)


# Processes


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(PeerError, match="exit code 1: no such model"),
        running(command, health=f"http://127.0.0.1:{free_port()}/health", environment={}, cwd=tmp_path),
    ):
        pass


def test_a_server_ends_with_all_its_processes(tmp_path: Path) -> None:
    port = free_port()
    child = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '{child}']).pid, flush=True)"
    server = f"from http.server import *; HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"
    command = ["sh", "-c", f'"$0" -c "{parent}" > pid; exec "$0" -c "{server}"', sys.executable]
    with running(command, health=f"http://127.0.0.1:{port}/pid", environment={}, cwd=tmp_path):
        worker = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{worker}").exists()
    stat = Path(f"/proc/{worker}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")


def test_usage_counts_the_processes_below() -> None:
    code = (
        "import subprocess, sys; b = bytearray(64 << 20); subprocess.run([sys.executable, '-c', sys.argv[1]]); input()"
    )
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", code, burn], stdin=subprocess.PIPE) as process:
        try:
            while (used := usage(process.pid)).cpu_s < 0.3:
                assert process.poll() is None
        finally:
            process.communicate(b"\n")
    assert used.peak_rss_bytes > 64 << 20


# The workload


def test_prompts_have_the_tokens_they_should(tokenizer: Tokenizer) -> None:
    for prompt in templated(LOAD, tokenizer):
        own_tokens = len(tokenizer.encode(prompt.text).ids) - LOAD.prefix_tokens[prompt.template % 2]
        assert OWN_TOKENS[0] <= own_tokens <= OWN_TOKENS[1]


def test_prompts_of_a_template_share_it_and_little_else(tokenizer: Tokenizer) -> None:
    prompts = [prompt for prompt in templated(LOAD, tokenizer) if prompt.template == 0]
    first, second = (tokenizer.encode(prompt.text).ids for prompt in prompts[:2])
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    assert 160 <= shared < 160 + OWN_TOKENS[0]


def test_first_sight_is_told_from_repeats(tokenizer: Tokenizer) -> None:
    prompts = templated(LOAD, tokenizer)
    assert sum(prompt.is_first for prompt in prompts) == len({prompt.template for prompt in prompts}) < len(prompts)


def test_the_same_load_has_the_same_prompts(tokenizer: Tokenizer) -> None:
    assert templated(LOAD, tokenizer) == templated(LOAD, tokenizer)


def test_unrelated_prompts_share_no_beginning(tokenizer: Tokenizer) -> None:
    texts = unrelated(tokenizer, num_tokens=128, count=3)
    assert [len(tokenizer.encode(text).ids) for text in texts] == [128] * 3
    assert len({text.split()[0] for text in texts}) == 3


# What is compared


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (" the sea", "the sea", True),
        (" the sea", "the lake", False),
        ("the", "the sea", False),
        ("the sea and", "the sea", False),
        ("one\nuser two", "one<|im_end|>\n<|im_start|>user two", True),
        ("one, banned end", "one<|im_end|>\n<|im_start|>user two", True),
        ("other", "one<|im_end|>\n<|im_start|>user two", False),
    ],
)
def test_texts_agree_up_to_the_end_token(text: str, reference: str, expected: bool) -> None:
    assert agrees(text, reference) is expected


def test_reference_texts_are_computed_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def compute(prompts: list[str]) -> list[str]:
        asked.extend(prompts)
        return [prompt.upper() for prompt in prompts]

    def texts(*prompts: str, model: str = "m") -> list[str]:
        return references(prompts, model=model, max_tokens=4, compute=compute, file=tmp_path / "known.json")

    assert [texts("a", "b"), texts("b", "c"), texts("a", model="other")] == [["A", "B"], ["B", "C"], ["A"]]
    assert asked == ["a", "b", "c", "a"]


def test_every_peer_is_told_dtype_threads_and_port() -> None:
    for peer in PEERS.values():
        words = " ".join(peer.command(Launch(dtype="bfloat16", num_threads=3, concurrency=32, port=8123)))
        assert re.search(r"bfloat16|model-bf16", words), peer.name
        assert "8123" in words, peer.name
        assert environment(peer, 3)["OMP_NUM_THREADS"] == "3"


def test_a_session_that_fails_is_recorded_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(LOAD, num_threads=1, limit_s=60, budget_s=0)
    monkeypatch.setattr(compare, "running", lambda *_, **__: broken())
    batches = list(comparison.run([PEERS["kvreuse"]], dtypes=["float32"], num_repetitions=1))
    assert [(record["concurrency"], record["error"]) for record in comparison.records] == [(1, "broke"), (2, "broke")]
    assert len(batches) == 2


@contextmanager
def broken() -> Iterator[int]:
    raise PeerError("broke")
    yield


# Figures, bars and the page


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
