"""From what a call gives (an Answer, or a user hook's own value) to an HTTP response; from an error to a body.

Knows responses, streams and disconnects. Knows nothing of schemas, hooks or the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvreuse.api.facts import CUSTOM_ATTRIBUTES, custom_attributes
from kvreuse.errors import InternalError, KVReuseError, OverloadedError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE, Answer
from kvreuse.server.context import RequestContext
from kvreuse.server.flights import Flights

__all__ = ["REQUEST_ID", "EventStream", "error_response", "log_fault", "reply", "until_disconnect", "user_reply"]

REQUEST_ID = "X-Request-Id"
_SEND_MARGIN_S = 5.0
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def error_response(error: KVReuseError, body: object, *, request_id: str) -> Response:
    """Status and headers of `error`, with `body` as JSON."""
    headers = {CUSTOM_ATTRIBUTES: custom_attributes(request_id, None), REQUEST_ID: request_id}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(json.dumps(body), status_code=error.status, headers=headers, media_type=JSON_TYPE)


def log_fault(error: BaseException) -> None:
    """Where it happened and what kind it was. Not its message, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("internal error: %s\n%s", type(error).__name__, frames.rstrip())


async def reply(answer: Answer, receive: Receive, *, flights: Flights, headers: Mapping[str, str]) -> Response:
    """Wait for the body, or for the first event of a stream: until then an error is still a status.

    Raises KVReuseError, and ClientDisconnect when the caller left (what ran is aborted then).
    """
    request_id = answer.meta.request_id
    if answer.is_stream:
        chunks = answer.stream()
        try:
            first = await until_disconnect(anext(chunks), receive)
        except BaseException:
            await chunks.aclose()
            raise
        named = {CUSTOM_ATTRIBUTES: custom_attributes(request_id, None), REQUEST_ID: request_id}
        return EventStream(chunks, first, headers={**headers, **named}, answer=answer)
    body, answer = await until_disconnect(flights.wait(answer), receive)
    request_id = answer.meta.request_id
    named = {CUSTOM_ATTRIBUTES: custom_attributes(request_id, answer.facts), REQUEST_ID: request_id}
    return Response(body, headers={**headers, **named, **answer.headers}, media_type=JSON_TYPE)


def user_reply(result: object, context: RequestContext) -> Response:
    """What a user's hook gave: bytes, text, or an iterator of these, which is streamed from a thread."""
    headers = {**context.response_headers, REQUEST_ID: context.request_id}
    content_type = context.content_type or JSON_TYPE
    if isinstance(result, bytes | bytearray | str):
        body = result if isinstance(result, str) else bytes(result)
        return Response(body, status_code=context.status, headers=headers, media_type=content_type)
    if isinstance(result, Iterable):
        return StreamingResponse(result, status_code=context.status, headers=headers, media_type=content_type)
    raise InternalError("the handler gave neither bytes, nor text, nor an iterator of these")


async def until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """The result of `work`, cancelled (with ClientDisconnect) when the caller leaves first. The body must be read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A fault in the middle is an error event and a connection cut short, never a normal end."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], first: bytes, *, headers: Mapping[str, str], answer: Answer
    ) -> None:
        self._chunks = chunks
        self._first = first
        self._answer = answer
        super().__init__(None, headers={**headers, "Cache-Control": "no-cache"}, media_type=STREAM_TYPE)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            try:
                await until_disconnect(self._send(send), receive)
            except ClientDisconnect:
                return
            except KVReuseError as error:
                await self._send_error(error, send)
            except Exception as error:
                log_fault(error)
                await self._send_error(InternalError("internal error"), send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            # A caller that stops reading must not hold its place for ever.
            async with asyncio.timeout(self._answer.timeout_s + _SEND_MARGIN_S):
                await _send_body(self._first, send)
                async for chunk in self._chunks:
                    await _send_body(chunk, send)
        except TimeoutError:
            raise ClientDisconnect from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, error: KVReuseError, send: Send) -> None:
        """No last chunk follows, so the server cuts the connection."""
        await _send_body(b"event: error\ndata: " + self._answer.error_body(error) + b"\n\n", send)


async def _send_body(chunk: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
