"""Blocks as objects in S3: s3://bucket/prefix/<namespace>/<key hex>, shared by every instance of the same model.

What others wrote since the start is only known by asking, so `find` says "may be". The cap counts what was there at the
start and own writes. Knows one bucket. Knows nothing of what blocks mean.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any, Unpack

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from kvreuse.errors import ConfigError
from kvreuse.kv.tiers.base import LOADS_AT_ONCE, Exchanges, TierOptions
from kvreuse.kv.tiers.booked import BookedTier, Entry
from kvreuse.kv.tiers.entry import MAX_HEADER_BYTES, Block, header_of, read_header, view_of
from kvreuse.types import Tier

__all__ = ["S3Tier", "fetch_text"]

_NAME = re.compile("[0-9a-f]{32}")


class S3Tier(BookedTier):
    """Credentials, region and endpoint are those that boto3 finds. timeout_s: of a connect and of a whole request."""

    tier = Tier.REMOTE
    faults = (OSError, BotoCoreError, ClientError, HTTPError)
    is_shared = True

    def __init__(self, bucket: str, *, prefix: str, timeout_s: float, **options: Unpack[TierOptions]) -> None:
        super().__init__(**options)
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/{self._namespace.hex()}/".lstrip("/")
        config = ClientConfig(
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=LOADS_AT_ONCE,
            # Entries bring their own checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client: Any = boto3.client("s3", config=config)
        self._exchanges = Exchanges(timeout_s)
        self._map = self._exchanges.map
        self.open()

    def purge(self, tenant: str | None) -> int:
        """Also of what other instances wrote."""
        # Threads of its own: those that load may wait for this to end.
        with ThreadPoolExecutor(LOADS_AT_ONCE) as pool, self._changing:
            keys = set(self._keys_of(tenant))
            with self._noting_faults():
                listed = list(self._listed())
                owners = [None] * len(listed) if tenant is None else pool.map(self._owner, listed)
                keys |= {key for key, owner in zip(listed, owners, strict=True) if owner == tenant}
            self._drop(list(keys), run=pool.map)
            return len(keys)

    def close(self) -> None:
        self._exchanges.close()
        self._client.close()

    def _listed(self) -> dict[bytes, Entry]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        objects = sorted((item for page in pages for item in page.get("Contents", ())), key=lambda o: o["LastModified"])
        named = [(item["Key"].removeprefix(self._prefix), item["Size"]) for item in objects]
        return {bytes.fromhex(name): Entry(size, None) for name, size in named if _NAME.fullmatch(name)}

    def _write(self, block: Block) -> None:
        if self._ask("head_object", block.key) is not None:
            return  # another instance was quicker
        value = b"".join((header_of(block, namespace=self._namespace), view_of(block.payload)))
        self._ask("put_object", block.key, Body=value)

    def _opened(self, key: bytes) -> BytesIO | None:
        value = self._ask("get_object", key)
        return None if value is None else BytesIO(value)

    def _delete(self, key: bytes) -> None:
        self._ask("delete_object", key)

    def _owner(self, key: bytes) -> str | None:
        """Whose an object is; None when it is gone or cannot be asked."""
        known = self._entries.get(key)
        if known is not None and known.tenant is not None:
            return known.tenant
        with self._noting_faults():
            head = self._ask("get_object", key, Range=f"bytes=0-{MAX_HEADER_BYTES - 1}")
            if head is not None:
                return read_header(BytesIO(head), namespace=self._namespace, key=key).tenant
        return None

    def _ask(self, operation: str, key: bytes, **more: Any) -> bytes | None:
        """The body of the answer to one request, as a whole within the timeout; None when there is no such object."""

        def call() -> bytes:
            answer = getattr(self._client, operation)(Bucket=self._bucket, Key=self._prefix + key.hex(), **more)
            return answer["Body"].read() if "Body" in answer else b""

        try:
            return self._exchanges.run(call)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                return None
            raise


def fetch_text(url: str) -> str:
    """The UTF-8 text of `s3://bucket/key`. Raises ConfigError in one sentence."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    try:
        body: bytes = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        return body.decode("utf-8")
    except (BotoCoreError, ClientError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {url}: {str(error).splitlines()[0]}") from error
