"""Lets calls that are one (the platform sends a call again under its id) share one answer while it is computed.

Knows answers and their keys. Knows nothing of headers or bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

from kvreuse.server.answer import Answer

__all__ = ["Flights"]


@dataclass(slots=True)
class _Flight:
    answer: Answer
    task: asyncio.Task[bytes]
    num_waiting: int = 0


class Flights:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight] = {}

    async def wait(self, answer: Answer) -> tuple[bytes, Answer]:
        """The whole body, and the answer that gave it: this one, or one of the same key that was under way.

        What runs is aborted when the last of those who wait for it is cancelled. Raises KVReuseError.
        """
        key = answer.join_key
        if key is None:
            return await answer.wait(), answer
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(answer, asyncio.create_task(answer.wait()))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task), flight.answer
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 or flight.task.done():
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]
