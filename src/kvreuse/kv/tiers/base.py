"""What every tier below the pool offers: put, find, load, drop; and how it lives with a storage that fails.

No fault of the storage reaches a caller: it is counted, the tier rests for a while and then tries again by itself. An
entry that is not what its name says is dropped and counted. Knows blocks and health. Knows nothing of where blocks are
kept.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvreuse.kv.tiers.entry import BadEntry, Block
from kvreuse.types import Tier

__all__ = ["Deadline", "OnEvict", "StorageTier", "TierUsage"]

log = logging.getLogger("kvreuse.tiers")

REST_S = 5.0
T = TypeVar("T")
OnEvict = Callable[[Block], None]


@dataclass(kw_only=True, slots=True)
class TierUsage:
    """A moment of one tier, in entries and bytes; the rest counts since start."""

    max_bytes: int
    is_healthy: bool = True
    num_entries: int = 0
    num_bytes: int = 0
    tenant_bytes: dict[str, int] = field(default_factory=dict)
    num_hits: int = 0
    num_misses: int = 0
    num_puts: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0


class StorageTier(ABC):
    """Thread-safe. `max_bytes` bounds what is stored and what is being written, overhead of entries included."""

    tier: Tier
    faults: tuple[type[Exception], ...] = (OSError,)  # what the storage raises when it fails

    def __init__(self, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()  # of the books; never held while the storage works
        self._books = TierUsage(max_bytes=max_bytes)
        self._rests_until_s = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether the storage is tried at all: not for a while after a fault."""
        return self._clock() >= self._rests_until_s

    @abstractmethod
    def put(self, block: Block, *, on_evict: OnEvict | None = None) -> bool:
        """Store a block. False when it does not fit or the storage fails. on_evict gets what left to make room, from
        tiers that alone decide what their storage holds."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here, or may be where only asking the storage would tell. No I/O."""

    @abstractmethod
    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are here and good. A bad entry is dropped and counted."""

    @abstractmethod
    def discard(self, key: bytes) -> None:
        """Drop one entry."""

    @abstractmethod
    def purge(self, tenant: str | None) -> int:
        """Drop what belongs to `tenant`, or everything; returns entries."""

    def usage(self) -> TierUsage:
        """No I/O."""
        with self._lock:
            return replace(self._books, is_healthy=self.is_healthy, tenant_bytes=dict(self._books.tenant_bytes))

    def check_integrity(self) -> None:  # noqa: B027  # most tiers keep no accounts of their own
        """Raises AssertionError when the accounts disagree."""

    def close(self) -> None:  # noqa: B027  # most storages hold nothing open
        """Let go of what the storage holds open."""

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                setattr(self._books, name, getattr(self._books, name) + number)

    @contextmanager
    def _noting_faults(self, key: bytes | None = None) -> Iterator[None]:
        """Where its block fails, it ends there: a bad entry, `key`, is dropped; a fault makes the tier rest."""
        try:
            yield
        except BadEntry as error:
            self._count(num_corrupt=1)
            log.warning("%s tier: an entry is dropped: %s", self.tier.value, error)
            if key is not None:
                self.discard(key)
        except self.faults as error:
            self._count(num_errors=1)
            self._rests_until_s = self._clock() + REST_S
            # Only kinds of errors: messages of clients may hold URLs with passwords.
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            log.warning("%s tier rests for %g s: %s", self.tier.value, REST_S, reason)


class Deadline:
    """A limit on the whole of an operation: a socket's timeout is one of each read, so a server that sends a byte now
    and then is never late. What is late is left behind on its thread; when all threads are, new work is late too."""

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
