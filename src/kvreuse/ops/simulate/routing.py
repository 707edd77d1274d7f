"""How an endpoint chooses the instance of a request, as SageMaker documents it.

Knows instances by number and load. Knows nothing of caches or time.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from xxhash import xxh3_64_intdigest

from kvreuse.ops.simulate.instance import Instance
from kvreuse.ops.trace import TraceRequest

__all__ = ["BYTES_PER_TOKEN", "ROUTINGS", "Router", "home", "prefix_key"]

ROUTINGS = ("RANDOM", "LEAST_OUTSTANDING_REQUESTS", "PREFIX_AWARE", "SESSION")
BYTES_PER_TOKEN = 4  # of English text in a request body


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
        self._routing, self._block_size = routing, block_size
        self._prefix_length, self._threshold = prefix_length, threshold

    def choose(self, request: TraceRequest, targets: Sequence[Instance]) -> Instance:
        """One of at least one target."""
        if self._routing == "RANDOM":
            return self._chance.choice(targets)
        least_loaded = min(targets, key=lambda target: target.num_in_flight)
        if self._routing == "LEAST_OUTSTANDING_REQUESTS":
            return least_loaded
        key: Hashable = request.session
        if self._routing == "PREFIX_AWARE":
            key = prefix_key(request, prefix_length=self._prefix_length, block_size=self._block_size)
        number = home(key, [target.number for target in targets])
        at_home = next(target for target in targets if target.number == number)
        is_full = self._routing == "PREFIX_AWARE" and at_home.num_in_flight >= self._threshold
        return least_loaded if is_full else at_home
