"""Every error that kvreuse raises on purpose.

KVReuseError
├── ConfigError        start refused, exit 1, one sentence
├── RequestError       400/408/413/415/422, says which field and what is allowed
├── OverloadedError    503 + Retry-After
├── DeadlineError      504, the request's own deadline passed
├── InternalError      500, a fault of ours while this request ran; the engine goes on
└── EngineDeadError    503, /ping fails, SageMaker replaces the instance

Knows nothing of HTTP beyond the status that each class maps to (`status`); the mapping to a body is in server/.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DeadlineError",
    "EngineDeadError",
    "InternalError",
    "KVReuseError",
    "OverloadedError",
    "RequestError",
]


class KVReuseError(Exception):
    """Base of all. `message` is safe to show to a caller: no traceback, no prompt text."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(KVReuseError):
    """The server must not start with this configuration or model."""

    type = "config_error"


class RequestError(KVReuseError):
    """The caller can mend it. `param` names the field; the message says what is allowed."""

    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class OverloadedError(KVReuseError):
    """The queue is full. The caller may try again after `retry_after_s`."""

    status = 503
    type = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(KVReuseError):
    """The request's own deadline passed before it was finished."""

    status = 504
    type = "deadline_exceeded"


class InternalError(KVReuseError):
    """A step failed while this request was in it. Nothing of it stays behind."""


class EngineDeadError(KVReuseError):
    """The engine thread is gone or was never up. Nothing can be served."""

    status = 503
    type = "engine_dead"
