"""How an endpoint chooses the instance of a request, as SageMaker documents it.

Knows instances by number and load. Knows nothing of caches or time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from kvreuse.ops.trace import TraceRequest

__all__ = ["BYTES_PER_TOKEN", "ROUTINGS", "Router", "home", "prefix_key"]

ROUTINGS = ("RANDOM", "LEAST_OUTSTANDING_REQUESTS", "PREFIX_AWARE", "SESSION")
BYTES_PER_TOKEN = 4  # of English text in a request body


class Target(Protocol):
    """What a router sees of an instance."""

    @property
    def number(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...


T = TypeVar("T", bound=Target)


def prefix_key(request: TraceRequest, *, prefix_length: int, block_size: int) -> Hashable:
    """What a route depends on: the first `prefix_length` bytes, in whole blocks of the trace and at least one."""
    num_blocks = max(1, round(prefix_length / (BYTES_PER_TOKEN * block_size)))
    return request.blocks[min(num_blocks, len(request.blocks)) - 1] if request.blocks else request.session


def home(key: Hashable, numbers: Sequence[int]) -> int:
    """The number that a key belongs to (rendezvous hashing): one that comes or leaves moves only its own keys."""
    return max(numbers, key=lambda number: xxh3_64_intdigest(f"{key}/{number}".encode()))


class Router:
    """prefix_length: bytes. threshold: requests in flight at which PREFIX_AWARE goes to the least loaded instead."""

    def __init__(self, routing: str, *, block_size: int, prefix_length: int = 4096, threshold: int = 1024) -> None:
        self._chance = random.Random(0)
        self._choose: Callable[[TraceRequest, Sequence[Target]], int] = {
            "RANDOM": lambda request, targets: self._chance.choice(targets).number,
            "LEAST_OUTSTANDING_REQUESTS": lambda request, targets: _least_loaded(targets),
            "PREFIX_AWARE": self._by_prefix,
            "SESSION": lambda request, targets: home(request.session, [target.number for target in targets]),
        }[routing]
        self._prefix_length, self._block_size, self._threshold = prefix_length, block_size, threshold

    def choose(self, request: TraceRequest, targets: Sequence[T]) -> T:
        """One of at least one target."""
        number = self._choose(request, targets)
        return next(target for target in targets if target.number == number)

    def _by_prefix(self, request: TraceRequest, targets: Sequence[Target]) -> int:
        key = prefix_key(request, prefix_length=self._prefix_length, block_size=self._block_size)
        number = home(key, [target.number for target in targets])
        is_full = any(t.number == number and t.num_in_flight >= self._threshold for t in targets)
        return _least_loaded(targets) if is_full else number


def _least_loaded(targets: Sequence[Target]) -> int:
    return min(targets, key=lambda target: target.num_in_flight).number
