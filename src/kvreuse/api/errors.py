"""Error bodies. Knows the two shapes that callers expect. The HTTP status is the error's own."""

from __future__ import annotations

from kvreuse.errors import KVReuseError

__all__ = ["error_object", "openai_error"]


def error_object(error: KVReuseError, request_id: str) -> dict[str, object]:
    """The error body of /invocations and of every route without a schema."""
    param = getattr(error, "param", None)
    return {"error": {"type": error.type, "message": error.message, "param": param, "request_id": request_id}}


def openai_error(error: KVReuseError, request_id: str) -> dict[str, object]:
    """OpenAI's error object; `request_id` is ours."""
    body = error_object(error, request_id)["error"]
    return {"error": {**body, "code": error.status}} if isinstance(body, dict) else {}
