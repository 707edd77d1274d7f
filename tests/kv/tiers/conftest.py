"""Servers that several tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kv.tiers.harness import Clock, RedisServer, redis_server


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()
