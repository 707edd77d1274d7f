"""A limit on the whole of an operation.

A socket's timeout is one of each read: a server that sends a byte now and then is never late. Knows time. Knows nothing
of what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Deadline"]

T = TypeVar("T")


class Deadline:
    """Runs work on its own threads. What is late is left behind there; when all threads are, new work is late too."""

    def __init__(self, timeout_s: float, *, num_threads: int) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvreuse-remote")

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises. Raises TimeoutError."""
        future = self._pool.submit(work)
        try:
            return future.result(self._timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
