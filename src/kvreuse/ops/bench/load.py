"""An HTTP client for measurements: one request and what it took, or many at a time.

Knows the routes and answers of the server. Knows nothing of workloads or of what the figures mean.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from kvreuse.errors import ConfigError, KVReuseError

__all__ = ["Ask", "BusyError", "Client", "LoadError", "Reply", "body_of", "raise_error_event", "reply_of"]


class LoadError(KVReuseError):
    """The server did not answer as it should, so there is nothing to measure."""


class BusyError(LoadError):
    """503: the server takes no more requests now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One greedy request of exactly `max_new_tokens` tokens. reuse False computes the prompt afresh, stores nothing."""

    text: str
    max_new_tokens: int
    reuse: bool = True
    is_stream: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came back. Token counts and lookup_ms are the server's word, ttft_ms and total_ms the client's clock.

    ttft_ms: from before connecting to the first event of a stream; None for an answer in one piece.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    lookup_ms: float
    ttft_ms: float | None
    total_ms: float


class Client:
    """Talks to the server at `url` (http or https, a path before the routes is kept). A connection per request."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"the url is '{url}', allowed is http://HOST:PORT")
        self.url = url
        self._connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._netloc = parts.netloc
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._open_sockets: set[socket.socket] = set()

    def is_ready(self) -> bool:
        """Whether /ping answers 200."""
        try:
            with self._response("GET", "/ping", check=False) as response:
                return response.status == 200
        except LoadError:
            return False

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics that have no labels."""
        with self._response("GET", "/metrics") as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#") and "{" not in line)
        return {name: float(value) for name, value in pairs}

    def ask(self, ask: Ask) -> Reply:
        """Send and wait. Raises LoadError."""
        started_at = time.perf_counter()
        answer: Any = None
        ttft_ms = None
        with self._response("POST", "/invocations", body=body_of(ask)) as response:
            if not ask.is_stream:
                answer = json.loads(response.read())[0]
            for event in _events(response) if ask.is_stream else ():
                ttft_ms = ttft_ms or _ms_since(started_at)
                answer = event
        return reply_of(answer, ttft_ms=ttft_ms, total_ms=_ms_since(started_at))

    def ask_all(self, asks: Sequence[Ask], *, on_reply: Callable[[], None]) -> list[Reply]:
        """All at once, replies in the order of `asks`. Raises the first LoadError."""
        with ThreadPoolExecutor(max_workers=len(asks)) as pool:
            futures = [pool.submit(self.ask, ask) for ask in asks]
            try:
                for future in as_completed(futures):
                    future.result()
                    on_reply()
            finally:
                # Nobody waits for the others after an error or Ctrl-C.
                pool.shutdown(wait=False, cancel_futures=True)
                self._hang_up()
        return [future.result() for future in futures]

    @contextmanager
    def _response(self, method: str, path: str, *, body: object = None, check: bool = True) -> Iterator[HTTPResponse]:
        connection = self._connection_type(self._netloc, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._connected(connection):
                connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
                with connection.getresponse() as response:
                    if check and response.status != 200:
                        kind = BusyError if response.status == 503 else LoadError
                        raise kind(f"{method} {path} answered {response.status}: {_message(response.read())}")
                    yield response
        except (OSError, HTTPException, ValueError) as error:
            raise LoadError(f"{method} {path} of {self.url} failed: {error or type(error).__name__}") from error

    @contextmanager
    def _connected(self, connection: HTTPConnection) -> Iterator[None]:
        with closing(connection):
            connection.connect()
            open_socket: socket.socket = connection.sock
            self._open_sockets.add(open_socket)
            try:
                yield
            finally:
                self._open_sockets.discard(open_socket)

    def _hang_up(self) -> None:
        for open_socket in list(self._open_sockets):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)


def body_of(ask: Ask) -> dict[str, Any]:
    """What /invocations is sent."""
    return {
        "inputs": ask.text,
        "stream": ask.is_stream,
        "parameters": {
            "max_new_tokens": ask.max_new_tokens,
            "do_sample": False,
            "ignore_eos": True,
            "details": True,
            "kv_cache_reuse": ask.reuse,
        },
    }


def raise_error_event(event: Any) -> None:
    """Raises LoadError when the event of a stream is an error."""
    if "error" in event:
        raise LoadError(f"a stream ended in an error: {event['error']['message']}")


def _events(response: HTTPResponse) -> Iterator[Any]:
    """The data of a stream of server-sent events. Raises LoadError at an error event."""
    for raw in response:
        line = raw.decode().rstrip("\n")
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            raise_error_event(event)
            yield event


def reply_of(answer: Any, *, ttft_ms: float | None, total_ms: float) -> Reply:
    """From an answer, or from the last event of a stream. Raises LoadError when it lacks its details."""
    try:
        details = answer["details"]
        return Reply(
            text=answer["generated_text"],
            prompt_tokens=details["kv_cache"]["prompt_tokens"],
            cached_tokens=details["kv_cache"]["cached_tokens"],
            output_tokens=details["generated_tokens"],
            lookup_ms=details["kv_cache"]["lookup_ms"],
            ttft_ms=ttft_ms,
            total_ms=total_ms,
        )
    except (TypeError, KeyError):
        raise LoadError("an answer ended before its details came") from None


def _message(body: bytes) -> str:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body)["error"]["message"])
    return "no reason given"


def _ms_since(started_at: float) -> float:
    return (time.perf_counter() - started_at) * 1000
