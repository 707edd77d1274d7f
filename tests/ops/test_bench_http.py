"""`kvreuse bench http`: the real container, an endpoint in front of it, and servers that refuse."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from serving import Container
from shim import ENDPOINT, runtime

from kvreuse.cli.main import main
from kvreuse.ops.bench.plot import line_chart
from kvreuse.ops.bench.sweep import percentile

SMALL = ["--concurrencies=1,3", "--requests=4", "--templates=2", "--prefix-tokens=96", "--own-tokens=24",
         "--max-new-tokens=3"]  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


@pytest.fixture(autouse=True)
def _aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up credentials, and no region or file that a machine may have."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, figures and what was said on stderr."""
    code = main(["bench", "http", *SMALL, "--json", "-", *flags])
    said = capsys.readouterr()
    return code, json.loads(said.out or "{}"), said.err


@contextmanager
def answering(num_answers: int, then: int) -> Iterator[str]:
    """A server that answers so many requests and refuses all others with that status."""
    numbers = count()
    details = {"generated_tokens": 3, "kv_cache": {"prompt_tokens": 120, "cached_tokens": 90, "lookup_ms": 0.1}}
    answer = {"generated_text": "x", "details": details}

    class Routes(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            is_answer = next(numbers) < num_answers
            body = f"data: {json.dumps(answer)}\n\n" if is_answer else '{"error": {"message": "no more are taken"}}'
            self.send_response(200 if is_answer else then)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def check_levels(levels: list[dict[str, Any]]) -> None:
    """All were answered, most of each prompt from the store."""
    assert [level["concurrency"] for level in levels] == [1, 3]
    for level in levels:
        assert (level["num_ok"], level["num_busy"], level["num_errors"], level["first_error"]) == (4, 0, 0, None)
        assert 0.5 < level["token_hit_rate"] <= 96 / 120
        assert level["requests_per_s"] * 3 == pytest.approx(level["output_tokens_per_s"], rel=0.01)
        assert level["latency_p50_ms"] <= level["latency_p95_ms"] <= level["latency_p99_ms"]


def test_every_level_of_a_running_server_is_measured_and_drawn(
    container: Container, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plot.svg"
    code, figures, said = run(capsys, f"--url={container.url}", f"--plot={plot}")
    assert code == 0
    check_levels(figures["levels"])
    assert all(0 < level["ttft_p50_ms"] <= level["latency_p50_ms"] for level in figures["levels"])
    assert len([line for line in said.splitlines() if line.endswith(" 0") and "%" in line]) == 2  # no errors
    assert "latency p95, ms" in "".join(ElementTree.parse(plot).getroot().itertext())


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_an_endpoint_is_asked_through_the_runtime_client(
    flags: tuple[str, ...], runtime_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = (f"--endpoint={ENDPOINT}", f"--endpoint-url={runtime_url}", "--region=eu-west-1")
    code, figures, _ = run(capsys, *named, *flags)
    assert code == 0
    check_levels(figures["levels"])
    assert all((level["ttft_p50_ms"] is None) == bool(flags) for level in figures["levels"])
    assert figures["settings"]["endpoint"] == ENDPOINT


@pytest.mark.parametrize("is_endpoint", [False, True])
@pytest.mark.parametrize(("status", "figure"), [(503, "num_busy"), (500, "num_errors")])
def test_what_is_refused_is_counted_and_the_rest_still_measured(
    status: int, figure: str, is_endpoint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(3, then=status) as url, runtime(url) as runtime_url:
        asked = (f"--endpoint={ENDPOINT}", f"--endpoint-url={runtime_url}", "--region=eu-west-1")
        code, figures, said = run(capsys, *(asked if is_endpoint else (f"--url={url}",)))
    first, second = figures["levels"]
    assert code == 0
    assert (first["num_ok"], first[figure], second["num_ok"], second[figure]) == (1, 3, 0, 4)
    assert first["num_busy"] + first["num_errors"] == 3
    assert second["token_hit_rate"] is second["latency_p50_ms"] is None
    assert "no more are taken" in first["first_error"] and "first error: " in said


def test_a_server_that_answers_nothing_is_an_error_of_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, figures, said = run(capsys, "--url=http://127.0.0.1:9")
    assert (code, figures) == (1, {})
    assert "kvreuse: error: nothing was answered: " in said and "refused" in said


def test_an_endpoint_without_a_region_is_an_error_of_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, "--endpoint=mine")
    assert code == 1
    assert "there is no way to the endpoint mine: You must specify a region" in said


def test_a_server_and_an_endpoint_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, "--endpoint=mine", "--url=http://127.0.0.1:9")
    assert code == 1
    assert "name one" in said


def test_every_figure_of_a_level_is_documented_and_nothing_else(
    container: Container, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text("utf-8").partition("## kvreuse bench http\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    _, figures, _ = run(capsys, f"--url={container.url}")
    assert sorted(figures["levels"][0]) == sorted(re.findall(r"`(\w+)`", "".join(rows)))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3, 1, 2], 50, 2), ([1, 2], 50, 1), ([1, 2], 99, 2), (range(1, 101), 95, 95), ([7], 50, 7), ([], 50, None)],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: int, expected: float | None) -> None:
    assert percentile(values, percent) == expected


def test_a_line_chart_is_logarithmic_and_leaves_out_what_has_no_logarithm() -> None:
    drawn = ElementTree.fromstring(
        line_chart({"a < b": {1: 10, 10: 100, 100: 1000}, "none": {1: 0}}, title="t", x_title="x", y_title="y")
    )
    lines = [line.get("points", "") for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    points = [tuple(map(float, pair.split(","))) for pair in lines[0].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == x2 - x1 > 0 > y1 - y0 == y2 - y1
    assert lines[1] == ""
    assert "a < b" in drawn.itertext()
