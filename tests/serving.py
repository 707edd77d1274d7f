"""The container's entrypoint with the demo model as one process for a whole test session, and what it has said.

A plugin: tests/conftest.py names it, so that every folder shares the one container.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from shim import runtime, runtime_client

__all__ = ["Container", "container", "runtime_url", "sagemaker", "started"]

ROOT = Path(__file__).parents[1]
_START_S, _STOP_S, _IDLE_S = 150, 40, 20


class Container:
    """A running entrypoint. `stdout` has a line per request, `stderr` the logs."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, folder: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder

    def ping(self) -> int:
        return httpx.get(f"{self.url}/ping", timeout=20).status_code

    def post(self, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}/invocations", json=body, headers=headers, timeout=60)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def gauge(self, name: str) -> float:
        """A number of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    def wait_until_idle(self) -> None:
        """Until nothing runs and nothing waits."""
        deadline = time.monotonic() + _IDLE_S
        while any(self.gauge(f"kvreuse_{name}_requests") for name in ("running", "waiting")):
            assert time.monotonic() < deadline, "requests that nobody waits for go on"
            time.sleep(0.05)

    def said(self) -> str:
        """All of its output so far."""
        return "".join((self._folder / name).read_text("utf-8") for name in ("stdout", "stderr"))

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "stdout").read_text("utf-8").splitlines()]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the container ended with {self.process.returncode}: {self.said()}")
            try:
                if self.ping() == 200:
                    return
            except httpx.ConnectError:
                pass
            time.sleep(0.05)
        raise AssertionError("the container was never ready")


@contextmanager
def started(folder: Path, options: Mapping[str, object], *, command: Sequence[str] = ()) -> Iterator[Container]:
    """Run the entrypoint behind `command`, by default nothing, until the block ends; then it must end with 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # No audits by chance: they run beside what a test counts.
    given = {"OPTION_HOST": "127.0.0.1", "SAGEMAKER_BIND_TO_PORT": str(port), "OPTION_AUDIT_RATE": "0"}
    given |= {f"OPTION_{name.upper()}": str(value) for name, value in options.items()}
    given |= {"KVREUSE_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        arguments = [*command, str(ROOT / "container" / "serve"), "serve"]
        process = subprocess.Popen(arguments, env=os.environ | given, stdout=out, stderr=err)
    container = Container(process, port=port, folder=folder)
    try:
        container.wait_until_ready()
        yield container
        process.send_signal(signal.SIGTERM)
        assert process.wait(_STOP_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    options = {"model_id": "demo", "kv_cache_memory_bytes": 256 * 2**20, "max_model_len": 2048}
    with started(tmp_path_factory.mktemp("container"), options) as running:
        yield running


@pytest.fixture(scope="session")
def runtime_url(container: Container) -> Iterator[str]:
    """The hosting runtime in front of the container."""
    with runtime(container.url) as url:
        yield url


@pytest.fixture(scope="session")
def sagemaker(runtime_url: str) -> Iterator[Any]:
    """boto3's own runtime client for it."""
    client = runtime_client(runtime_url)
    yield client
    client.close()
