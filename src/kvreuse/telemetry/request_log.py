"""Writes one JSON line per request. Knows facts and numbers; never sees a prompt or an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

__all__ = ["RequestLog"]


class RequestLog:
    """One line per record, whole lines only, from any thread. A log that cannot be written must not fail a request.

    on_record: is given every record too, on the thread that writes it; must return at once and must not raise.
    """

    def __init__(self, out: TextIO, *, on_record: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._out = out
        self._on_record = on_record
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, object]) -> None:
        line = json.dumps({key: value for key, value in record.items() if value is not None}) + "\n"
        with self._lock, suppress(OSError):
            self._out.write(line)
            self._out.flush()
        if self._on_record is not None:
            self._on_record(record)
