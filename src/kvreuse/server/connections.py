"""HTTP/1.1 connections that cannot crowd out others: those that bring no request are closed, the oldest first.

Knows connections and when they wait for a request. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connections"]


class Connections:
    """Makes the protocol of each new connection. At most `max_open` stay open, none waits longer than `idle_s`."""

    def __init__(self, *, max_open: int, idle_s: float) -> None:
        self._max_open = max_open
        self._idle_s = idle_s
        # Since when each has waited for a request, longest first.
        self._waiting: dict[_Connection, float] = {}

    def __call__(self, **settings: Any) -> asyncio.Protocol:
        return _Connection(self, **settings)

    def wait(self, connection: _Connection) -> None:
        """The connection has no request under way, or none yet."""
        self.leave(connection)
        self._waiting[connection] = connection.loop.time()
        if len(connection.connections) > self._max_open:
            next(iter(self._waiting)).drop()

    def leave(self, connection: _Connection) -> None:
        """The connection is gone, or serves a request."""
        self._waiting.pop(connection, None)

    def sweep(self) -> None:
        """Close those that have waited too long. A request half sent is none."""
        for connection, since in list(self._waiting.items()):
            if connection.loop.time() - since < self._idle_s:
                break
            connection.drop()


class _Connection(H11Protocol):
    def __init__(self, owner: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._owner = owner

    def drop(self) -> None:
        self._owner.leave(self)
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owner.wait(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        # Until its last byte is here a request is none yet: half-sent bodies crowd out others as half-sent heads do.
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._owner.leave(self)

    def on_response_complete(self) -> None:
        self._owner.wait(self)
        super().on_response_complete()
