"""A server for the time of a measurement, and what its processes use.

Knows processes and /proc. Knows nothing of what is served.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.parse import urlsplit

__all__ = ["PeerError", "Usage", "interrupted_by_sigterm", "running", "usage"]

_STOP_S = 20.0
_POLL_S = 0.2


class PeerError(Exception):
    """A peer that did not start or did not answer as it should: one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of a process and everything below it: processor seconds, and the sum of each one's own peak of resident bytes."""

    cpu_s: float
    peak_rss_bytes: int


@contextmanager
def running(
    command: Sequence[str], *, health: str, environment: Mapping[str, str], cwd: Path, timeout_s: float = 900.0
) -> Iterator[int]:
    """Run `command` until the block ends; yields its process id once a GET of `health` answers 200. PeerError."""
    with TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, health, log, timeout_s=timeout_s)
            yield process.pid
        finally:
            _end(process)


def interrupted_by_sigterm() -> None:
    """SIGTERM unwinds this process as Ctrl-C does, so that the servers it started are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def usage(pid: int) -> Usage:
    """Processes that ended count with the processor time that their parent has collected."""
    ticks = peak_kib = 0
    for member in _tree(pid):
        with suppress(OSError):
            ticks += sum(int(field) for field in _stat(member)[11:15])
            for line in Path(f"/proc/{member}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak_kib += int(line.split()[1])
    return Usage(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), peak_rss_bytes=peak_kib * 1024)


def _tree(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything: state is the first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _wait(process: subprocess.Popen[bytes], health: str, log: IO[bytes], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_healthy(health):
        if process.poll() is not None:
            raise PeerError(f"ended with exit code {process.returncode}: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise PeerError(f"was not ready within {timeout_s:.0f} s: {_last_line(log)}")
        time.sleep(_POLL_S)


def _is_healthy(url: str) -> bool:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=5.0)) as connection:
        try:
            connection.request("GET", parts.path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def _last_line(log: IO[bytes]) -> str:
    """The process writes at this file's offset: leave it."""
    text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session, so that no worker outlives its server."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
