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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from typing import Any, NotRequired, TypedDict, TypeVar

from kvreuse.kv.tiers.entry import BadEntry, Block, read_block
from kvreuse.types import Tier

__all__ = ["LOADS_AT_ONCE", "Exchanges", "OnEvict", "StorageTier", "TierOptions", "TierUsage"]

log = logging.getLogger("kvreuse.tiers")

REST_S = 5.0
LOADS_AT_ONCE = 16
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


class TierOptions(TypedDict):
    """What every tier takes. max_bytes: see StorageTier. namespace: 32 hex digits, the identity of the KV; none where
    nothing leaves the process."""

    max_bytes: int
    namespace: NotRequired[str]
    clock: NotRequired[Callable[[], float]]


class StorageTier(ABC):
    """Thread-safe. `max_bytes` bounds what is stored and what is being written, overhead of entries included."""

    tier: Tier
    faults: tuple[type[Exception], ...] = (OSError,)  # what the storage raises when it fails

    def __init__(self, *, max_bytes: int, namespace: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._namespace = bytes.fromhex(namespace)
        self._clock = clock
        self._lock = threading.Lock()  # of the books; never held while the storage works
        self._books = TierUsage(max_bytes=max_bytes)
        self._rests_until_s = 0.0
        self._map: Callable[..., Iterable[Any]] = map  # how work on several entries is done

    # -- for callers ------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the storage is tried at all: not for a while after a fault."""
        return self._clock() >= self._rests_until_s

    @abstractmethod
    def put(self, block: Block, *, on_evict: OnEvict | None = None) -> bool:
        """Store a block. False when it does not fit or the storage fails. on_evict gets what left to make room, from
        tiers that alone decide what their storage holds."""

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here, or may be where only asking the storage would tell. No I/O."""
        return len(keys) if self.is_healthy else 0

    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are here and good. A bad entry is dropped and counted.

        One is loaded alone, then many at once: most prompts that nobody computed yet cost one exchange.
        """
        run: list[Block] = []
        while len(run) < len(keys):
            part = slice(len(run), len(run) + (LOADS_AT_ONCE if run else 1))
            for block in self._map(self._load, keys[part], token_bytes[part]):
                if block is None:
                    return run
                run.append(block)
        return run

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

    def check_integrity(self) -> None:  # noqa: B027  # not every tier keeps accounts of its own
        """Raises AssertionError when the accounts disagree."""

    def close(self) -> None:  # noqa: B027  # not every storage holds something open
        """Let go of what the storage holds open."""

    # -- for tiers --------------------------------------------------------------------------------

    @abstractmethod
    def _opened(self, key: bytes) -> BufferedIOBase | None:
        """The whole entry; None when there is none."""

    def _read(self, key: bytes, token_bytes: bytes) -> Block | None:
        """The verified block, None when there is none; no token_bytes: whatever its tokens. Raises BadEntry."""
        file = self._opened(key)
        if file is None:
            return None
        with file:
            return read_block(file, namespace=self._namespace, key=key, token_bytes=token_bytes)

    def _load(self, key: bytes, token_bytes: bytes) -> Block | None:
        block = None
        if self.is_healthy:
            with self._noting_faults(key):
                block = self._read(key, token_bytes)
        self._count(num_hits=block is not None, num_misses=block is None)
        return block

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


class Exchanges:
    """With a storage behind a network: several at once, each as a whole within a timeout.

    A socket's timeout is one of each read, so a server that sends a byte now and then is never late. What is late is
    left behind on its thread; when all threads are, new work is late too.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._callers, self._calls = (ThreadPoolExecutor(LOADS_AT_ONCE, "kvreuse-remote") for _ in range(2))
        self.map = self._callers.map

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises. Raises TimeoutError."""
        future = self._calls.submit(work)
        try:
            return future.result(self._timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Waits for nothing."""
        for pool in (self._callers, self._calls):
            pool.shutdown(wait=False, cancel_futures=True)
