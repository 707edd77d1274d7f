"""One call under way: its requests in the engine, its events turned into one body or one stream.

Knows the engine's submit and abort and a View. Knows nothing of HTTP, field names or tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvreuse.api.call import Meta, Result, View
from kvreuse.api.facts import error_object, total
from kvreuse.errors import DeadlineError, KVReuseError, OverloadedError
from kvreuse.types import CacheFacts, Delta, Done, Event, Failed, FinishReason, OnEvent, Request

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine

__all__ = ["JSON_TYPE", "STREAM_TYPE", "Answer"]

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"

Put = Callable[[tuple[int, Event]], None]


class Answer:
    """Submitted when it is consumed, once. Leaving it early aborts what still runs.

    `on_end(answer, error)` is called once, with None when every prompt has its result.
    """

    def __init__(
        self,
        engine: Engine,
        items: Sequence[Request | KVReuseError],
        *,
        view: View,
        meta: Meta,
        is_stream: bool,
        timeout_s: float,
        on_end: Callable[[Answer, KVReuseError | None], None],
    ) -> None:
        self._engine = engine
        self._items = items
        self._view = view
        self.meta = meta
        self.is_stream = is_stream
        self.timeout_s = timeout_s
        self._on_end = on_end
        self._started_at = time.monotonic()
        self._results: list[Result | None] = [None] * len(items)
        self.headers: dict[str, str] = {}  # complete when the answer has been consumed
        self.join_key: Hashable = None  # calls that run at the same time and have the same one are one

    @property
    def content_type(self) -> str:
        return STREAM_TYPE if self.is_stream else JSON_TYPE

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def results(self) -> list[Result]:
        """What is there so far; complete when the answer has been consumed."""
        return [result for result in self._results if result is not None]

    @property
    def facts(self) -> CacheFacts:
        return total(self.results)

    @property
    def num_prompts(self) -> int:
        return len(self._items)

    def error_body(self, error: KVReuseError) -> bytes:
        return _json(error_object(error, self.meta.request_id, is_openai=self._view.is_openai))

    def join(self) -> bytes:
        """Wait for the whole body on a thread that runs no event loop. A stream is joined: its events in one body."""
        return asyncio.run(self.wait())

    async def wait(self) -> bytes:
        """The whole body. Raises KVReuseError."""
        return b"".join([chunk async for chunk in self.stream()])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Whole lines of a stream, or one chunk that is the body. Close it (aclosing) to abort. Raises KVReuseError."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def put(item: tuple[int, Event]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        with self._running(put):
            while None in self._results:
                try:
                    async with asyncio.timeout(self._remaining_s()):
                        batch = [await inbox.get()]
                except TimeoutError:
                    raise self._too_late() from None
                # Taking all leaves the inbox empty, so that every turn waits and lets the loop serve others.
                while not inbox.empty():
                    batch.append(inbox.get_nowait())
                for chunk in self._merged(batch):
                    yield chunk
            for chunk in self._tail():
                yield chunk

    # Shared.

    @contextmanager
    def _running(self, put: Put) -> Iterator[None]:
        error: KVReuseError | None = None
        try:
            self._submit(put)
            yield
        except KVReuseError as fault:
            error = fault
            raise
        finally:
            for item, result in zip(self._items, self._results, strict=True):
                if result is None and isinstance(item, Request):
                    self._engine.abort(item.request_id)
            self._on_end(self, error)

    def _submit(self, put: Put) -> None:
        """Hand everything to the engine. What is refused has its result now; if all is refused, raise the first."""
        for number, item in enumerate(self._items):
            if isinstance(item, KVReuseError):
                self._results[number] = item
                continue
            try:
                self._engine.submit(item, self._on_event(put, number))
            except KVReuseError as error:
                self._results[number] = error

    def _on_event(self, put: Put, number: int) -> OnEvent:
        def on_event(event: Event) -> None:
            if self.is_stream or not isinstance(event, Delta):
                put((number, event))

        return on_event

    def _feed(self, number: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Delta):
            return self._lines(iter(self._view.delta(number, event, self.meta)))
        result = _result(event)
        self._results[number] = result
        if isinstance(result, KVReuseError) and self.is_stream:
            raise result
        return iter(())

    def _merged(self, batch: Sequence[tuple[int, Event]]) -> Iterator[bytes]:
        """One chunk for all that came at once, also when a fault ends it."""
        chunks: list[bytes] = []
        try:
            for number, event in batch:
                chunks.extend(self._feed(number, event))
        finally:
            if chunks:
                yield b"".join(chunks)

    def _tail(self) -> Iterator[bytes]:
        results = self.results
        faults = [result for result in results if isinstance(result, KVReuseError)]
        if faults and len(faults) == len(results):
            raise faults[0]
        if self.is_stream:
            return self._lines(iter(self._view.last(results, self.meta)))
        return iter((_json(self._view.answer(results, self.meta)),))

    def _lines(self, objects: Iterator[object]) -> Iterator[bytes]:
        for item in objects:
            data = item.encode() if isinstance(item, str) else _json(item)
            yield b"data: " + data + b"\n\n"

    def _remaining_s(self) -> float:
        return max(0.0, self.timeout_s - self.duration_s)

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"the answer was not finished within {self.timeout_s:g} s")


def _result(event: Done | Failed) -> Result:
    """An abort that reaches a caller who still waits is none of theirs: half an answer must not look whole."""
    if isinstance(event, Failed):
        return event.error
    if any(completion.finish_reason is FinishReason.ABORT for completion in event.completions):
        return OverloadedError("the server ended this request before it was finished; it can be sent again")
    return event


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
