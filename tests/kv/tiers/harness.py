"""Blocks, and real storages to keep them in: a folder, a redis-server of our own, an S3 of moto's."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvreuse.kv.tiers.base import StorageTier
from kvreuse.kv.tiers.entry import Block
from kvreuse.kv.tiers.stack import TierStack

PAYLOAD_BYTES = 1000
NAMESPACE, OTHER_NAMESPACE = "ab" * 16, "cd" * 16


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_block(number: int, *, tenant: str = "", num_bytes: int = PAYLOAD_BYTES, encoding: str = "raw") -> Block:
    """Always the same for the same number."""
    content = random.Random(number)
    return Block(
        key=content.randbytes(16),
        tenant=tenant,
        token_bytes=content.randbytes(32),
        payload=torch.frombuffer(bytearray(content.randbytes(num_bytes)), dtype=torch.uint8),
        encoding=encoding,
    )


def load(tier: StorageTier, block: Block) -> Block | None:
    return next(iter(tier.load_run([block.key], [block.token_bytes])), None)


def is_same(loaded: Block | None, block: Block) -> bool:
    return (
        loaded is not None
        and (loaded.key, loaded.tenant, loaded.token_bytes, loaded.encoding)
        == (block.key, block.tenant, block.token_bytes, block.encoding)
        and torch.equal(loaded.payload, block.payload)
    )


def files_of(folder: Path) -> list[Path]:
    """Of entries, whole or not."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def used_bytes(folder: Path) -> int:
    """What the files take on the disk, in whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files_of(folder))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server process without persistence. `options` are command-line options."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        quiet = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--loglevel", "warning"]
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), *quiet, *self._options], stdout=subprocess.DEVNULL
        )
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("redis-server does not listen")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    server = RedisServer(*options)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def silent_server() -> Iterator[str]:
    """A URL whose server takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def wait_until_stored(stack: TierStack) -> None:
    """Until all that was offered is stored, or given up."""
    deadline_s = time.monotonic() + 20
    while stack._queued_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def put_all(tier: StorageTier, blocks: Sequence[Block]) -> None:
    for block in blocks:
        assert tier.put(block)
