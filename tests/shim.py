"""The hosting runtime in front of a container, as the real `sagemaker-runtime` client of boto3 sees it.

Knows the runtime's paths, its headers, its errors and the framing of its event streams. Knows nothing of what the
bodies hold. `runtime(url)` puts one in front of the container at `url`; `runtime_client(url)` is the client for it.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from binascii import crc32
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

__all__ = ["ENDPOINT", "VARIANT", "runtime", "runtime_client"]

ENDPOINT, VARIANT = "kvreuse", "AllTraffic"
_PATH = re.compile(r"/endpoints/[\w-]+/(invocations|invocations-response-stream)")
_PREFIX = "x-amzn-sagemaker-"  # these travel as they are, both ways
_PASSED = ("content-type", "accept")
_STRING = 7  # type of a header value in an event
_MAX_MESSAGE = 2048  # characters of a container's error that a caller gets to see


def event(kind: str, name: str, content_type: str, payload: bytes) -> bytes:
    """One frame: [length, length of headers, CRC] [headers] [payload] [CRC]. kind: event or exception."""
    headers = b""
    for key, value in ((":message-type", kind), (f":{kind}-type", name), (":content-type", content_type)):
        headers += struct.pack("!B", len(key)) + key.encode()
        headers += struct.pack("!BH", _STRING, len(value)) + value.encode()
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack("!I", crc32(prelude)) + headers + payload
    return message + struct.pack("!I", crc32(message))


class _Runtime(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    container = ""  # host:port, set per runtime

    def log_message(self, *args: object) -> None:
        """Tests have nothing to log."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = _PATH.fullmatch(self.path)
        if match is None:
            self._error(400, "ValidationError", {"Message": f"Endpoint of {self.path} not found."})
            return
        is_stream = match[1] != "invocations"
        if is_stream and self.headers.get(f"{_PREFIX}Session-Id") == "NEW_SESSION":
            self._error(400, "ValidationError", {"Message": "A stream cannot create a session."})
            return
        with closing(HTTPConnection(self.container, timeout=60)) as connection:
            connection.request("POST", "/invocations", body, self._forwarded())
            with connection.getresponse() as response:
                answer = self._model_error if response.status >= 300 else self._stream if is_stream else self._body
                answer(response)

    def _forwarded(self) -> dict[str, str]:
        named = {name.lower(): value for name, value in self.headers.items()}
        return {name: value for name, value in named.items() if name in _PASSED or name.startswith(_PREFIX)}

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _answered(self, response: HTTPResponse) -> dict[str, str]:
        headers = {name: value for name, value in response.getheaders() if name.lower().startswith(_PREFIX)}
        return headers | {"x-Amzn-Invoked-Production-Variant": VARIANT}

    def _body(self, response: HTTPResponse) -> None:
        body = response.read()
        content_type = response.getheader("Content-Type", "")
        self._start(200, {**self._answered(response), "Content-Type": content_type, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _model_error(self, response: HTTPResponse) -> None:
        said = response.read().decode("utf-8", "replace")[:_MAX_MESSAGE]
        message = f'Received client error ({response.status}) from {VARIANT} with message "{said}".'
        self._error(
            424, "ModelError", {"Message": message, "OriginalStatusCode": response.status, "OriginalMessage": said}
        )

    def _error(self, status: int, kind: str, values: Mapping[str, object]) -> None:
        body = json.dumps(values).encode()
        self._start(
            status,
            {"x-amzn-ErrorType": kind, "Content-Type": "application/json", "Content-Length": str(len(body))},
        )
        self.wfile.write(body)

    def _stream(self, response: HTTPResponse) -> None:
        """Each piece as it comes. A container that breaks off is an exception in the stream."""
        content_type = response.getheader("Content-Type", "")
        framing = {"Content-Type": "application/vnd.amazon.eventstream", "Transfer-Encoding": "chunked"}
        self._start(200, {**self._answered(response), f"{_PREFIX}Content-Type": content_type, **framing})
        try:
            while piece := response.read1(65536):
                self._chunk(event("event", "PayloadPart", "application/octet-stream", piece))
        except (HTTPException, ConnectionError):
            fault = {"Message": "The container closed the stream early.", "ErrorCode": "StreamBroken"}
            self._chunk(event("exception", "ModelStreamError", "application/json", json.dumps(fault).encode()))
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *args: object) -> None:
        """A caller who left early is part of some tests."""


@contextmanager
def runtime(container_url: str) -> Iterator[str]:
    """The URL of a runtime whose every endpoint is the one container."""
    handler = type("Runtime", (_Runtime,), {"container": urlsplit(container_url).netloc})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def runtime_client(runtime_url: str) -> Any:
    """The real client: one attempt, no credentials but made-up ones."""
    names = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "eu-west-1"}
    config = Config(retries={"max_attempts": 0}, read_timeout=60)
    return boto3.client("sagemaker-runtime", endpoint_url=runtime_url, config=config, **names)
