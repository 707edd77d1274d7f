"""Starts the container's own entrypoint for the time of a measurement.

Knows processes, a port and /ping. Knows nothing of what the server is asked.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.load import Client

__all__ = ["entrypoint", "free_port", "serving"]

_POLL_S = 0.1
_STOP_S = 30.0


def entrypoint() -> list[str]:
    """The command that SageMaker runs; without a checkout around this package, the one that it stands for."""
    script = Path(__file__).parents[4] / "container" / "serve"
    if script.is_file():
        return ["env", f"KVREUSE_PYTHON={sys.executable}", str(script), "serve"]
    return [sys.executable, "-m", "kvreuse.cli.main", "serve"]


@contextmanager
def serving(
    options: Mapping[str, object],
    *,
    command: Sequence[str] | None = None,
    start_timeout_s: float = 600.0,
    is_killed: bool = False,
) -> Iterator[str]:
    """Run the entrypoint until the block ends; yields its URL once /ping answers 200.

    options: option name -> value, set as OPTION_* over what the environment has. is_killed: end it with SIGKILL.
    Raises ConfigError with the server's own words when it does not come up.
    """
    port = free_port()
    given = {"OPTION_HOST": "127.0.0.1", "SAGEMAKER_BIND_TO_PORT": port}
    given |= {f"OPTION_{name.upper()}": value for name, value in options.items()}
    # env execs, so the process that is waited for and stopped is the server.
    arguments = ["env", *(f"{name}={value}" for name, value in given.items()), *(command or entrypoint())]
    with tempfile.TemporaryFile() as log:
        # In a session of its own: Ctrl-C reaches this process only, which then stops the server in good order.
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, Client(url, timeout_s=5.0), log, deadline=time.monotonic() + start_timeout_s)
            yield url
        finally:
            if is_killed:
                process.kill()
            _stop(process)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], client: Client, log: IO[bytes], *, deadline: float) -> None:
    while not client.is_ready():
        if process.poll() is not None:
            raise ConfigError(f"the server ended with exit code {process.returncode}: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise ConfigError(f"the server was not ready in time: {_last_line(log)}")
        time.sleep(_POLL_S)


def _last_line(log: IO[bytes]) -> str:
    """Its refusal if it gave one, else the last thing it said. The server writes at this file's offset: leave it."""
    text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
    _, refused, sentence = text.rpartition("kvreuse: error: ")
    lines = sentence.strip().splitlines() or ["it said nothing"]
    return lines[0] if refused else lines[-1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
