"""From what a call gives (an Answer, or a user hook's own value) to an HTTP response; from an error to a body.

Knows responses, streams and disconnects. Knows nothing of schemas, hooks or the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Hashable, Iterable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Send

from kvreuse.api.facts import CUSTOM_ATTRIBUTES, custom_attributes, error_object
from kvreuse.errors import InternalError, KVReuseError, OverloadedError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE, Answer
from kvreuse.server.toolkit import RequestContext

__all__ = ["Flights", "error_response", "fault_of", "log_fault", "reply", "user_reply"]

_REQUEST_ID = "X-Request-Id"
_SEND_MARGIN_S = 5.0
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def error_response(error: KVReuseError, *, request_id: str, is_openai: bool) -> Response:
    """Status, headers and body of `error`."""
    headers = {CUSTOM_ATTRIBUTES: custom_attributes(request_id, None), _REQUEST_ID: request_id}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    body = json.dumps(error_object(error, request_id, is_openai=is_openai))
    return Response(body, status_code=error.status, headers=headers, media_type=JSON_TYPE)


def fault_of(error: Exception) -> KVReuseError:
    """What a caller is told of `error`. What was not raised on purpose is logged and says nothing of itself."""
    if isinstance(error, KVReuseError):
        return error
    log_fault(error)
    return InternalError("internal error")


def log_fault(error: BaseException) -> None:
    """Where it happened and what kind it was. Not its message, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("internal error: %s\n%s", type(error).__name__, frames.rstrip())


async def reply(answer: Answer, receive: Receive, *, flights: Flights, headers: Mapping[str, str]) -> Response:
    """Wait for the body, or for the first event of a stream: until then an error is still a status.

    Raises KVReuseError, and ClientDisconnect when the caller left (what ran is aborted then).
    """
    if answer.call.is_stream:
        chunks = answer.stream()
        first = await _until_disconnect(anext(chunks), receive)
        named = {**headers, **answer.headers, _REQUEST_ID: answer.meta.request_id}
        return _EventStream(answer, first, chunks, headers=named)
    body, answer = await _until_disconnect(flights.wait(answer), receive)
    named = {**headers, **answer.headers, _REQUEST_ID: answer.meta.request_id}
    return Response(body, headers=named, media_type=JSON_TYPE)


def user_reply(result: object, context: RequestContext) -> Response:
    """What a user's hook gave: bytes, text, or an iterator of these, which is streamed from a thread."""
    if not isinstance(result, Iterable):
        raise InternalError("the handler gave neither bytes, nor text, nor an iterator of these")
    headers = {**context.response_headers, _REQUEST_ID: context.request_id}
    if isinstance(result, bytes | bytearray | str):
        body = result if isinstance(result, str) else bytes(result)
        return Response(body, status_code=context.status, headers=headers, media_type=context.content_type)
    return StreamingResponse(result, status_code=context.status, headers=headers, media_type=context.content_type)


async def _until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """The result of `work`, cancelled (with ClientDisconnect) when the caller leaves first. The body must be read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    watch.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done():
            raise ClientDisconnect from None
        raise
    finally:
        watch.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Flights:
    """Lets calls that are one (the platform sends a call again under its id) share one answer while it is computed.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        # key -> the answer under way, its task, how many wait for it
        self._flights: dict[Hashable, tuple[Answer, asyncio.Task[bytes], list[Answer]]] = {}

    async def wait(self, answer: Answer) -> tuple[bytes, Answer]:
        """The whole body, and the answer that gave it: this one, or one of the same key that was under way.

        What runs is aborted when the last of those who wait for it is cancelled. Raises KVReuseError.
        """
        key = answer.join_key
        if key is None:
            return await answer.wait(), answer
        if key not in self._flights:
            self._flights[key] = answer, asyncio.create_task(answer.wait()), []
        flight = first, task, waiting = self._flights[key]
        waiting.append(answer)
        try:
            return await asyncio.shield(task), first
        finally:
            waiting.remove(answer)
            if not waiting or task.done():
                task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]


class _EventStream(StreamingResponse):
    """Server-sent events. A fault in the middle is an error event and a connection cut short, never a normal end."""

    def __init__(
        self, answer: Answer, first: bytes, chunks: AsyncGenerator[bytes, None], *, headers: Mapping[str, str]
    ) -> None:
        super().__init__(_all(first, chunks), headers={**headers, "Cache-Control": "no-cache"}, media_type=STREAM_TYPE)
        self._answer = answer
        self._chunks = chunks

    async def stream_response(self, send: Send) -> None:
        try:
            # A caller that stops reading must not hold its place for ever.
            async with asyncio.timeout(self._answer.timeout_s + _SEND_MARGIN_S), aclosing(self._chunks):
                await super().stream_response(send)
        except TimeoutError:
            pass
        except Exception as error:
            # No last chunk follows, so the server cuts the connection.
            body = b"event: error\ndata: " + self._answer.error_body(fault_of(error)) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _all(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in chunks:
        yield chunk
