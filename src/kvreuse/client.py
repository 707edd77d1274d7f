"""A caller's side of reuse: bodies whose shared bytes come first, requests that meet their prefix, facts read back.

Knows the runtime API of SageMaker and the order of a body's fields. Knows nothing of tokens or of the server's inside.

    PrefixClient("my-endpoint").invoke({"inputs": text, "parameters": {...}})
    runtime.invoke_endpoint(**prefix_aware(EndpointName=..., Body=...))     # around a call that exists already
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

from kvreuse.errors import RequestError
from kvreuse.types import CacheFacts, MissReason, Tier

__all__ = ["Answer", "PrefixClient", "Sessions", "canonical_body", "compose", "event_facts", "prefix_aware",
           "read_facts"]  # fmt: skip

# What stands before everything else: the fields that become the prompt, in the order in which templates print them.
_PROMPT_FIELDS = ("template", "tools", "messages", "inputs", "prompt", "variables")
_JSON = "application/json"
_NEW_SESSION = "NEW_SESSION"
_MIN_PREFIX_LENGTH = 1024  # bytes, the smallest PrefixLength that an endpoint can have
_RETRIED_CODES = {"ServiceUnavailable", "ServiceUnavailableException", "ThrottlingException", "ModelNotReadyException",
                  "InternalFailure", "InternalDependencyException"}  # fmt: skip
_RETRIED_STATUS = {429, 502, 503}
_RENEW_BEFORE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer: `body` decoded from JSON, what the cache did for it (None: another container), boto3's response."""

    body: Any
    facts: CacheFacts | None
    response: Mapping[str, Any]


def compose(template: str, *, tenant: str = "", variables: Mapping[str, object] | None = None) -> str:
    """One prompt whose shared text comes first: the template, then the tenant's text, then `name: value` lines."""
    own = "\n".join(f"{name}: {value}" for name, value in (variables or {}).items())
    return "\n\n".join(part for part in (template, tenant, own) if part)


def canonical_body(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON with the prompt in front and everything else, sorted by name, behind it.

    What the prompt says is never reordered: a tool list is written as it was given.
    """
    prompt = {name: _in_order(body[name]) for name in _PROMPT_FIELDS if name in body}
    rest = {name: body[name] for name in sorted(body) if name not in prompt}
    return json.dumps(prompt | rest, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _in_order(value: Any) -> Any:
    """Messages with their role first: templates read fields by name, so this changes bytes and not the prompt."""
    if not isinstance(value, list):
        return value
    return [{"role": item["role"], **item} if isinstance(item, Mapping) and "role" in item else item for item in value]


def prefix_aware(*, prefix_id: str | None = None, **request: Any) -> dict[str, Any]:
    """The arguments of an `invoke_endpoint` call, made ready: canonical Body, PrefixAwareId, InferenceId.

    A body that is no JSON object is left as it is. prefix_id: names the application or the template, at most 64
    characters; without it the first 1,024 bytes do, which never splits what the endpoint would keep together.
    Raises RequestError for a prefix_id that the API does not take.
    """
    body = request.get("Body", b"")
    try:
        fields = body if isinstance(body, Mapping) else json.loads(body)
    except ValueError:
        fields = None
    if isinstance(fields, Mapping):
        request["Body"] = body = canonical_body(fields)
        request.setdefault("ContentType", _JSON)
    if prefix_id is not None and not (0 < len(prefix_id) <= 64 and prefix_id.isprintable() and prefix_id[0] != " "):
        raise RequestError("prefix_id must be 1 to 64 printable characters, not beginning with a space",
                           param="prefix_id")  # fmt: skip
    data = body.encode() if isinstance(body, str) else bytes(body)
    request.setdefault("PrefixAwareId", prefix_id or _digest(data[:_MIN_PREFIX_LENGTH]).hex())
    request.setdefault("InferenceId", uuid.uuid4().hex)
    return request


def read_facts(attributes: str | Mapping[str, Any] | None) -> CacheFacts | None:
    """CacheFacts from the CustomAttributes of an answer or from its `kv_cache` object; None when they are not there."""
    if isinstance(attributes, str):
        attributes = dict(pair.split("=", 1) for pair in attributes.split("; ") if "=" in pair)
    if not attributes or "cached_tokens" not in attributes:
        return None
    reason, diverged_at = attributes.get("miss_reason"), attributes.get("diverged_at")
    times = {name: float(attributes.get(name, 0.0)) for name in ("lookup_ms", "queue_ms", "ttft_ms")}
    return CacheFacts(
        prompt_tokens=int(attributes["prompt_tokens"]),
        cached_tokens=int(attributes["cached_tokens"]),
        tier=Tier(attributes.get("tier", "none")),
        miss_reason=MissReason(reason) if reason else None,
        diverged_at=None if diverged_at is None else int(diverged_at),
        **times,
    )


class Sessions:
    """A fixed number of places, each with a session of the endpoint, and which prefix belongs to which place.

    Rendezvous hashing over the places: renewing a session moves no prefix of another place. Thread-safe.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.time) -> None:
        self._places = range(num_places)
        self._clock = clock
        # place -> (session id, expires). A dict does one thing at a time, and nothing here takes two.
        self._known: dict[int, tuple[str, float]] = {}

    def place(self, prefix: str) -> int | None:
        """The place of a prefix, always the same; None where there are no places."""
        return max(self._places, key=lambda place: _digest(f"{place}/{prefix}".encode()), default=None)

    def get(self, place: int) -> str | None:
        """Its session while it lasts."""
        session_id, expires_s = self._known.get(place, ("", 0.0))
        return session_id if self._clock() < expires_s - _RENEW_BEFORE_S else None

    def put(self, place: int, header: str) -> None:
        """Remember what NewSessionId says: `id; Expires=2026-01-01T00:00:00Z`."""
        session_id, _, expires = header.partition("; Expires=")
        moment = datetime.fromisoformat(expires) if expires else datetime.max.replace(tzinfo=UTC)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        self._known[place] = (session_id, moment.timestamp())

    def drop(self, place: int) -> None:
        """The endpoint does not know it any more."""
        self._known.pop(place, None)


