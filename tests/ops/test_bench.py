"""`kvreuse bench templates`: its prompts, its HTTP client, its server process and its figures, over real sockets."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.bench import workload
from kvreuse.ops.bench.load import Ask, Client, LoadError
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.server import entrypoint, serving
from kvreuse.ops.bench.workload import Workload, fit, load_tokenizer

BLOCK = 32
BYTES_PER_TOKEN = 10
SMALL = ["--templates=2", "--variants=6", "--requests=4", "--concurrency=2", "--prefix-tokens=128", "--own-tokens=24"]


class FakeKV(ThreadingHTTPServer):
    """Answers as kvreuse does, from a store of whole blocks of tokens; what it says is known from the prompt alone."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.tokenizer = tokenizer
        self.lock = threading.Lock()
        self.blocks: set[tuple[int, ...]] = set()
        self.prefilled_tokens = 0
        self.bodies: list[dict[str, Any]] = []
        self.num_hung_up = 0
        self.stalled = threading.Semaphore(0)
        self.is_reuse_wrong = False
        self.fault = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may hang up
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        token_ids = tuple(self.tokenizer.encode(body["inputs"]).ids)
        with self.lock:
            self.bodies.append(body)
            num_cached, reuse = 0, body["parameters"]["kv_cache_reuse"]
            for end in range(BLOCK, len(token_ids), BLOCK) if reuse else ():
                if num_cached == end - BLOCK and token_ids[:end] in self.blocks:
                    num_cached = end
                self.blocks.add(token_ids[:end])
            self.prefilled_tokens += len(token_ids) - num_cached
        facts = {"prompt_tokens": len(token_ids), "cached_tokens": num_cached, "lookup_ms": 0.01}
        text = f" sum {sum(token_ids)}" + (" wrong" if reuse and self.is_reuse_wrong else "")
        num_new = body["parameters"]["max_new_tokens"]
        return {"generated_text": text, "details": {"generated_tokens": num_new, "kv_cache": facts}}

    def metrics(self) -> str:
        used = len(self.blocks) * BLOCK
        return (
            "# HELP kvreuse_kv_slots Places\n"
            'kvreuse_requests_total{finish_reason="length"} 3.0\n'
            f"kvreuse_kv_slots 100000.0\nkvreuse_kv_free_slots {100_000 - used}\n"
            f"kvreuse_kv_used_bytes {used * BYTES_PER_TOKEN}\nkvreuse_kv_max_used_slots {used}\n"
            f"kvreuse_prefilled_tokens_total {self.prefilled_tokens}\n"
        )


