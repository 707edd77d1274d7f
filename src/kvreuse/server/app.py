"""The routes: what the hosting contract, OpenAI clients and scrapers ask for.

Knows HTTP. The boundary where every error becomes a status and a body, once. Knows nothing of schemas or tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvreuse.api.views import model_list
from kvreuse.config import Config
from kvreuse.errors import RequestError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE, Answer
from kvreuse.server.handler import Process
from kvreuse.server.replies import Flights, error_response, fault_of, reply, user_reply
from kvreuse.server.service import check_json, new_request_id
from kvreuse.server.status import PAGE_HEADERS, Status
from kvreuse.server.toolkit import RequestContext
from kvreuse.telemetry.page import render
from kvreuse.telemetry.prometheus import Prometheus

__all__ = ["ROUTES", "create_app"]

# A body longer than this is read and tokenized on a thread, so that /ping answers meanwhile.
_INLINE_BYTES = 16 * 1024
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")

T = TypeVar("T")


class _Routes:
    def __init__(self, process: Process, config: Config) -> None:
        self._process = process
        self._config = config
        self._flights = Flights()
        self._prometheus = Prometheus(process.stats, process.gauges)
        self._status = Status(process, config)
        # As many threads as may run at once: a user's hook holds its thread until it has answered.
        self._threads = ThreadPoolExecutor(max_workers=config.concurrency(), thread_name_prefix="kvreuse-hook")

    def bounded(self, path: str, handle: _Handle) -> Callable[[Request], Awaitable[Response]]:
        """`handle`, with every error turned into a response in the manner of the route, and counted."""

        async def endpoint(request: Request) -> Response:
            request_id = new_request_id()
            try:
                response = await handle(self, request, request_id)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = error_response(fault_of(error), request_id=request_id, is_openai=_is_openai(path))
            self._process.stats.record_response(route=path, status=response.status_code)
            return response

        return endpoint

    async def no_route(self, request: Request, error: Exception) -> Response:
        """404 and 405, which no endpoint sees."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        known = ", ".join(f"{method} {path}" for method, path in ROUTES)
        self._process.stats.record_response(route="other", status=status)
        fault = RequestError(f"no such route; there are: {known}", status=status)
        return error_response(fault, request_id=new_request_id(), is_openai=_is_openai(request.url.path))

    async def ping(self, request: Request, request_id: str) -> Response:
        return Response(status_code=200 if self._process.is_able else 503)

    async def metrics(self, request: Request, request_id: str) -> Response:
        return Response(self._prometheus.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request, request_id: str) -> Response:
        self._check_status_page()
        return HTMLResponse(render("status.html"), headers=PAGE_HEADERS)

    async def status_json(self, request: Request, request_id: str) -> Response:
        self._check_status_page()
        return Response(await asyncio.to_thread(self._status.numbers), headers=PAGE_HEADERS, media_type=JSON_TYPE)

    def _check_status_page(self) -> None:
        if not self._config.status_page:
            raise RequestError("the status page is switched off by option.status_page", status=404)

    async def execution_parameters(self, request: Request, request_id: str) -> Response:
        limits = {
            "MaxConcurrentTransforms": self._config.concurrency(),
            "BatchStrategy": "SINGLE_RECORD",
            "MaxPayloadInMB": self._config.max_body_bytes // 2**20,
        }
        return JSONResponse(limits)

    async def models(self, request: Request, request_id: str) -> Response:
        engine = self._process.able_service().engine
        return JSONResponse(model_list(engine.model_name, self._process.loaded_at))

    async def openai(self, request: Request, request_id: str) -> Response:
        service = self._process.able_service()
        body = await self._read(request)
        check_json(request.headers.get("content-type"))
        answer = partial(
            service.answer,
            body,
            schema="chat" if request.url.path.endswith("/chat/completions") else "completion",
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
        purge = self._process.able_service().purge
        return JSONResponse({"purged_blocks": await asyncio.to_thread(purge, request.headers)})

    async def invocations(self, request: Request, request_id: str) -> Response:
        toolkit = self._process.able_toolkit()
        body = await self._read(request)
        context = RequestContext(request.headers, request_id=request_id, model_dir=toolkit.model_dir)
        result = await self._do(partial(toolkit.run, body, context), is_quick=toolkit.is_own and _is_quick(body))
        if isinstance(result, Answer):
            return await reply(result, request.receive, flights=self._flights, headers=context.response_headers)
        return user_reply(result, context)

    async def _do(self, work: Callable[[], T], *, is_quick: bool) -> T:
        return work() if is_quick else await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _read(self, request: Request) -> bytes:
        """The whole body. 413 before it is read where its length is declared, 408 when it does not come."""
        limit = self._config.max_body_bytes
        too_large = RequestError(f"the body is larger than {limit} bytes", status=413)
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise RequestError("the body did not arrive in time", status=408) from None
        return bytes(body)


_Handle = Callable[[_Routes, Request, str], Awaitable[Response]]
_HANDLES: dict[tuple[str, str], _Handle] = {
    ("GET", "/ping"): _Routes.ping,
    ("POST", "/invocations"): _Routes.invocations,
    ("GET", "/metrics"): _Routes.metrics,
    ("GET", "/status"): _Routes.status,
    ("GET", "/status.json"): _Routes.status_json,
    ("GET", "/execution-parameters"): _Routes.execution_parameters,
    ("POST", "/v1/chat/completions"): _Routes.openai,
    ("POST", "/v1/completions"): _Routes.openai,
    ("GET", "/v1/models"): _Routes.models,
    ("POST", "/purge"): _Routes.purge,
}
ROUTES = tuple(_HANDLES)


def create_app(process: Process, config: Config) -> Starlette:
    """The ASGI app over `process`, which may still be loading."""
    routes = _Routes(process, config)
    bound = [Route(path, routes.bounded(path, handle), methods=[method]) for (method, path), handle in _HANDLES.items()]
    return Starlette(routes=bound, exception_handlers={HTTPException: routes.no_route})


def _is_openai(path: str) -> bool:
    return path.startswith("/v1/")


def _is_quick(body: bytes) -> bool:
    """A long body takes a while to tokenize, a grammar to compile."""
    return len(body) <= _INLINE_BYTES and b'"response_format"' not in body
