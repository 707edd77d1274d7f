"""The routes: what the hosting contract, OpenAI clients and scrapers ask for.

Knows HTTP. The boundary where every error becomes a status and a body, once. Knows nothing of schemas or tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvreuse.api.facts import error_object
from kvreuse.api.openai_view import model_list
from kvreuse.errors import InternalError, KVReuseError, RequestError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE, Answer
from kvreuse.server.context import RequestContext
from kvreuse.server.flights import Flights
from kvreuse.server.host import Host
from kvreuse.server.replies import error_response, log_fault, reply, user_reply
from kvreuse.server.service import Schema, new_request_id
from kvreuse.server.status import PAGE_HEADERS, StatusPage
from kvreuse.telemetry.prometheus import Prometheus

__all__ = ["ROUTES", "create_app"]

# A body longer than this is read and tokenized on a thread, so that /ping answers meanwhile.
_INLINE_BYTES = 16 * 1024
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")

T = TypeVar("T")
Handle = Callable[[Request, str], Awaitable[Response]]

ROUTES = (
    ("GET", "/ping"),
    ("POST", "/invocations"),
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/status.json"),
    ("GET", "/execution-parameters"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/purge"),
)


def create_app(host: Host) -> Starlette:
    """The ASGI app over `host`, which may still be loading."""
    routes = _Routes(host)
    handles: Mapping[str, Handle] = {
        "/ping": routes.ping,
        "/invocations": routes.invocations,
        "/metrics": routes.metrics,
        "/status": routes.status,
        "/status.json": routes.status_json,
        "/execution-parameters": routes.execution_parameters,
        "/v1/chat/completions": routes.chat,
        "/v1/completions": routes.completions,
        "/v1/models": routes.models,
        "/purge": routes.purge,
    }
    bound = [Route(path, routes.bounded(path, handles[path]), methods=[method]) for method, path in ROUTES]
    return Starlette(routes=bound, exception_handlers={HTTPException: routes.no_route})


class _Routes:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._flights = Flights()
        self._prometheus = Prometheus(host.stats, host.gauges)
        self._status = StatusPage(host)
        # As many threads as may run at once: a user's hook holds its thread until it has answered.
        self._threads = ThreadPoolExecutor(max_workers=host.max_concurrency, thread_name_prefix="kvreuse-hook")

    def bounded(self, path: str, handle: Handle) -> Callable[[Request], Awaitable[Response]]:
        """`handle`, with every error turned into a response in the manner of the route, and counted."""

        async def endpoint(request: Request) -> Response:
            request_id = new_request_id()
            try:
                response = await handle(request, request_id)
            except ClientDisconnect:
                response = Response(status_code=499)
            except KVReuseError as error:
                response = _said(error, path, request_id)
            except Exception as error:
                log_fault(error)
                response = _said(InternalError("internal error"), path, request_id)
            self._host.stats.record_response(route=path, status=response.status_code)
            return response

        return endpoint

    async def no_route(self, request: Request, error: Exception) -> Response:
        """404 and 405, which no endpoint sees."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        known = ", ".join(f"{method} {path}" for method, path in ROUTES)
        fault = RequestError(f"no such route; there are: {known}", status=status)
        self._host.stats.record_response(route="other", status=status)
        return _said(fault, request.url.path, new_request_id())

    async def ping(self, request: Request, request_id: str) -> Response:
        return Response(status_code=200 if self._host.is_able else 503)

    async def metrics(self, request: Request, request_id: str) -> Response:
        return Response(self._prometheus.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request, request_id: str) -> Response:
        return HTMLResponse(self._status.page(), headers=PAGE_HEADERS)

    async def status_json(self, request: Request, request_id: str) -> Response:
        return Response(await asyncio.to_thread(self._status.numbers), headers=PAGE_HEADERS, media_type=JSON_TYPE)

    async def execution_parameters(self, request: Request, request_id: str) -> Response:
        limits = {
            "MaxConcurrentTransforms": self._host.max_concurrency,
            "BatchStrategy": "SINGLE_RECORD",
            "MaxPayloadInMB": self._host.max_body_bytes // 2**20,
        }
        return JSONResponse(limits)

    async def models(self, request: Request, request_id: str) -> Response:
        engine = self._host.service.engine
        return JSONResponse(model_list(engine.model_name, self._host.loaded_at))

    async def chat(self, request: Request, request_id: str) -> Response:
        return await self._openai(request, request_id, Schema.CHAT)

    async def completions(self, request: Request, request_id: str) -> Response:
        return await self._openai(request, request_id, Schema.COMPLETION)

    async def _openai(self, request: Request, request_id: str, schema: Schema) -> Response:
        service = self._host.service
        body = await self._read(request)
        if _media_type(request) != JSON_TYPE:
            raise RequestError(f"the content type must be {JSON_TYPE}", param="Content-Type", status=415)

        def answer() -> Answer:
            return service.answer(
                body,
                schema=schema,
                request_id=request_id,
                wants_stream=STREAM_TYPE in request.headers.get("accept", ""),
                headers=request.headers,
            )

        result = await self._do(answer, is_quick=_is_quick(body))
        return await reply(result, request.receive, flights=self._flights, headers={})

    async def purge(self, request: Request, request_id: str) -> Response:
        """SageMaker forwards no request here, and nobody else on the network may."""
        if request.client is None or request.client.host not in _LOOPBACK:
            raise RequestError("this route answers to the machine itself only", status=403)
        return JSONResponse({"purged_blocks": self._host.service.purge(request.headers)})

    async def invocations(self, request: Request, request_id: str) -> Response:
        toolkit = self._host.toolkit
        body = await self._read(request)
        context = RequestContext(request.headers, request_id=request_id, model_dir=toolkit.model_dir)
        result = await self._do(lambda: toolkit.run(body, context), is_quick=toolkit.is_own and _is_quick(body))
        if isinstance(result, Answer):
            return await reply(result, request.receive, flights=self._flights, headers=context.response_headers)
        return user_reply(result, context)

    async def _do(self, work: Callable[[], T], *, is_quick: bool) -> T:
        if is_quick:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _read(self, request: Request) -> bytes:
        """The whole body. 413 before it is read where its length is declared, 408 when it does not come."""
        limit = self._host.max_body_bytes
        declared = request.headers.get("content-length", "")
        num_bytes, parts = int(declared) if declared.isdigit() else 0, []
        too_large = RequestError(f"the body is larger than {limit} bytes", status=413)
        if num_bytes > limit:
            raise too_large
        num_bytes = 0
        try:
            async with asyncio.timeout(self._host.read_timeout_s):
                async for part in request.stream():
                    num_bytes += len(part)
                    if num_bytes > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise RequestError("the body did not arrive in time", status=408) from None
        return b"".join(parts)


def _said(error: KVReuseError, path: str, request_id: str) -> Response:
    body = error_object(error, request_id, is_openai=path.startswith("/v1/"))
    return error_response(error, body, request_id=request_id)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", JSON_TYPE).split(";")[0].strip().lower()


def _is_quick(body: bytes) -> bool:
    """A long body takes a while to tokenize, a grammar to compile."""
    return len(body) <= _INLINE_BYTES and b'"response_format"' not in body
