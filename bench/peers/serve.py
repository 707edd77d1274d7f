"""Serves a library that has no HTTP server of its own: POST /v1/completions as a stream, GET /health.

    python -m bench.peers.serve --peer openvino --model DIR --dtype float32 --threads 1 --port 8101

Run by the peer's own Python; the standard library is all this process needs. The peer computes in a second process, as
servers of this kind do: a step that holds Python's global lock must not keep a new request from being read.
Knows HTTP and processes. Knows nothing of any peer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import SimpleQueue
from typing import Any

from bench.peers.engines import ENGINES, Chunk, Engine, EngineSettings, Prompt

__all__ = ["Broker", "handler", "main"]


class Broker:
    """Hands prompts to the peer's process and its chunks to whoever waits for them.

    The first thing the process sends is its name and version, once it can answer.
    """

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._peer, theirs = context.Pipe()
        # A daemon ends with this process.
        self._process = context.Process(target=engine, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = count()
        self._sending = threading.Lock()
        self._waiting: dict[int, SimpleQueue[Chunk | None]] = {}
        self.version: str = self._peer.recv()
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()

    def close(self) -> None:
        """End the peer's process."""
        self._process.kill()
        self._process.join()
        self._receiver.join()
        self._peer.close()

    def ask(self, text: str, *, max_tokens: int) -> Iterator[Chunk]:
        """The chunks of one answer as they are made, the last one marked. EOFError when the process has ended."""
        number = next(self._numbers)
        chunks = self._waiting[number] = SimpleQueue()
        with self._sending:
            self._peer.send(Prompt(number=number, text=text, max_tokens=max_tokens))
        while True:
            chunk = chunks.get()
            if chunk is None:
                raise EOFError("the peer's process has ended")
            yield chunk
            if chunk.is_last:
                del self._waiting[number]
                return

    def _receive(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                chunk: Chunk = self._peer.recv()
                self._waiting[chunk.number].put(chunk)
        # Its own last words are on stderr. Answers that are due will not come.
        for chunks in list(self._waiting.values()):
            chunks.put(None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, broker: Broker, *connection: Any) -> None:
        self._broker = broker
        super().__init__(*connection)

    def log_message(self, *_: object) -> None:
        """Nothing per request."""

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._answer(404, {"error": "no such route"})
        self._answer(200, {"version": self._broker.version})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or not body.get("stream"):
            return self._answer(400, {"error": "only streams of /v1/completions are served"})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        num_tokens = 0
        for chunk in self._broker.ask(body["prompt"], max_tokens=body["max_tokens"]):
            num_tokens += chunk.num_tokens
            self._event({"choices": [{"index": 0, "text": chunk.text}]})
        self._event({"choices": [], "usage": {"completion_tokens": num_tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def handler(broker: Broker) -> Callable[..., BaseHTTPRequestHandler]:
    """What answers a connection, for an HTTPServer."""
    return partial(_Handler, broker)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 resets connections when 32 come at once


def main(argv: list[str] | None = None) -> int:
    """Serve until killed; 1 when the peer's process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=sorted(ENGINES), required=True)
    parser.add_argument("--model", required=True, help="folder that the peer loads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(argv)
    settings = EngineSettings(model=args.model, dtype=args.dtype, num_threads=args.threads)
    try:
        broker = Broker(ENGINES[args.peer], settings)
    except EOFError:
        print(f"serve.py: error: {args.peer} did not start", file=sys.stderr)
        return 1
    _Server(("127.0.0.1", args.port), handler(broker)).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
