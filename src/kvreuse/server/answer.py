"""One call under way: its requests in the engine, its events turned into one body or one stream.

Knows the engine's submit and abort and a View. Knows nothing of HTTP, field names or tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvreuse.api.call import Call, Meta, Result
from kvreuse.api.facts import CUSTOM_ATTRIBUTES, custom_attributes, error_object, total
from kvreuse.errors import DeadlineError, KVReuseError, OverloadedError
from kvreuse.types import Delta, Done, Event, Failed, FinishReason, Request

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine

__all__ = ["JSON_TYPE", "STREAM_TYPE", "Answer"]

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"


@dataclass(kw_only=True, eq=False)
class Answer:
    """Submitted when it is consumed, once. Leaving it early aborts what still runs.

    items: a request per prompt, or why there is none. `on_end(answer, error)` is called once, with None when every
    prompt has its result. join_key: calls that run at the same time and have the same one are one, except for None.
    headers: what the caller is told beside the body; complete when the answer has been consumed.
    """

    engine: Engine
    items: Sequence[Request | KVReuseError]
    call: Call
    meta: Meta
    timeout_s: float
    on_end: Callable[[Answer, KVReuseError | None], None]
    join_key: Hashable = None

    def __post_init__(self) -> None:
        self.headers = {CUSTOM_ATTRIBUTES: custom_attributes(self.meta.request_id, None)}
        self._results: list[Result | None] = [None if isinstance(item, Request) else item for item in self.items]
        self._started_s = time.monotonic()

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def results(self) -> list[Result]:
        """What is there so far; complete when the answer has been consumed."""
        return [result for result in self._results if result is not None]

    @property
    def num_left(self) -> int:
        """Prompts without a result."""
        return self._results.count(None)

    def error_body(self, error: KVReuseError) -> bytes:
        return _json(error_object(error, self.meta.request_id, is_openai=self.call.view.is_openai))

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

        def put(number: int, event: Event) -> None:
            if self.call.is_stream or not isinstance(event, Delta):
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(inbox.put_nowait, (number, event))

        error: KVReuseError | None = None
        try:
            self._submit(put)
            self._check()
            while self.num_left:
                if chunk := self._take(await self._batch(inbox)):
                    yield chunk
                self._check()
            if self.call.is_stream:
                yield _lines(self.call.view.last(self.results, self.meta))
            else:
                yield _json(self.call.view.answer(self.results, self.meta))
        except KVReuseError as fault:
            error = fault
            raise
        finally:
            self._end(error)

    def _submit(self, put: Callable[[int, Event], None]) -> None:
        """Hand everything to the engine. What is refused has its result now."""
        for number, item in enumerate(self.items):
            if isinstance(item, Request):
                try:
                    self.engine.submit(item, partial(put, number))
                except KVReuseError as error:
                    self._results[number] = error

    async def _batch(self, inbox: asyncio.Queue[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """All events that are there, at least one. That empties the inbox, so every turn waits and lets others run."""
        try:
            async with asyncio.timeout(max(0.0, self.timeout_s - self.duration_s)):
                batch = [await inbox.get()]
        except TimeoutError:
            raise DeadlineError(f"the answer was not finished within {self.timeout_s:g} s") from None
        while not inbox.empty():
            batch.append(inbox.get_nowait())
        return batch

    def _take(self, batch: Iterable[tuple[int, Event]]) -> bytes:
        """Keep what came to an end; the lines of what goes on."""
        said: list[object] = []
        for number, event in batch:
            if isinstance(event, Delta):
                said += self.call.view.delta(number, event, self.meta)
            else:
                self._results[number] = _result(event)
        return _lines(said)

    def _check(self) -> None:
        """Raise the first fault, if no prompt is left that could be answered: a stream has no place for a fault."""
        faults = [result for result in self._results if isinstance(result, KVReuseError)]
        if faults and (self.call.is_stream or len(faults) == len(self.items)):
            raise faults[0]

    def _end(self, error: KVReuseError | None) -> None:
        for item, result in zip(self.items, self._results, strict=True):
            if result is None and isinstance(item, Request):
                self.engine.abort(item.request_id)
        self.headers[CUSTOM_ATTRIBUTES] = custom_attributes(self.meta.request_id, total(self.results))
        self.on_end(self, error)


def _result(event: Done | Failed) -> Result:
    """An abort that reaches a caller who still waits is none of theirs: half an answer must not look whole."""
    if isinstance(event, Failed):
        return event.error
    if any(completion.finish_reason is FinishReason.ABORT for completion in event.completions):
        return OverloadedError("the server ended this request before it was finished; it can be sent again")
    return event


def _lines(objects: Iterable[object]) -> bytes:
    return b"".join(b"data: " + (item.encode() if isinstance(item, str) else _json(item)) + b"\n\n" for item in objects)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
