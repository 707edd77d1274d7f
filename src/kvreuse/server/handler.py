"""The hooks that the inference toolkit calls: `model_fn` loads the engine, `transform_fn` answers one body.

Works in kvreuse's own server, where an Answer is streamed without a thread, and under any other model server, where
it is joined. One engine per process, however often and by whom `model_fn` is called.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreuse.api.call import Rules, Template
from kvreuse.api.facts import CUSTOM_ATTRIBUTES, custom_attributes, error_object
from kvreuse.api.templates import load_templates
from kvreuse.config import DEFAULT_MODEL_DIR, Config, load_config
from kvreuse.errors import InternalError, KVReuseError, RequestError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE, Answer
from kvreuse.server.callers import Tenancy
from kvreuse.server.context import SERVER_NAME
from kvreuse.server.service import Limits, Service, new_request_id
from kvreuse.telemetry.observing import make_request_log
from kvreuse.telemetry.stats import Stats

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine

__all__ = ["Process", "model_fn", "process", "transform_fn"]


class Process:
    """What exists once per process. The server sets `config` and `stats` before it loads; elsewhere they are found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.config: Config | None = None
        self.stats = Stats()
        self.service: Service | None = None

    def load(self, model_dir: str) -> Service:
        """The one Service, loaded on the first call. Raises ConfigError."""
        with self._lock:
            if self.service is None:
                self.service = _load(self.config or _find_config(model_dir), self.stats)
            return self.service


process = Process()


def model_fn(model_dir: str) -> Service:
    """Load the model that the configuration names, by default the one in `model_dir`. Raises ConfigError."""
    return process.load(model_dir)


def transform_fn(model: Service, data: Any, content_type: str, accept: str, context: Any = None) -> Any:
    """Answer one body of JSON: an Answer in kvreuse's server, (body, content type) elsewhere.

    Raises KVReuseError where there is no context to put a status in.
    """
    request_id = context.get_request_id(0) if context is not None else new_request_id()
    try:
        if (content_type or JSON_TYPE).split(";")[0].strip().lower() != JSON_TYPE:
            raise RequestError(f"the content type must be {JSON_TYPE}", param="Content-Type", status=415)
        wants_stream = STREAM_TYPE in (accept or "")
        answer = model.answer(data, request_id=request_id, wants_stream=wants_stream, headers=_headers(context))
        if context is not None and context.system_properties.get("server_name") == SERVER_NAME:
            return answer
        return _joined(answer, context)
    except KVReuseError as error:
        if context is None or context.system_properties.get("server_name") == SERVER_NAME:
            raise
        context.set_response_status(error.status, error.type)
        return json.dumps(error_object(error, request_id)), JSON_TYPE


def predict(data: Mapping[str, object], model: Any, context: Any) -> Answer:
    """The default `predict_fn`, for a handler that brings its own input or output function only."""
    if not isinstance(model, Service):
        raise InternalError("the handler has a model_fn of its own, so it needs a predict_fn or a transform_fn too")
    return model.answer(data, headers=_headers(context))


def _headers(context: Any) -> Mapping[str, str]:
    return {} if context is None else context.get_all_request_header(0)


def _joined(answer: Answer, context: Any) -> tuple[bytes, str]:
    body = answer.join()
    if context is not None:
        named = {CUSTOM_ATTRIBUTES: custom_attributes(answer.meta.request_id, answer.facts)}
        for name, value in (answer.headers | named).items():
            context.set_response_header(0, name, value)
    return body, answer.content_type


def _find_config(model_dir: str) -> Config:
    properties = Path(model_dir, "serving.properties")
    config = load_config(properties_path=properties if properties.is_file() else None)
    return replace(config, model_id=model_dir) if config.model_id == DEFAULT_MODEL_DIR else config


def _import_engine() -> type[Engine]:
    """Imported this late because torch takes seconds and the port must answer before.

    What modules make while they are imported stays, so looking for garbage among it only takes time: a fifth of it all.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        from kvreuse.engine.engine import Engine
    finally:
        if was_enabled:
            gc.enable()
    return Engine


def _load(config: Config, stats: Stats) -> Service:
    engine_type = _import_engine()
    templates = _templates(config.templates_file) if config.templates_file else {}
    return Service(
        engine_type.load(config, stats=stats),
        stats=stats,
        log=make_request_log(config),
        limits=Limits(
            request_timeout_s=config.request_timeout_s,
            stream_timeout_s=config.stream_timeout_s,
            session_ttl_s=config.session_ttl_s,
            max_sessions=config.max_sessions,
        ),
        rules=Rules(max_n=config.max_n, template_variables=config.template_variables or {}, templates=templates),
        tenancy=Tenancy(mode=config.tenant_mode, header=config.tenant_header, secret=config.tenant_secret),
    )


def _templates(source: str) -> dict[str, Template]:
    if not source.startswith("s3://"):
        return load_templates(source)
    from kvreuse.kv.tiers.s3 import fetch_text  # boto3 takes a second

    return load_templates(source, text=fetch_text(source))
