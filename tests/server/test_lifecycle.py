"""The process itself: port first, load behind it, one sentence when refused, an orderly end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PROLOGUE = """
    import sys, threading
    from fakes import FakeEngine
    from kvreuse.config import Config
    from kvreuse.errors import ConfigError
    from kvreuse.server import handler, lifecycle
    from kvreuse.server.service import Service
    from kvreuse.telemetry.request_log import RequestLog

    class Process(handler.Process):
        def load(self, model_dir):
            self.service = self.make()
            return self.service

        def make(self):
            engine = FakeEngine(step_s=0.01)
            return Service(engine, self.config, stats=self.stats, log=RequestLog(sys.stdout), templates={})
"""
EPILOGUE = """
    handler.process = Process()
    sys.exit(lifecycle.main(Config(host="127.0.0.1", port=int(sys.argv[1]), entry_point="no_such_handler.py")))
"""


class Served:
    def __init__(self, source: str, port: int) -> None:
        code = textwrap.dedent(PROLOGUE) + textwrap.dedent(source) + textwrap.dedent(EPILOGUE)
        env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(port)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ping(self) -> int:
        """The status of /ping, 0 while nothing listens."""
        try:
            return httpx.get(f"{self.url}/ping").status_code
        except httpx.ConnectError:
            return 0

    def wait_for_ping(self, status: int) -> None:
        for _ in range(1000):
            if self.ping() == status:
                return
            time.sleep(0.02)
        raise AssertionError(f"/ping never answered {status}")


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def served(port: int) -> Iterator[list[Served]]:
    """Append what was started: it is killed in the end."""
    started: list[Served] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_ping_is_503_while_loading_and_200_after(served: list[Served], port: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    one = Served(
        f"""
        def make(self, make=Process.make):
            import pathlib, time
            while not pathlib.Path({str(gate)!r}).exists():
                time.sleep(0.01)
            return make(self)
        Process.make = make
        """,
        port,
    )
    served.append(one)
    one.wait_for_ping(503)
    gate.touch()
    one.wait_for_ping(200)


def test_a_refused_model_is_one_sentence_and_exit_1(served: list[Served], port: int) -> None:
    one = Served(
        """
        def make(self):
            raise ConfigError("the model is of a kind that kvreuse does not serve")
        Process.make = make
        """,
        port,
    )
    served.append(one)
    _, stderr = one.process.communicate(timeout=20)
    assert stderr == "kvreuse: error: the model is of a kind that kvreuse does not serve\n"
    assert one.process.returncode == 1


def test_a_taken_port_is_one_sentence_and_exit_1(served: list[Served], port: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        one = Served("", port)
        served.append(one)
        _, stderr = one.process.communicate(timeout=20)
    assert stderr == f"kvreuse: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert one.process.returncode == 1


def test_sigterm_finishes_what_runs_and_exits_0(served: list[Served], port: int) -> None:
    one = Served("", port)
    served.append(one)
    one.wait_for_ping(200)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 100}, "stream": True}
    with httpx.stream("POST", f"{one.url}/invocations", json=body) as response:
        text = ""
        for chunk in response.iter_text():
            if not text:
                one.process.send_signal(signal.SIGTERM)
            text += chunk
    assert '"generated_text":"' in text
    stdout, stderr = one.process.communicate(timeout=20)
    assert one.process.returncode == 0
    assert stdout.count('"event": "request"') == 1
    assert "Traceback" not in stderr


def test_sigterm_aborts_what_would_take_too_long(served: list[Served], port: int) -> None:
    one = Served("lifecycle.DRAIN_S = 0.3", port)
    served.append(one)
    one.wait_for_ping(200)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 15_000}, "stream": True}
    text = ""
    with (
        httpx.stream("POST", f"{one.url}/invocations", json=body) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for chunk in response.iter_text():
            if not text:
                one.process.send_signal(signal.SIGTERM)
            text += chunk
    assert text.split("\n\n")[-2].startswith("event: error")
    assert one.process.wait(20) == 0


def test_sigterm_while_loading_exits_0(served: list[Served], port: int) -> None:
    one = Served("Process.make = lambda self: threading.Event().wait()", port)
    served.append(one)
    one.wait_for_ping(503)
    one.process.terminate()
    assert one.process.wait(20) == 0


def test_accepted_connections_send_without_delay() -> None:
    from kvreuse.config import Config
    from kvreuse.server import lifecycle

    listener = lifecycle._bind(Config(host="127.0.0.1", port=0))
    with listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            # What asyncio asks before it sets TCP_NODELAY.
            assert (accepted.type, accepted.proto) == (socket.SOCK_STREAM, socket.IPPROTO_TCP)
