"""What this process serves: nothing while it loads, then a handler and the engine behind it.

Knows whether requests can be served. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kvreuse.errors import EngineDeadError, OverloadedError, RequestError
from kvreuse.server.service import Service
from kvreuse.server.toolkit import Toolkit
from kvreuse.telemetry.stats import Stats

__all__ = ["Host"]

_LOADING_RETRY_S = 5


class Host:
    """Written once by the loader's thread, read by the event loop. Times in seconds."""

    def __init__(
        self,
        *,
        stats: Stats,
        max_concurrency: int,
        max_body_bytes: int = 25 * 2**20,
        read_timeout_s: float = 55.0,
        has_status_page: bool = True,
    ) -> None:
        self.stats = stats
        self.max_concurrency = max_concurrency
        self.max_body_bytes = max_body_bytes
        self.read_timeout_s = read_timeout_s
        self.has_status_page = has_status_page
        self.loaded_at = 0
        self._toolkit: Toolkit | None = None
        self._service: Service | None = None

    def ready(self, toolkit: Toolkit, service: Service | None) -> None:
        """From now on requests are served. `service` is None where a user's handler does without the engine."""
        self.loaded_at = int(time.time())
        self._service = service
        self._toolkit = toolkit

    @property
    def is_able(self) -> bool:
        return self._toolkit is not None and (self._service is None or self._service.engine.is_alive)

    @property
    def toolkit(self) -> Toolkit:
        """Raises OverloadedError while loading, EngineDeadError afterwards when the engine is gone."""
        return self._able()

    @property
    def service(self) -> Service:
        """As `toolkit`; 404 where a user's handler does without the engine."""
        self._able()
        if self._service is None:
            raise RequestError("this endpoint's handler serves /invocations only", status=404)
        return self._service

    @property
    def service_if_any(self) -> Service | None:
        """None while loading and where a user's handler does without the engine."""
        return self._service

    def _able(self) -> Toolkit:
        if self._toolkit is None:
            raise OverloadedError("the model is still loading", retry_after_s=_LOADING_RETRY_S)
        if not self.is_able:
            raise EngineDeadError("the engine is not running")
        return self._toolkit

    def gauges(self) -> Mapping[str, float]:
        """The engine's numbers by name, nested names joined by `_`, and `up`."""
        numbers: dict[str, float] = {"up": float(self.is_able)}
        if self._service is not None:
            _flatten(self._service.engine.snapshot(), "", numbers)
        return numbers


def _flatten(values: Any, prefix: str, into: dict[str, float]) -> None:
    named = values if isinstance(values, Mapping) else {f.name: getattr(values, f.name) for f in fields(values)}
    for name, value in named.items():
        if isinstance(value, Mapping) or is_dataclass(value):
            _flatten(value, f"{prefix}{name}_", into)
        elif isinstance(value, int | float):
            into[prefix + name] = float(value)
