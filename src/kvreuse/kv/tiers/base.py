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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, TypeVar

from kvreuse.kv.tiers.block import Block
from kvreuse.types import Tier

__all__ = ["FAULT", "BadEntry", "Fault", "StorageTier", "TierUsage"]

log = logging.getLogger("kvreuse.tiers")

REST_S = 5.0
T = TypeVar("T")


class Fault(Enum):
    """What a piece of work gives when it failed."""

    FAULT = 0


FAULT: Final = Fault.FAULT


class BadEntry(Exception):
    """An entry that is not what its name says: short, flipped, foreign, of another version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUsage:
    """A moment of one tier, in entries and bytes; the rest counts since start."""

    num_entries: int
    num_bytes: int
    max_bytes: int
    is_healthy: bool
    num_hits: int
    num_misses: int
    num_puts: int
    num_evicted: int
    num_corrupt: int
    num_errors: int
    tenant_bytes: dict[str, int] = field(default_factory=dict)


class StorageTier(ABC):
    """Thread-safe. `max_bytes` bounds what is stored and what is being written, overhead of entries included."""

    tier: Tier
    faults: tuple[type[Exception], ...] = (OSError,)  # what the storage raises when it fails

    def __init__(self, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._rests_until_s = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether the storage is tried at all: not for a while after a fault."""
        return self._clock() >= self._rests_until_s

    @abstractmethod
    def put(self, block: Block, *, on_evict: Callable[[Block], None] | None = None) -> bool:
        """Store a block. False when it does not fit or the storage fails. on_evict gets what left to make room, from
        tiers that alone decide what their storage holds."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here, or may be where only asking the storage would tell. No I/O."""

    @abstractmethod
    def load_run(self, keys: Sequence[bytes], token_bytes: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are here and good. A bad entry is dropped and counted."""

    def load(self, key: bytes, *, token_bytes: bytes) -> Block | None:
        """The block, verified, or None."""
        return next(iter(self.load_run([key], [token_bytes])), None)

    @abstractmethod
    def discard(self, key: bytes) -> None:
        """Drop one entry."""

    @abstractmethod
    def purge(self, tenant: str | None) -> int:
        """Drop what belongs to `tenant`, or everything; returns entries."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """No I/O."""

    def check_integrity(self) -> None:  # noqa: B027  # most tiers keep no accounts of their own
        """Raises AssertionError when the accounts disagree."""

    def close(self) -> None:  # noqa: B027  # most storages hold nothing open
        """Let go of what the storage holds open."""

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def _usage(self, *, num_entries: int, num_bytes: int, tenant_bytes: dict[str, int]) -> TierUsage:
        counts = {f"num_{n}": self._counts[n] for n in ("hits", "misses", "puts", "evicted", "corrupt", "errors")}
        return TierUsage(
            num_entries=num_entries,
            num_bytes=num_bytes,
            max_bytes=self.max_bytes,
            is_healthy=self.is_healthy,
            tenant_bytes=tenant_bytes,
            **counts,
        )

    def _try(self, work: Callable[[], T], *, key: bytes | None = None) -> T | Literal[Fault.FAULT]:
        """What `work` gives, or FAULT: the entry `key` is dropped when it is bad or gone, a fault of the storage makes
        the tier rest."""
        try:
            return work()
        except (BadEntry, KeyError) as error:
            self._count("corrupt" if isinstance(error, BadEntry) else "vanished")
            if key is not None:
                log.warning("%s tier: entry %s is dropped: %s", self.tier.value, key.hex(), error)
                self.discard(key)
        except self.faults as error:
            self._count("errors")
            self._rests_until_s = self._clock() + REST_S
            # Only kinds of errors: messages of clients may hold URLs with passwords.
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            log.warning("%s tier rests for %g s: %s", self.tier.value, REST_S, reason)
        return FAULT
