"""Runs the hooks of a handler through the inference toolkit, in this process and for many requests at once.

Knows the toolkit and its traps: its one shared context, its error bodies that hold a traceback, its default input
function that unpickles. Knows nothing of HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from sagemaker_inference.default_inference_handler import DefaultInferenceHandler
from sagemaker_inference.errors import BaseInferenceToolkitError, UnsupportedFormatError
from sagemaker_inference.transformer import Transformer

from kvreuse.api.fields import parse_object
from kvreuse.errors import KVReuseError, RequestError
from kvreuse.server import handler
from kvreuse.server.answer import Answer
from kvreuse.server.context import RequestContext

__all__ = ["Toolkit", "UserError"]

_context: ContextVar[RequestContext | None] = ContextVar("kvreuse_request_context", default=None)


class UserError(KVReuseError):
    """A hook raised the toolkit's own error: its status and message are meant for the caller."""

    type = "handler_error"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Toolkit(Transformer):  # type: ignore[misc]  # the toolkit has no types
    """Hooks of `entry_point` (looked for in the model's code/ folder, then on the path), else kvreuse's own.

    `is_own` afterwards says that the hook is ours: it returns at once and needs no thread.
    """

    def __init__(self, *, entry_point: str, model_dir: str) -> None:
        self._entry_point = entry_point.removesuffix(".py")
        self.model_dir = model_dir
        super().__init__(_Defaults())

    def load(self) -> Any:
        """Import the hooks and load the model; what `model_fn` returned. Raises whatever they raise."""
        code_dir = str(Path(self.model_dir, "code"))
        if code_dir not in sys.path:
            sys.path.insert(0, code_dir)
        context = RequestContext({}, request_id="load", model_dir=self.model_dir)
        self.validate_and_initialize(model_dir=self.model_dir, context=context)
        return self._model

    @property
    def is_own(self) -> bool:
        return self._transform_fn is handler.transform_fn

    def run(self, body: bytes, context: RequestContext) -> Any:
        """What the hooks answer to one body: bytes, text, an iterator of these, or an Answer.

        Raises KVReuseError, or whatever a hook raised.
        """
        content_type = context.get_request_properties()["Content-Type"]
        if content_type in ("application/json", "text/csv"):
            _check_utf8(body)
        token = _context.set(context)
        try:
            return self.transform([{"body": bytearray(body)}], context)[0]
        finally:
            _context.reset(token)

    # The toolkit keeps one context for all requests; here every thread and task has its own.
    @property
    def _context(self) -> RequestContext | None:
        return _context.get()

    @_context.setter
    def _context(self, value: RequestContext | None) -> None:
        _context.set(value)

    @staticmethod
    def handle_error(context: Any, inference_exception: Any, trace: str) -> NoReturn:
        """Instead of a body with a traceback: let the error through, for the server to say."""
        error = sys.exception()
        if isinstance(error, UnsupportedFormatError):
            raise RequestError("this content type is not supported", param="Content-Type", status=415)
        if isinstance(error, BaseInferenceToolkitError) and 400 <= error.status_code <= 599:
            raise UserError(str(error.message), status=error.status_code)
        raise error or inference_exception

    def _validate_user_module_and_set_functions(self) -> None:
        self._environment._module_name = self._entry_point
        if find_spec(self._entry_point) is not None:
            super()._validate_user_module_and_set_functions()
            return
        self._pre_model_fn = self._model_warmup_fn = None
        self._model_fn, self._transform_fn = handler.model_fn, handler.transform_fn


class _Defaults(DefaultInferenceHandler):  # type: ignore[misc]
    """What a handler that brings only some hooks gets for the others: kvreuse's own loading and generation."""

    def default_model_fn(self, model_dir: str, context: Any = None) -> Any:
        return handler.model_fn(model_dir)

    def default_input_fn(self, input_data: Any, content_type: str, context: Any = None) -> Mapping[str, object]:
        """JSON only: the toolkit's own would unpickle what a caller sends."""
        if content_type != "application/json":
            raise UnsupportedFormatError(content_type)
        return parse_object(input_data)

    def default_predict_fn(self, data: Any, model: Any, context: Any = None) -> Any:
        return handler.predict(data, model, context)

    def default_output_fn(self, prediction: Any, accept: str, context: Any = None) -> Any:
        if isinstance(prediction, Answer | str | bytes | bytearray):
            return prediction
        return super().default_output_fn(prediction, "application/json")


def _check_utf8(body: bytes) -> None:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None
