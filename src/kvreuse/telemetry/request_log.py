"""Writes one JSON line per request. Knows facts and numbers; never sees a prompt or an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

__all__ = ["RequestLog"]


class RequestLog:
    """One line per record, whole lines only, from any thread. A log that cannot be written must not fail a request."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, object]) -> None:
        line = json.dumps({key: value for key, value in record.items() if value is not None}) + "\n"
        with self._lock, suppress(OSError):
            self._out.write(line)
            self._out.flush()
