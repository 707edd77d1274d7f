"""The process publishes while it serves, and what is left when it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from server.test_lifecycle import Served, port, served

__all__ = ["port", "served"]

WITH_EMF = """
    from dataclasses import replace
    make = lifecycle.make_publisher
    lifecycle.make_publisher = lambda config, *rest: make(replace(config, emf=True, endpoint_name="shop"), *rest)
"""


@pytest.fixture
def one(served: list[Served], port: int) -> Iterator[Served]:
    served.append(Served(WITH_EMF, port))
    served[0].wait_for_ping(200)
    yield served[0]


def test_sigterm_publishes_the_last_window_after_the_last_answer(one: Served) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{one.url}/invocations", json=body).status_code == 200
    one.process.terminate()
    stdout, stderr = one.process.communicate(timeout=20)
    request, window = (json.loads(line) for line in stdout.splitlines())
    assert (one.process.returncode, stderr) == (0, "")
    assert request["event"] == "request"
    assert window["EndpointName"] == "shop"
    assert (window["KV_CACHE_MISSES_COLD"], len(window["TTFT"])) == ([1], 1)
