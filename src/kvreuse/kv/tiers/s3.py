"""Blocks as objects in S3: s3://bucket/prefix/<namespace>/<key hex>, shared by every instance of the same model.

What others wrote since the start is only known by asking, so `find` says "may be". The cap counts what was there at the
start and own writes. Knows one bucket. Knows nothing of what blocks mean.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from kvreuse.errors import ConfigError
from kvreuse.kv.tiers.base import FAULT
from kvreuse.kv.tiers.block import Block
from kvreuse.kv.tiers.booked import BookedTier, Found
from kvreuse.kv.tiers.deadline import Deadline
from kvreuse.kv.tiers.entry import FIXED_BYTES, MAX_HEADER_BYTES, Header, block_of, entry_size, header_bytes, view_of
from kvreuse.types import Tier

__all__ = ["S3Tier", "fetch_text"]

_GETS_AT_ONCE = 16
T = TypeVar("T")
_NAME = re.compile("[0-9a-f]{32}")


class S3Tier(BookedTier):
    """Credentials, region and endpoint are those that boto3 finds. timeout_s: of a connect and of a read."""

    tier = Tier.REMOTE
    faults = (OSError, BotoCoreError, ClientError, HTTPError)

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str,
        namespace: str,
        max_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_bytes=max_bytes, clock=clock)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/{namespace}/".lstrip("/")
        self._namespace = bytes.fromhex(namespace)
        self._client: Any = boto3.client(
            "s3",
            config=ClientConfig(
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                retries={"total_max_attempts": 1},
                max_pool_connections=_GETS_AT_ONCE,
                # Entries bring their own checksums.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        self._deadline = Deadline(timeout_s, num_threads=_GETS_AT_ONCE)
        self._pool = ThreadPoolExecutor(_GETS_AT_ONCE, thread_name_prefix="kvreuse-s3")
        self.open()

    def find(self, keys: Sequence[bytes]) -> int:
        return len(keys) if self.is_healthy else 0

    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        """One alone, then many at once: most prompts that nobody computed yet cost one request."""
        run: list[Block] = []
        while len(run) < len(keys):
            part = slice(len(run), len(run) + (_GETS_AT_ONCE if run else 1))
            for block in list(self._pool.map(self._load, keys[part], token_bytes[part])):
                if block is None:
                    return run
                run.append(block)
        return run

    def discard(self, key: bytes) -> None:
        with self._lock:
            is_known = key in self._entries
        if is_known:
            super().discard(key)
        else:
            self._try(lambda: self._delete(key))

    def purge(self, tenant: str | None) -> int:
        """Also of what other instances wrote."""
        num_dropped = super().purge(tenant)
        listed = self._try(lambda: [found.key for found in self._open()])
        keys = [] if listed is FAULT else listed
        if tenant is not None:
            keys = [key for key, owner in zip(keys, self._pool.map(self._owner, keys), strict=True) if owner == tenant]
        list(self._pool.map(self.discard, keys))
        return num_dropped + len(keys)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._deadline.close()
        self._client.close()

    def _open(self) -> list[Found]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        listed = [item for page in pages for item in page.get("Contents", ())]
        listed.sort(key=lambda item: item["LastModified"])
        named = [(item["Key"].removeprefix(self._prefix), item["Size"]) for item in listed]
        return [Found(bytes.fromhex(name), size, None) for name, size in named if _NAME.fullmatch(name)]

    def _size(self, block: Block) -> int:
        return entry_size(block)

    def _at(self, key: bytes) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key.hex()}

    def _write(self, block: Block) -> None:
        with suppress(KeyError):
            self._ask(lambda: self._client.head_object(**self._at(block.key)))
            return  # another instance was quicker
        value = b"".join((Header.of(block, namespace=self._namespace).encode(), view_of(block.payload)))
        self._ask(lambda: self._client.put_object(**self._at(block.key), Body=value))

    def _load(self, key: bytes, token_bytes: bytes) -> Block | None:
        with self._lock:
            is_known = key in self._entries
        if is_known:
            return super()._load(key, token_bytes)
        block = self._try(lambda: self._read_unknown(key, token_bytes), key=key) if self.is_healthy else None
        self._count("hits" if isinstance(block, Block) else "misses")
        return block if isinstance(block, Block) else None

    def _read_unknown(self, key: bytes, token_bytes: bytes) -> Block | None:
        try:
            return self._read(key, token_bytes)
        except KeyError:
            return None

    def _read(self, key: bytes, token_bytes: bytes) -> Block:
        value = self._ask(lambda: self._content(key))
        return block_of(value, namespace=self._namespace, key=key, token_bytes=token_bytes)

    def _owner(self, key: bytes) -> str | None:
        """Whose an object is; None when it is gone or cannot be asked."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.tenant is not None:
                return entry.tenant
        tenant = self._try(lambda: self._tenant(key))
        return None if tenant is FAULT else tenant

    def _tenant(self, key: bytes) -> str:
        part = f"bytes=0-{MAX_HEADER_BYTES - 1}"
        head = self._ask(lambda: self._content(key, Range=part))
        return Header.decode(head[: header_bytes(head[:FIXED_BYTES])]).tenant

    def _content(self, key: bytes, **more: str) -> bytes:
        content: bytes = self._client.get_object(**self._at(key), **more)["Body"].read()
        return content

    def _delete(self, key: bytes) -> None:
        self._ask(lambda: self._client.delete_object(**self._at(key)))

    def _ask(self, call: Callable[[], T]) -> T:
        """One request, as a whole within the timeout. Raises KeyError when there is no such object."""
        try:
            return self._deadline.run(call)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                raise KeyError("there is no such object") from None
            raise


def fetch_text(url: str) -> str:
    """The UTF-8 text of `s3://bucket/key`. Raises ConfigError in one sentence."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    try:
        body: bytes = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        return body.decode("utf-8")
    except (BotoCoreError, ClientError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {url}: {str(error).splitlines()[0]}") from error
