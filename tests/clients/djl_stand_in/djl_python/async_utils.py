"""The two helpers that build an answer in asynchronous mode. Each adds a line end, as the real ones do."""

from __future__ import annotations

from djl_python import Output

__all__ = ["create_non_stream_output", "create_stream_chunk_output"]


def create_non_stream_output(
    data: str, properties: dict[str, str] | None = None, error: str | None = None, code: int | None = None
) -> Output:
    output = Output(data + "\n", last=True, error=error, code=code).add_property("Content-Type", "application/json")
    for name, value in (properties or {}).items():
        output.add_property(name, value)
    return output


def create_stream_chunk_output(
    data: str, last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    output = Output(data + "\n", last=last_chunk, error=error, code=code)
    return output.add_property("Content-Type", "application/jsonlines")
