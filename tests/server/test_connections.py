"""Connections that bring no request: they go, the oldest first, and /ping is answered meanwhile."""

from __future__ import annotations

import select
import socket
import threading
import time

import httpx
import pytest
from server.conftest import MakeSite, Site

from kvreuse.server.connections import Connections


@pytest.fixture
def few(make_site: MakeSite) -> Site:
    return make_site(connections=Connections(max_open=8, idle_s=60))


def connect(site: Site, sent: bytes = b"") -> socket.socket:
    url = httpx.URL(site.url)
    sock = socket.create_connection((url.host, url.port or 80), timeout=10)
    sock.sendall(sent)
    return sock


def is_closed(sock: socket.socket, *, within_s: float = 5.0) -> bool:
    readable, _, _ = select.select([sock], [], [], within_s)
    try:
        return bool(readable) and sock.recv(1) == b""
    except ConnectionResetError:
        return True


def ping(sock: socket.socket) -> bytes:
    sock.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
    return sock.recv(4096).split(b"\r\n")[0]


HALF_HEAD = b"POST /invocations HTTP/1.1\r\nhost: x\r\nx-slow: "
HALF_BODY = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"


@pytest.mark.parametrize("half", [b"", HALF_HEAD, HALF_BODY], ids=["idle", "half a head", "half a body"])
def test_a_flood_of_waiting_connections_closes_its_oldest_and_answers_ping(few: Site, half: bytes) -> None:
    flood = [connect(few, half) for _ in range(30)]
    assert httpx.get(f"{few.url}/ping").status_code == 200
    assert [is_closed(sock) for sock in flood[:20]] == [True] * 20
    for sock in flood:
        sock.close()


def test_a_request_under_way_outlives_a_flood(few: Site) -> None:
    few.engine.stall()
    content = b'{"inputs": "hello"}'
    caller = connect(
        few, b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    while not few.engine.submitted:
        time.sleep(0.005)
    flood = [connect(few) for _ in range(30)]
    assert is_closed(flood[0])
    few.engine.gate.set()
    assert caller.recv(4096).startswith(b"HTTP/1.1 200")
    for sock in (caller, *flood):
        sock.close()


def test_a_connection_that_was_served_is_younger_than_one_that_only_waits(few: Site) -> None:
    served, idle = connect(few), connect(few)
    httpx.get(f"{few.url}/ping", headers={"connection": "close"})  # connections are taken in order: both are in
    assert ping(served) == b"HTTP/1.1 200 OK"
    flood = [connect(few) for _ in range(7)]
    assert is_closed(idle)
    assert ping(served) == b"HTTP/1.1 200 OK"
    for sock in (served, idle, *flood):
        sock.close()


def sweep(site: Site, connections: Connections) -> None:
    """On the server's own loop, as its tick does."""
    assert site.server is not None
    done = threading.Event()
    loop = site.server.servers[0].get_loop()
    loop.call_soon_threadsafe(lambda: (connections.sweep(), done.set()))
    assert done.wait(5)


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "half a head", "half a body"])
def test_who_brings_no_request_in_time_is_closed(make_site: MakeSite, sent: bytes) -> None:
    connections = Connections(max_open=8, idle_s=0.2)
    site = make_site(connections=connections)
    caller = connect(site, sent)
    assert not is_closed(caller, within_s=0.25)
    sweep(site, connections)
    assert is_closed(caller)
    caller.close()


def test_who_has_time_left_is_not(make_site: MakeSite) -> None:
    connections = Connections(max_open=8, idle_s=600)
    site = make_site(connections=connections)
    caller = connect(site)
    sweep(site, connections)
    assert ping(caller) == b"HTTP/1.1 200 OK"
    caller.close()


def test_half_a_second_request_does_not_hold_a_connection(make_site: MakeSite) -> None:
    connections = Connections(max_open=8, idle_s=0.2)
    site = make_site(connections=connections)
    caller = connect(site)
    assert ping(caller) == b"HTTP/1.1 200 OK"
    caller.sendall(b"GET /ping HTT")
    assert not is_closed(caller, within_s=0.25)
    sweep(site, connections)
    assert is_closed(caller)
    caller.close()


def test_connections_that_end_by_themselves_leave_no_trace(few: Site) -> None:
    for _ in range(3):
        connect(few).close()
    assert httpx.get(f"{few.url}/ping", headers={"connection": "close"}).status_code == 200
    for _ in range(1000):
        if not few.connections._waiting:  # type: ignore[union-attr]
            return
        time.sleep(0.005)
    raise AssertionError("a connection that is gone still counts")
