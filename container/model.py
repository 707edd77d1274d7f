"""The handler for DJL Serving, for a model folder whose serving.properties say `option.async_mode=true`.

Knows DJL's Input and Output and kvreuse's Service. One Python process must serve the model (`minWorkers=1` and
`maxWorkers=1`): it holds the one KV store, and answers many requests at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output

from kvreuse.errors import EngineDeadError, KVReuseError
from kvreuse.server.answer import STREAM_TYPE, Answer
from kvreuse.server.handler import model_fn
from kvreuse.server.service import check_json

_GRACE_S = 1.0


async def handle(inputs: Input) -> Output | AsyncIterator[Output] | None:
    """Answer one request; an empty one, the first, only loads the model."""
    service = await asyncio.to_thread(model_fn, inputs.get_property("model_dir"))
    if inputs.is_empty():
        return None
    try:
        check_json(inputs.get_property("Content-Type"))
        # Tokenizing a long prompt takes a while, and the loop serves everybody.
        answer = await asyncio.to_thread(
            service.answer,
            inputs.get_as_bytes(),
            wants_stream=STREAM_TYPE in _accepted(inputs),
            headers=inputs.get_properties(),
        )
        if answer.call.is_stream:
            return _stream(answer)
        body = await answer.wait()
    except KVReuseError as error:
        return _refusal(error)
    return create_non_stream_output(body.decode(), properties=answer.headers)


async def _stream(answer: Answer) -> AsyncIterator[Output]:
    """Server-sent events. A fault after the first is an event too, because the status has left already."""
    try:
        async with aclosing(answer.stream()) as chunks:
            async for chunk in chunks:
                yield _event(chunk.decode())
        yield _event("", is_last=True)
    except KVReuseError as error:
        _end_if_dead(error)
        yield _event(f"event: error\ndata: {answer.error_body(error).decode()}\n\n", is_last=True)


def _event(text: str, *, is_last: bool = False) -> Output:
    output = create_stream_chunk_output(text, is_last)
    output.add_property("Content-Type", STREAM_TYPE)
    return output


def _refusal(error: KVReuseError) -> Output:
    _end_if_dead(error)
    return create_non_stream_output("", error=error.message, code=error.status)


def _end_if_dead(error: KVReuseError) -> None:
    """DJL Serving starts a process anew that has ended, and no other."""
    if isinstance(error, EngineDeadError):
        asyncio.get_running_loop().call_later(_GRACE_S, os._exit, 1)


def _accepted(inputs: Input) -> str:
    """On a stream call SageMaker moves Accept to a header of its own."""
    return inputs.get_property("X-Amzn-SageMaker-Accept") or inputs.get_property("Accept") or ""
