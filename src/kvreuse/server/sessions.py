"""Sessions as the hosting contract has them: each keeps what is cached of its conversation until it ends.

Knows ids, times and pins. Knows nothing of bodies; HTTP only by the names of three headers.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvreuse.api.call import Result
from kvreuse.config import Config
from kvreuse.errors import KVReuseError, OverloadedError, RequestError
from kvreuse.server.callers import SESSION_ID, Caller
from kvreuse.types import Done, Request, Scope

if TYPE_CHECKING:
    from kvreuse.cache.lease import Lease
    from kvreuse.engine.pins import Pins

__all__ = ["CLOSE", "CLOSED_SESSION", "NEW_SESSION", "OPEN", "Sessions"]

NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
_NEW = "NEW_SESSION"  # as a session id: open one
# Bodies that only open or close a session.
OPEN = {"requestType": "NEW_SESSION"}
CLOSE = {"requestType": "CLOSE"}

# Given a call's results: the response headers that tell the platform.
End = Callable[[Sequence[Result]], Mapping[str, str]]


@dataclass(eq=False, slots=True)
class _Session:
    """`expires_at` is in Unix seconds and does not move: it is what the platform was told."""

    session_id: str
    scope: Scope
    expires_at: float
    pin: Lease | None = None


class Sessions:
    """Thread-safe. What has expired is closed at the next call."""

    def __init__(self, pins: Pins, config: Config, *, clock: Callable[[], float] = time.time) -> None:
        self._pins = pins
        self._config = config
        self._clock = clock
        self._lock = threading.RLock()
        self._sessions: dict[str, _Session] = {}

    def turn(self, caller: Caller, items: Sequence[Request | KVReuseError], *, body: object, is_stream: bool) -> End:
        """One call's part in the session that its caller names, if any: what to do when it has its results.

        Raises RequestError 400 (no such session, or what a session cannot carry) and OverloadedError.
        """
        self._close_where(lambda session: session.expires_at <= self._clock())
        if not caller.session_id:
            return lambda results: {}
        is_new = caller.session_id == _NEW
        if len(items) > 1 or (is_new and (is_stream or body == CLOSE)):
            raise RequestError("a session carries one prompt a call, and a stream cannot open one", param=SESSION_ID)
        session = self._open(caller.scope) if is_new else self._find(caller)
        if body == CLOSE:
            self._close(session)
            return lambda results: {CLOSED_SESSION: session.session_id}

        def end(results: Sequence[Result]) -> Mapping[str, str]:
            for item, result in zip(items, results, strict=False):
                if isinstance(item, Request) and isinstance(result, Done):
                    self._hold(session, item.token_ids + result.completions[0].token_ids)
            if is_new and items and session.pin is None:
                self._close(session)
                return {}
            expires = datetime.fromtimestamp(session.expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {NEW_SESSION: f"{session.session_id}; Expires={expires}"} if is_new else {}

        return end

    def close_all(self, tenant: str | None) -> None:
        """Close the sessions of one tenant, or all (None)."""
        self._close_where(lambda session: tenant is None or session.scope.tenant == tenant)

    def _open(self, scope: Scope) -> _Session:
        with self._lock:
            if len(self._sessions) >= self._config.max_sessions:
                raise OverloadedError(f"{len(self._sessions)} sessions are open, no more are taken")
            session = _Session(uuid.uuid4().hex, scope, self._clock() + self._config.session_ttl_s)
            self._sessions[session.session_id] = session
            return session

    def _find(self, caller: Caller) -> _Session:
        with self._lock:
            session = self._sessions.get(caller.session_id)
        if session is None or session.scope != caller.scope:
            raise RequestError("this session is unknown, closed or expired", param=SESSION_ID)
        return session

    def _hold(self, session: _Session, token_ids: Sequence[int]) -> None:
        """From now on the session keeps what is cached of `token_ids`, and no longer what it kept before."""
        new = self._pins.pin(token_ids, scope=session.scope)
        with self._lock:
            is_open = session.session_id in self._sessions
            let_go, session.pin = (session.pin, new) if is_open else (new, None)
        if let_go is not None:
            self._pins.unpin(let_go)

    def _close(self, session: _Session) -> None:
        with self._lock:
            self._sessions.pop(session.session_id, None)
            pin, session.pin = session.pin, None
        if pin is not None:
            self._pins.unpin(pin)

    def _close_where(self, is_ending: Callable[[_Session], bool]) -> None:
        with self._lock:
            for session in [session for session in self._sessions.values() if is_ending(session)]:
                self._close(session)
