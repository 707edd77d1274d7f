"""Bytes that no client in good faith sends: the container refuses them and serves the others as before."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from serving import Container

CANARY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 6}}
HOST = b"Host: a\r\n"
POST = b"POST /invocations HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NUM_IDLE = 500


def request(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answer_to(container: Container, data: bytes, *, is_last: bool = False) -> bytes:
    """What comes back until the server closes. `is_last`: say that nothing follows."""
    received = b""
    with container.connect() as sock, suppress(ConnectionError):
        sock.sendall(data)
        if is_last:
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            received += piece
    return received


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(scope="module")
def expected(container: Container) -> Any:
    return container.post(CANARY).json()


@pytest.fixture(autouse=True)
def canary(container: Container, expected: Any) -> Iterator[None]:
    """Whatever a test did: the same answer, and a live /ping."""
    yield
    assert container.ping() == 200
    assert container.post(CANARY).json() == expected


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS greeting
        b"GET /ping HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n" + HOST + b"".join(b"X%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /ping HTTP/1.1\r\n" + HOST + b"X : a\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        POST + b"Content-Length: " + b"9" * 23 + b"\r\n\r\n{}",
        CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["tls", "no_host", "long_header", "many_headers", "path", "name", "negative", "two_lengths", "huge", "chunk"],
)
def test_what_is_not_http_is_refused_and_the_connection_closed(container: Container, data: bytes) -> None:
    assert statuses(answer_to(container, data)) in ([400], [])


@pytest.mark.parametrize(
    "target",
    ["/../../etc/passwd", "/ping%00", "/%ff%fe", "//ping", "*", "/" + "a" * 60_000],
    ids=["up", "nul", "not_utf8", "two_slashes", "star", "long"],
)
def test_an_odd_path_is_no_route(container: Container, target: str) -> None:
    data = b"GET " + target.encode() + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    assert statuses(answer_to(container, data)) == [404]


def test_pipelined_requests_are_answered_in_order(container: Container) -> None:
    ping = b"GET /ping HTTP/1.1\r\n" + HOST
    bodies = [json.dumps({"inputs": name, "parameters": {"max_new_tokens": 1}}).encode() for name in "abc"]
    data = ping + b"\r\n" + b"".join(map(request, [*bodies, b"{"])) + ping + b"Connection: close\r\n\r\n"
    assert statuses(answer_to(container, data)) == [200, 200, 200, 200, 400, 200]


def test_a_body_that_ends_early_is_no_request(container: Container) -> None:
    num_logged = len(container.log_lines())
    body = json.dumps(CANARY).encode()
    for length in range(0, len(body), 7):
        data = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:length]
        assert answer_to(container, data, is_last=True) == b""
    assert answer_to(container, CHUNKED + b"ff\r\n{", is_last=True) == b""
    assert len(container.log_lines()) == num_logged


def test_a_caller_who_resets_the_connection_at_any_point_leaves_nothing_running(container: Container) -> None:
    body = json.dumps(
        {"inputs": "Tell me a story. " * 20, "stream": True, "parameters": {"max_new_tokens": 1000}}
    ).encode()
    dice = random.Random(5)
    for _ in range(40):
        with container.connect() as sock:
            # Closing sends a reset: the server learns of it without a goodbye.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            data = request(body)
            sock.sendall(data[: dice.choice([1, 40, 120, len(data) - 1, len(data)])])
            if dice.random() < 0.3:
                sock.settimeout(0.05)
                with suppress(TimeoutError):
                    sock.recv(100)
    container.wait_until_idle()


@pytest.mark.parametrize("framing", [POST + b"Content-Length: 99999999\r\n\r\n", CHUNKED], ids=["declared", "chunked"])
def test_too_large_a_body_is_refused_before_it_is_read(container: Container, framing: bytes) -> None:
    piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with container.connect() as sock:
        sock.sendall(framing)
        if framing is CHUNKED:
            with suppress(ConnectionError):
                for _ in range(26):
                    sock.sendall(piece)
        assert sock.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /ping HTTP/1.1\r\nHost: a\r\nX: ", POST + b"Content-Length: 50\r\n\r\n{"],
    ids=["nothing", "half_a_head", "half_a_body"],
)
def test_many_callers_who_send_nothing_more_stop_nobody(container: Container, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            sock = stack.enter_context(container.connect())
            sock.sendall(sent)
        assert container.ping() == 200
        assert container.post(CANARY).status_code == 200


def test_headers_that_come_letter_by_letter_stop_nobody(container: Container) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(container.connect()) for _ in range(50)]
        for letter in b"GET /ping HTTP/1.1\r\nX":
            for sock in slow:
                sock.sendall(bytes([letter]))
            assert container.ping() == 200


def test_a_caller_who_reads_nothing_of_a_stream_stops_nobody(container: Container) -> None:
    body = json.dumps({"inputs": "Go on.", "stream": True, "parameters": {"max_new_tokens": 200}}).encode()
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(container.connect()).sendall(request(body))
        assert container.post(CANARY).status_code == 200
    container.wait_until_idle()


def test_an_upgrade_is_answered_as_a_plain_request(container: Container) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert statuses(answer_to(container, b"GET /ping HTTP/1.1\r\n" + HOST + upgrade)) == [200]
