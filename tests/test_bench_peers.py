"""The comparison with other servers: its servers, its load, its bookkeeping. The peers themselves are not needed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.peers import compare
from bench.peers.compare import Comparison
from bench.peers.engines import Chunk, EngineSettings, Prompt, TextStream
from bench.peers.load import ask, ask_all
from bench.peers.process import PeerError, running, usage
from bench.peers.prompts import OWN_TOKENS, Load, templated, unrelated
from bench.peers.reference import agrees, references
from bench.peers.roster import PEERS, Launch, environment
from bench.peers.serve import Broker, handler
from kvreuse.ops.bench.server import free_port
from kvreuse.ops.bench.workload import load_tokenizer

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
    deadline = time.monotonic() + 30
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


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


def test_repetitions_are_for_the_quickest_peers_that_fit_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(LOAD, num_threads=1, limit_s=60, budget_s=100)
    now, costs_s = [0.0], {"kvreuse": 10.0, "vllm": 20.0, "llamacpp": 200.0}
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def measure(session: Any, repetition: int) -> None:
        now[0] += costs_s[session.peer.name]
        comparison.records.append({"peer": session.peer.name, "repetition": repetition})

    monkeypatch.setattr(comparison, "_measure", measure)
    # Of two sessions each, one for vLLM: 20, 20 and 400 s the first time.
    list(comparison.run([PEERS[name] for name in costs_s], dtypes=["float32"], num_repetitions=4))
    done = [{r["peer"] for r in comparison.records if r["repetition"] == repetition} for repetition in range(4)]
    assert done == [set(costs_s), {"kvreuse", "vllm"}, {"kvreuse", "vllm"}, {"kvreuse"}]


@contextmanager
def broken() -> Iterator[int]:
    raise PeerError("broke")
    yield
