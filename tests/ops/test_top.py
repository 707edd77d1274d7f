"""`kvreuse top`: the pictures it draws, and what it says when there is nothing to look at."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvreuse.cli.main import main
from kvreuse.ops.top import frame

NODE = {
    "num_bytes": 2**20,
    "idle_s": 3.0,
    "tier": "device",
    "uses": 2.0,
    "depth": 0,
    "num_tokens": 64,
    "is_pinned": True,
}
NOW: dict[str, Any] = {
    "model": "demo", "up": True, "running": 2, "waiting": 1, "requests": 9, "failures": 0, "saved_s": 1.5,
    "prompt_tokens": 100, "cached_tokens": 80, "misses": {"cold": 1, "diverged": 4},
    "ttft": {"hit": {"p50_s": 0.01, "p99_s": 0.02}, "miss": {"p50_s": None, "p99_s": None}},
    "tiers": [
        {"name": "device", "used_bytes": 2**20, "max_bytes": 2**21, "num_slots": 40,
         "strip": [[10, 0, 0], [0, 10, 0], [0, 0, 6], [0, 1, 0]]},
        {"name": "host", "used_bytes": 0, "max_bytes": 2**20},
    ],
    "tree": {"num_nodes": 2, "nodes": [{**NODE, "id": "a", "parent": "", "name": "support"},
                                       {**NODE, "id": "b", "parent": "a", "name": ""}]},
}  # fmt: skip


def drawn(**more: Any) -> list[str]:
    return frame(NOW, [0.0, 0.5, 1.0], **{"columns": 100, "lines": 40, "has_colour": False, **more})


def test_it_shows_rates_times_reasons_tiers_and_the_tree() -> None:
    text = "\n".join(drawn())
    assert "kvreuse demo  serving  running 2  waiting 1  requests 9" in text
    assert "hit rate  80.0% since start  100.0% now   ▄█" in text
    assert "hit 10 ms / 20 ms  miss - / -" in text
    assert "misses  diverged 4, cold 1" in text
    assert "\nhost  0.0 MiB of 1.0 MiB\n" in text
    assert [line.split()[0] for line in drawn()[-2:]] == ["support", "b"]


def test_the_strip_tells_kinds_by_letter_and_colours_only_add() -> None:
    (plain,) = [line for line in drawn() if line.startswith("#=")]
    assert plain == "#=-."
    coloured = drawn(has_colour=True)
    assert re.sub(r"\x1b\[\d+m", "", "\n".join(coloured)) == "\n".join(drawn())


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (1, 1), (40, 10)])
def test_a_small_terminal_cuts_the_picture(columns: int, lines: int) -> None:
    picture = drawn(columns=columns, lines=lines)
    assert len(picture) <= lines
    assert all(len(line) <= columns for line in picture)


def test_a_server_without_an_engine_is_shown_too() -> None:
    nothing = {**NOW, "up": False, "prompt_tokens": 0, "misses": {}, "tiers": [], "tree": {"num_nodes": 0, "nodes": []}}
    text = "\n".join(frame(nothing, [], columns=80, lines=20, has_colour=False))
    assert "NOT SERVING" in text
    assert "misses  none" in text


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/status.json" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(NOW).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_once_prints_one_picture_without_escapes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url + "/", "--once"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kvreuse demo  serving")
    assert "\x1b" not in out


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "file:///etc/passwd", "nonsense"])
def test_a_server_that_cannot_be_asked_is_one_sentence(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", address, "--once"]) == 1
    assert capsys.readouterr().err.startswith("kvreuse: error: ")
