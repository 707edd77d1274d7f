"""Asks a SageMaker endpoint through boto3's runtime client, as the HTTP client of measurements asks a server.

Knows what the runtime API answers. Knows nothing of workloads or figures.
"""

from __future__ import annotations

import time
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kvreuse.client import PrefixClient
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.load import Ask, BusyError, LoadError, Reply, body_of, raise_error_event, reply_of

__all__ = ["Endpoint"]

_UNAVAILABLE = 503


class Endpoint:
    """One endpoint. region, endpoint_url: where AWS's own configuration names neither. Nothing is sent twice.

    Raises ConfigError when no client can be made of these.
    """

    def __init__(
        self, name: str, *, max_connections: int, region: str | None = None, endpoint_url: str | None = None
    ) -> None:
        config = Config(
            retries={"total_max_attempts": 1},
            max_pool_connections=max_connections,
            read_timeout=600,
            tcp_keepalive=True,
        )
        try:
            runtime = boto3.client("sagemaker-runtime", region_name=region, endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"there is no way to the endpoint {name}: {error}") from error
        self._client = PrefixClient(name, client=runtime, max_attempts=1)

    def ask(self, ask: Ask) -> Reply:
        """Send and wait. Raises LoadError, BusyError for a 503 of the endpoint or of its container."""
        started_at = time.perf_counter()
        answer: Any = None
        ttft_ms = None
        try:
            if ask.is_stream:
                for answer in self._client.stream(body_of(ask)):
                    raise_error_event(answer)
                    ttft_ms = ttft_ms or (time.perf_counter() - started_at) * 1e3
            else:
                answer = self._client.invoke(body_of(ask)).body[0]
        except ClientError as error:
            raise (BusyError if _status(error) == _UNAVAILABLE else LoadError)(str(error)) from error
        except (BotoCoreError, ValueError, LookupError) as error:
            raise LoadError(str(error)) from error
        return reply_of(answer, ttft_ms=ttft_ms, total_ms=(time.perf_counter() - started_at) * 1e3)


def _status(error: ClientError) -> object:
    """The container's, where it is the container that refused."""
    said: Any = error.response
    return said.get("OriginalStatusCode") or said.get("ResponseMetadata", {}).get("HTTPStatusCode")
