"""Runs the hooks of a handler through the inference toolkit, in this process and for many requests at once.

Knows the toolkit and its traps: its one shared context, its error bodies that hold a traceback, its default input
function that unpickles. Knows nothing of HTTP beyond headers.
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

from kvreuse.api.fields import as_text, parse_object
from kvreuse.errors import InternalError, KVReuseError, RequestError
from kvreuse.server import handler
from kvreuse.server.answer import JSON_TYPE, Answer
from kvreuse.server.callers import join_headers
from kvreuse.server.service import Service

__all__ = ["RequestContext", "Toolkit", "UserError"]

_context: ContextVar[RequestContext | None] = ContextVar("kvreuse_request_context", default=None)


class UserError(KVReuseError):
    """A hook raised the toolkit's own error: its status and message are meant for the caller."""

    type = "handler_error"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class RequestContext:
    """One request as hooks see it: what the stock model server (MMS) offers; `index` is always 0 there and here.

    `headers` are looked up in any case. What a hook sets is in `status`, `content_type` and `response_headers`.
    """

    def __init__(self, headers: Mapping[str, str], *, request_id: str, model_dir: str) -> None:
        self._headers = join_headers(headers)
        self.request_id = request_id
        self.status = 200
        self.content_type = JSON_TYPE
        self.response_headers: dict[str, str] = {}
        self.request_processor = [self]
        self.system_properties: dict[str, object] = {
            "model_dir": model_dir,
            "gpu_id": None,
            "batch_size": 1,
            "server_name": handler.SERVER_NAME,
            "server_version": "1",
        }

    def get_request_properties(self) -> dict[str, str]:
        """All headers as MMS spells them. The toolkit compares the content type for equality, so without parameters.

        On a stream call SageMaker moves what the caller accepts to a header of its own.
        """
        headers = self._headers
        properties = {name.title(): value for name, value in headers.items()}
        properties["Content-Type"] = headers.get("content-type", JSON_TYPE).split(";")[0].strip().lower()
        if accept := headers.get("x-amzn-sagemaker-accept") or headers.get("accept"):
            properties["Accept"] = accept
        return properties

    def get_all_request_header(self, index: int = 0) -> dict[str, str]:
        return self.get_request_properties()

    def get_request_header(self, index: int, key: str) -> str | None:
        return self._headers.get(key.lower())

    def get_request_id(self, index: int = 0) -> str:
        return self.request_id

    def set_response_header(self, index: int, key: str, value: str) -> None:
        """A header that HTTP cannot carry is left out."""
        if key.isascii() and key.replace("-", "").isalnum() and value.isascii() and value.isprintable():
            self.response_headers[key] = value

    def set_response_content_type(self, index: int, value: str) -> None:
        self.content_type = value or JSON_TYPE

    def set_response_status(self, code: int = 200, phrase: str = "", index: int = 0) -> None:
        self.status = code


class Toolkit(Transformer):  # type: ignore[misc]  # the toolkit has no types
    """Hooks of `entry_point` (looked for in the model's code/ folder, then on the path), else kvreuse's own.

    `is_own` afterwards says that the hook is ours: it returns at once and needs no thread.
    """

    def __init__(self, *, entry_point: str, model_dir: str) -> None:
        self._entry_point = entry_point.removesuffix(".py")
        self.model_dir = model_dir
        super().__init__(_Defaults())

    def load(self) -> None:
        """Import the hooks and load the model. Raises whatever they raise."""
        code_dir = str(Path(self.model_dir, "code"))
        if code_dir not in sys.path:
            sys.path.insert(0, code_dir)
        context = RequestContext({}, request_id="load", model_dir=self.model_dir)
        self.validate_and_initialize(model_dir=self.model_dir, context=context)

    @property
    def is_own(self) -> bool:
        return self._transform_fn is handler.transform_fn

    def run(self, body: bytes, context: RequestContext) -> Any:
        """What the hooks answer to one body: bytes, text, an iterator of these, or an Answer.

        Raises KVReuseError, or whatever a hook raised.
        """
        if context.get_request_properties()["Content-Type"] in (JSON_TYPE, "text/csv"):
            as_text(body)  # the toolkit would fail on it without a word
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
        if content_type != JSON_TYPE:
            raise UnsupportedFormatError(content_type)
        return parse_object(input_data)

    def default_predict_fn(self, data: Any, model: Any, context: Any = None) -> Any:
        if not isinstance(model, Service):
            reason = "the handler has a model_fn of its own, so it needs a predict_fn or a transform_fn too"
            raise InternalError(reason)
        return model.answer(data, headers=handler.headers_of(context))

    def default_output_fn(self, prediction: Any, accept: str, context: Any = None) -> Any:
        if isinstance(prediction, Answer | str | bytes | bytearray):
            return prediction
        return super().default_output_fn(prediction, JSON_TYPE)