class PrefixClient:
    """Calls one endpoint. Thread-safe; the async methods run the sync ones on threads, as boto3 has no others.

    num_sessions: above 0 where the endpoint is not configured with PREFIX_AWARE: prefixes then stick to so many
    sessions (twice the number of instances is a good choice). client: a boto3 `sagemaker-runtime` client to use.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        client: Any = None,
        prefix_id: str | None = None,
        num_sessions: int = 0,
        max_attempts: int = 4,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        # Retries are ours: they must carry the same InferenceId and know what is worth repeating.
        config = Config(retries={"total_max_attempts": 1})
        self._runtime = client or boto3.client("sagemaker-runtime", config=config)
        self._endpoint = endpoint
        self._prefix_id = prefix_id
        self._sessions = Sessions(num_sessions)
        self._max_attempts = max_attempts
        self._sleep = sleep

    def invoke(self, body: Mapping[str, Any], *, prefix_id: str | None = None, **named: Any) -> Answer:
        """Send and wait. `named` are further arguments of invoke_endpoint. Raises what boto3 raises."""
        response = self._call("invoke_endpoint", self._request(body, prefix_id, named))
        raw = response["Body"].read()
        is_json = str(response.get("ContentType", "")).startswith(_JSON)
        facts = read_facts(response.get("CustomAttributes"))
        return Answer(body=json.loads(raw) if is_json else raw, facts=facts, response=response)

    def stream(
        self, body: Mapping[str, Any], *, prefix_id: str | None = None, **named: Any
    ) -> Iterator[dict[str, Any]]:
        """The events of the answer as they come, decoded; `event_facts` of the last one says what the cache did.

        Only what fails before the first event is sent again.
        """
        request = self._request({**body, "stream": True}, prefix_id, named)
        response = self._call("invoke_endpoint_with_response_stream", request)
        pending = b""
        for part in response["Body"]:
            *lines, pending = (pending + part["PayloadPart"]["Bytes"]).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield json.loads(data)

    async def ainvoke(self, body: Mapping[str, Any], *, prefix_id: str | None = None, **named: Any) -> Answer:
        """`invoke` for an event loop."""
        return await asyncio.to_thread(self.invoke, body, prefix_id=prefix_id, **named)

    async def astream(
        self, body: Mapping[str, Any], *, prefix_id: str | None = None, **named: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` for an event loop."""
        events = self.stream(body, prefix_id=prefix_id, **named)
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            yield event

    def _request(self, body: Mapping[str, Any], prefix_id: str | None, named: Mapping[str, Any]) -> dict[str, Any]:
        return prefix_aware(
            prefix_id=prefix_id or self._prefix_id, **{**named, "EndpointName": self._endpoint, "Body": body}
        )

    def _call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        place, attempt = self._sessions.place(request["PrefixAwareId"]), 0
        while True:
            attempt += 1
            try:
                return self._send(operation, request, place)
            except (ClientError, BotoCoreError) as error:
                is_stale = place is not None and _is_session_lost(error)
                if place is not None and is_stale:
                    self._sessions.drop(place)
                if attempt >= self._max_attempts or not (is_stale or _is_worth_repeating(error)):
                    raise
                if not is_stale:
                    self._sleep(random.uniform(0.5, 1.0) * 0.25 * 2**attempt)

    def _send(self, operation: str, request: dict[str, Any], place: int | None) -> dict[str, Any]:
        if place is not None:
            session_id, can_create = self._sessions.get(place), operation == "invoke_endpoint"
            if session_id is None and not can_create:
                self._open_session(request, place)
                session_id = self._sessions.get(place)
            # An opening that named no session: the endpoint has none, and the stream goes without.
            if session_id or can_create:
                request = {**request, "SessionId": session_id or _NEW_SESSION}
        response: dict[str, Any] = getattr(self._runtime, operation)(**request)
        if place is not None and "NewSessionId" in response:
            self._sessions.put(place, response["NewSessionId"])
        return response

    def _open_session(self, request: Mapping[str, Any], place: int) -> None:
        """A call that asks for nothing else."""
        opener = {**request, "Body": b'{"requestType":"NEW_SESSION"}', "InferenceId": uuid.uuid4().hex}
        opener.pop("Accept", None)
        self._send("invoke_endpoint", opener, place)["Body"].read()


def event_facts(event: Mapping[str, Any]) -> CacheFacts | None:
    """The facts that an event of a stream carries: the last one does, in either schema."""
    return read_facts(event.get("kv_cache") or (event.get("details") or {}).get("kv_cache"))


def _is_worth_repeating(error: Exception) -> bool:
    if not isinstance(error, ClientError):
        return isinstance(error, BotoConnectionError)
    code, status = error.response["Error"]["Code"], error.response.get("OriginalStatusCode")
    return code in _RETRIED_CODES or status in _RETRIED_STATUS


def _is_session_lost(error: Exception) -> bool:
    if not isinstance(error, ClientError):
        return False
    said = f"{error.response.get('OriginalMessage', '')}{error.response['Error'].get('Message', '')}".lower()
    status = error.response.get("OriginalStatusCode", 400)
    return "session" in said and 400 <= status < 500


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