class _Routes(BaseHTTPRequestHandler):
    server: FakeKV

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        is_metrics = self.path == "/metrics"
        status = 200 if is_metrics or self.path == "/ping" else 404
        self.send(status, self.server.metrics().encode() if is_metrics else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["inputs"] == "stall":
            self.stall()
            return
        if self.server.fault == "refused after stalls":
            self.server.stalled.acquire()
        if self.server.fault.startswith("refused"):
            self.send(503, json.dumps({"error": {"message": "no more are taken"}}).encode())
            return
        answer = self.server.answer(body)
        if not body["stream"]:
            self.send(200, json.dumps([answer]).encode())
            return
        events: list[object] = [{"token": {"text": "x"}, "generated_text": None, "details": None}]
        if self.server.fault == "error event":
            events.append({"error": {"message": "the step failed"}})
        elif self.server.fault != "cut":
            events.append(answer)
        self.send(200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    def stall(self) -> None:
        """Answers nothing. A client that hangs up is counted, one that just waits is not."""
        self.connection.settimeout(20)
        self.server.stalled.release()
        with suppress(TimeoutError):
            self.server.num_hung_up += self.connection.recv(1) == b""

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred merges: words have several tokens, so that cuts fall inside words."""
    trained = ByteLevelBPETokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted(workload._TEXTS.glob("*.txt"))]
    trained.train_from_iterator(texts, vocab_size=800, show_progress=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[FakeKV]:
    with FakeKV(tokenizer) as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def bench(server: FakeKV, tokenizer_folder: Path, *flags: str) -> int:
    return main(["bench", "templates", f"--url={server.url}", f"--tokenizer={tokenizer_folder}", *SMALL, *flags])


def make_workload(tokenizer: Tokenizer, **changes: Any) -> Workload:
    return Workload(tokenizer, **{"prefix_tokens": 200, "own_tokens": 40, "seed": 7, **changes})


# The prompts


@pytest.mark.parametrize("num_tokens", [64, 65, 66, 67, 68, 200, 1024, 5000])
def test_variants_share_exactly_the_prefix_tokens_and_no_more(tokenizer: Tokenizer, num_tokens: int) -> None:
    made = make_workload(tokenizer, prefix_tokens=num_tokens)
    for template in range(6):
        a, b, c = (tokenizer.encode(made.variant(template)).ids for _ in range(3))
        assert {len(ids) for ids in (a, b, c)} == {num_tokens + 40}
        assert a[:num_tokens] == b[:num_tokens] == c[:num_tokens]
        assert len({tuple(ids[num_tokens : num_tokens + 4]) for ids in (a, b, c)}) == 3


def test_two_templates_share_no_block_even_when_they_come_from_one_text(tokenizer: Tokenizer) -> None:
    made = make_workload(tokenizer)
    beginnings = {tuple(tokenizer.encode(made.prefix(template)).ids[:BLOCK]) for template in range(12)}
    assert len(beginnings) == 12


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(tokenizer: Tokenizer) -> None:
    first, again, other = (make_workload(tokenizer, seed=s).draw(12, num_templates=3) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_no_prompt_is_drawn_twice(tokenizer: Tokenizer) -> None:
    made = make_workload(tokenizer)
    prompts = [*(made.variant(0) for _ in range(20)), *made.draw(40, num_templates=2)]
    assert len(set(prompts)) == 60


def test_popularity_falls_with_the_rank(tokenizer: Tokenizer) -> None:
    made = make_workload(tokenizer, prefix_tokens=64, own_tokens=16)
    editions = [f"Edition {template + 1}." for template in range(3)]
    drawn = Counter(editions.index(prompt[: len(editions[0])]) for prompt in made.draw(300, num_templates=3))
    assert drawn[0] > drawn[1] > drawn[2] > 0


def test_a_marker_makes_every_template_a_new_one(tokenizer: Tokenizer) -> None:
    plain, marked = make_workload(tokenizer), make_workload(tokenizer, marker="Copy 12ab. ")
    assert marked.prefix(0).startswith("Copy 12ab. ")
    assert tokenizer.encode(plain.prefix(0)).ids[:BLOCK] != tokenizer.encode(marked.prefix(0)).ids[:BLOCK]


def test_a_prompt_that_cannot_be_that_short_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="exactly 3 tokens"):
        fit(tokenizer, "some words", num_tokens=3, tail=" a tail of many more tokens than that")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


# The client


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_reply_has_text_counts_and_times_whether_streamed_or_not(server: FakeKV, is_stream: bool) -> None:
    client, text = Client(server.url), "one two three " * 40
    first, second = (client.ask(Ask(text=text, max_new_tokens=5, is_stream=is_stream)) for _ in range(2))
    assert first.text == second.text != ""
    assert (first.cached_tokens, first.output_tokens) == (0, 5)
    assert second.prompt_tokens > second.cached_tokens >= BLOCK
    assert (first.ttft_ms is not None) == is_stream
    assert 0 < (first.ttft_ms or first.total_ms) <= first.total_ms


def test_requests_are_greedy_and_of_a_fixed_length_and_reuse_is_switched_per_request(server: FakeKV) -> None:
    Client(server.url).ask(Ask(text="a", max_new_tokens=3, reuse=False))
    assert server.bodies[0]["parameters"] == {
        "max_new_tokens": 3,
        "do_sample": False,
        "ignore_eos": True,
        "details": True,
        "kv_cache_reuse": False,
    }


def test_replies_come_in_the_order_of_the_requests(server: FakeKV) -> None:
    client = Client(server.url)
    asks = [Ask(text="word " * number, max_new_tokens=1, is_stream=number % 2 == 0) for number in range(1, 20)]
    done: list[int] = []
    replies = client.ask_all(asks, on_reply=lambda: done.append(1))
    assert [reply.text for reply in replies] == [client.ask(ask).text for ask in asks]
    assert len(done) == len(asks)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("refused", "answered 503: no more are taken"),
        ("error event", "a stream ended in an error: the step failed"),
        ("cut", "an answer ended before its details came"),
    ],
)
def test_what_is_no_good_answer_is_an_error_of_one_sentence(server: FakeKV, fault: str, sentence: str) -> None:
    server.fault = fault
    with pytest.raises(LoadError, match=sentence):
        Client(server.url).ask_all([Ask(text="a", max_new_tokens=1)] * 3, on_reply=lambda: None)


def test_after_an_error_the_requests_that_still_wait_are_hung_up(server: FakeKV) -> None:
    server.fault = "refused after stalls"
    asks = [Ask(text=text, max_new_tokens=1) for text in ("stall", "refused")]
    with pytest.raises(LoadError, match="no more are taken"):
        Client(server.url).ask_all(asks, on_reply=lambda: None)
    server.shutdown()
    server.server_close()  # waits for the handlers
    assert server.num_hung_up == 1


def test_a_server_that_is_not_there_is_an_error_and_not_ready() -> None:
    client = Client("http://127.0.0.1:9")
    assert not client.is_ready()
    with pytest.raises(LoadError, match="refused"):
        client.ask(Ask(text="a", max_new_tokens=1))


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="allowed is http://HOST:PORT"):
        Client(url)


# The server process

FAKE_ENTRYPOINT = """
import http.server, os, signal, sys, time
class Routes(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Routes.asked += 1
        self.send_response(200 if Routes.asked > 2 else 503)
        self.end_headers()
    def log_message(self, *args): pass
def stop(*_):
    open(os.environ["OPTION_MODEL_ID"], "a").write(" stopped")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
open(os.environ["OPTION_MODEL_ID"], "w").write(os.environ["OPTION_MAX_BATCH_SIZE"])
http.server.HTTPServer(("127.0.0.1", int(os.environ["SAGEMAKER_BIND_TO_PORT"])), Routes).serve_forever()
"""


def test_the_server_gets_its_options_is_waited_for_and_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "said"
    options = {"model_id": file, "max_batch_size": 100}
    with serving(options, command=[sys.executable, "-c", FAKE_ENTRYPOINT], start_timeout_s=30) as url:
        assert Client(url).is_ready()
        assert file.read_text() == "100"
    assert file.read_text() == "100 stopped"


def test_the_server_is_stopped_when_the_measurement_fails(tmp_path: Path) -> None:
    file = tmp_path / "said"
    with (
        pytest.raises(LoadError),
        serving({"model_id": file, "max_batch_size": 1}, command=[sys.executable, "-c", FAKE_ENTRYPOINT]),
    ):
        raise LoadError("no answer")
    assert file.read_text() == "1 stopped"


def test_a_refusal_of_the_server_is_passed_on() -> None:
    script = "import sys; sys.exit('INFO starting\\nkvreuse: error: no such model\\nhint: look again')"
    with (
        pytest.raises(ConfigError, match=r"^the server ended with exit code 1: no such model$"),
        serving({}, command=[sys.executable, "-c", script]),
    ):
        pytest.fail("it never came up")


def test_a_server_that_hangs_is_given_up_and_its_last_words_are_passed_on() -> None:
    script = "import sys, time; print('loading\\nstill loading', file=sys.stderr, flush=True); time.sleep(60)"
    with (
        pytest.raises(ConfigError, match="not ready in time: still loading"),
        serving({}, command=[sys.executable, "-c", script], start_timeout_s=1.5),
    ):
        pytest.fail("it never came up")


def test_the_entrypoint_is_that_of_the_container_with_this_python() -> None:
    command = entrypoint()
    assert command[-2:] == [str(Path(__file__).parents[2] / "container" / "serve"), "serve"]
    assert f"KVREUSE_PYTHON={sys.executable}" in command


def test_sigterm_during_a_measurement_unwinds_it(server: FakeKV, tokenizer_folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    original = server.answer

    def terminate_once(body: dict[str, Any]) -> dict[str, Any]:
        if not server.bodies:
            signal.raise_signal(signal.SIGTERM)
        return original(body)

    server.answer = terminate_once  # type: ignore[method-assign]
    assert bench(server, tokenizer_folder) == 130
    assert signal.getsignal(signal.SIGTERM) is before


# The whole measurement


@contextmanager
def measured(server: FakeKV, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Iterator[dict[str, Any]]:
    assert bench(server, folder, "--json", "-", *flags) == 0
    yield json.loads(capsys.readouterr().out)


def test_the_figures_are_those_of_the_server(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with measured(server, tokenizer_folder, capsys) as figures:
        assert figures["template_prefills"] == 1
        assert figures["burst_prompt_tokens"] == 6 * (128 + 24)
        assert figures["burst_computed_tokens"] == 128 + 6 * 24
        assert figures["peak_kv_bytes"] == 128 * BYTES_PER_TOKEN
        assert figures["unshared_kv_bytes"] == 6 * (128 + 24 + 16) * BYTES_PER_TOKEN
        # Burst 6, cold 3, hits 12, load 4: the first of each of the four templates is computed.
        assert figures["token_hit_rate"] == pytest.approx((25 - 4) * 128 / (25 * (128 + 24)))
        assert (figures["outputs_equal"], figures["num_outputs_compared"]) == (True, 4)
        assert min(figures["throughput_on_tps"], figures["throughput_off_tps"]) > 0
        assert min(figures["ttft_hit_ms"], figures["ttft_cold_ms"]) > 0
        assert 0 < figures["lookup_share"] < 1
        assert figures["settings"]["prefix_tokens"] == 128
        assert figures["environment"]["torch"]


def test_every_figure_is_documented_and_nothing_else(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    section = page.partition("## kvreuse bench templates\n")[2].partition("\n## ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    with measured(server, tokenizer_folder, capsys) as figures:
        assert sorted(figures) == sorted(rows)


def test_on_and_off_answer_the_same_prompts_in_changing_order(server: FakeKV, tokenizer_folder: Path) -> None:
    assert bench(server, tokenizer_folder) == 0
    load = server.bodies[-8:]
    batches = [load[start : start + 2] for start in range(0, 8, 2)]
    assert [{body["parameters"]["kv_cache_reuse"] for body in batch} for batch in batches] == [
        {True},
        {False},
        {False},
        {True},
    ]
    texts = [sorted(body["inputs"] for body in batch) for batch in batches]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_every_template_is_new_to_a_server_that_was_measured_before(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, tokenizer_folder) == 0
    capsys.readouterr()
    with measured(server, tokenizer_folder, capsys) as figures:
        assert figures["template_prefills"] == 1
        assert figures["peak_kv_bytes"] == 128 * BYTES_PER_TOKEN


def test_a_server_that_cannot_say_its_peak_gives_null(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.metrics = lambda: FakeKV.metrics(server).replace("max_used", "other")  # type: ignore[method-assign]
    with measured(server, tokenizer_folder, capsys) as figures:
        assert figures["peak_kv_bytes"] is None
        assert figures["unshared_kv_bytes"] > 0


def test_different_answers_with_reuse_end_in_exit_code_1_and_one_sentence(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.is_reuse_wrong = True
    file = tmp_path / "figures.json"
    assert bench(server, tokenizer_folder, f"--json={file}") == 1
    out, err = capsys.readouterr()
    assert "NOT all equal" in out
    assert err.endswith("kvreuse: error: 4 of 4 answers differ between reuse on and reuse off\n")
    assert json.loads(file.read_text())["outputs_equal"] is False


def test_with_json_on_stdout_the_table_goes_to_stderr(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, tokenizer_folder, "--json", "-") == 0
    out, err = capsys.readouterr()
    assert "ttft_cold_ms" in json.loads(out)
    assert "6 variants of one template at once" in err


def test_a_server_that_refuses_ends_the_measurement_with_one_sentence(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fault = "refused"
    assert bench(server, tokenizer_folder) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("kvreuse: error: POST /invocations answered 503: no more are taken\n")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--variants=0"], "argument --variants: 0 is not an integer from 1 to 1000000"),
        (["--own-tokens=many"], "argument --own-tokens: many is not an integer from 16 to 1000000"),
        (["--json=/nowhere/figures.json"], "cannot write /nowhere/figures.json: No such file or directory"),
        (["--url=http://127.0.0.1:9"], "http://127.0.0.1:9/ping does not answer 200"),
    ],
)
def test_what_cannot_begin_is_refused(
    server: FakeKV, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert bench(server, tokenizer_folder, *flags) == 1
    assert f"kvreuse: error: {sentence}\n" in capsys.readouterr().err
    assert server.bodies == []


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_leaves_nothing_behind() -> None:
    terminal = Terminal()
    progress = Progress(terminal, num_steps=2)
    progress.start("burst")
    progress.advance()
    progress.close()
    assert terminal.getvalue().count("\n") == 0
    assert "1/2 burst" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_anything_else_gets_one_line_per_phase() -> None:
    file = io.StringIO()
    progress = Progress(file, num_steps=2)
    progress.start("burst")
    progress.advance()
    progress.start("load")
    progress.close()
    assert file.getvalue() == "0/2 burst\n1/2 load\n"


def test_the_progress_ends_at_its_last_step(
    server: FakeKV, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert bench(server, tokenizer_folder) == 0
    last = terminal.getvalue().split("\r\x1b[K")[-2]
    done, total = last.split()[1].split("/")
    assert done == total
