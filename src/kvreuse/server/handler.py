"""The hooks that the inference toolkit calls: `model_fn` loads the engine, `transform_fn` answers one body.

Works in kvreuse's own server, where an Answer is streamed without a thread, and under any other model server, where
it is joined. One engine per process, however often and by whom `model_fn` is called.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreuse.api.call import Template
from kvreuse.api.facts import error_object
from kvreuse.api.templates import load_templates
from kvreuse.config import DEFAULT_MODEL_DIR, Config, load_config
from kvreuse.errors import EngineDeadError, KVReuseError, OverloadedError, RequestError
from kvreuse.server.answer import JSON_TYPE, STREAM_TYPE
from kvreuse.server.service import Service, check_json, new_request_id
from kvreuse.telemetry.observing import make_request_log
from kvreuse.telemetry.stats import Stats

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine
    from kvreuse.server.toolkit import Toolkit

__all__ = ["SERVER_NAME", "Process", "headers_of", "model_fn", "process", "transform_fn"]

SERVER_NAME = "kvreuse"
_LOADING_RETRY_S = 5


class Process:
    """What exists once per process. The server sets `config` before it loads; elsewhere it is found.

    Written by the loader's thread, read by all. toolkit: None while loading. service: None where a user's handler does
    without the engine, too. loaded_at: Unix seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.config: Config | None = None
        self.stats = Stats()
        self.service: Service | None = None
        self.toolkit: Toolkit | None = None
        self.loaded_at = 0

    def load(self, model_dir: str) -> Service:
        """The one Service, loaded on the first call. Raises ConfigError."""
        with self._lock:
            if self.service is None:
                self.service = _load(self.config or _find_config(model_dir), self.stats)
            return self.service

    def ready(self, toolkit: Toolkit) -> None:
        """From now on requests are served."""
        self.loaded_at = int(time.time())
        self.toolkit = toolkit

    @property
    def is_able(self) -> bool:
        """Whether requests can be served."""
        return self.toolkit is not None and (self.service is None or self.service.engine.is_alive)

    def able_toolkit(self) -> Toolkit:
        """Raises OverloadedError while loading, EngineDeadError afterwards when the engine is gone."""
        if self.toolkit is None:
            raise OverloadedError("the model is still loading", retry_after_s=_LOADING_RETRY_S)
        if not self.is_able:
            raise EngineDeadError("the engine is not running")
        return self.toolkit

    def able_service(self) -> Service:
        """As `able_toolkit`; 404 where a user's handler does without the engine."""
        self.able_toolkit()
        if self.service is None:
            raise RequestError("this endpoint's handler serves /invocations only", status=404)
        return self.service

    def gauges(self) -> Mapping[str, float]:
        """The engine's numbers by name, nested names joined by `_`, and `up`."""
        engine = self.service.engine.snapshot() if self.service is not None else {}
        return {"up": float(self.is_able), **_flat(engine)}


process = Process()


def model_fn(model_dir: str) -> Service:
    """Load the model that the configuration names, by default the one in `model_dir`. Raises ConfigError."""
    return process.load(model_dir)


def transform_fn(model: Service, data: Any, content_type: str, accept: str, context: Any = None) -> Any:
    """Answer one body of JSON: an Answer in kvreuse's server, (body, content type) elsewhere.

    Raises KVReuseError where there is no context to put a status in.
    """
    is_ours = context is not None and context.system_properties.get("server_name") == SERVER_NAME
    request_id = context.get_request_id(0) if context is not None else new_request_id()
    try:
        check_json(content_type)
        wants_stream = STREAM_TYPE in (accept or "")
        answer = model.answer(data, request_id=request_id, wants_stream=wants_stream, headers=headers_of(context))
        if is_ours:
            return answer
        body = answer.join()
        for name, value in answer.headers.items() if context is not None else ():
            context.set_response_header(0, name, value)
        return body, STREAM_TYPE if answer.call.is_stream else JSON_TYPE
    except KVReuseError as error:
        if context is None or is_ours:
            raise
        context.set_response_status(error.status, error.type)
        return json.dumps(error_object(error, request_id)), JSON_TYPE


def headers_of(context: Any) -> Mapping[str, str]:
    """The request's headers, none where a hook is called without a context."""
    return {} if context is None else context.get_all_request_header(0)


def _flat(values: Any) -> dict[str, float]:
    named = values if isinstance(values, Mapping) else {f.name: getattr(values, f.name) for f in fields(values)}
    flat: dict[str, float] = {}
    for name, value in named.items():
        if isinstance(value, Mapping) or is_dataclass(value):
            flat |= {f"{name}_{inner}": number for inner, number in _flat(value).items()}
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


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
    engine = engine_type.load(config, stats=stats)
    return Service(engine, config, stats=stats, log=make_request_log(config), templates=templates)


def _templates(source: str) -> dict[str, Template]:
    if not source.startswith("s3://"):
        return load_templates(source)
    from kvreuse.kv.tiers.s3 import fetch_text  # boto3 takes a second

    return load_templates(source, text=fetch_text(source))
