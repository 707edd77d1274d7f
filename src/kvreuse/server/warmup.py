"""Registered templates are computed before traffic comes, and again after they were evicted.

Knows templates, times and the engine's door. Knows nothing of HTTP or of how templates are filled.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvreuse.api.call import Template
from kvreuse.config import Config
from kvreuse.errors import KVReuseError
from kvreuse.server.callers import scope_of
from kvreuse.types import Done, Event, Failed, Request, SamplingParams, Scope

if TYPE_CHECKING:
    from kvreuse.cache.lease import Lease
    from kvreuse.engine.engine import Engine

__all__ = ["State", "WarmUp"]

_LOG = logging.getLogger(__name__)


class State(StrEnum):
    """Where a template is."""

    COLD = "cold"  # not computed yet, or evicted since
    WARM = "warm"  # in the store
    FAILED = "failed"  # could not be computed
    EXPIRED = "expired"  # its time is over, it is kept no longer


@dataclass(slots=True)
class _Kept:
    template: Template
    token_ids: tuple[int, ...]
    scope: Scope
    state: State = State.COLD
    warmed_s: float = 0.0
    num_warm_tokens: int = 0  # in whole blocks
    pin: Lease | None = None


class WarmUp:
    """`prefixes`: template id -> the tokens that all its prompts begin with. Those of higher priority go first."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        *,
        templates: Mapping[str, Template],
        prefixes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._engine = engine
        names = sorted(prefixes, key=lambda name: -templates[name].priority)
        self._kept = {
            name: _Kept(templates[name], prefixes[name], scope_of(templates[name].tenant, config)) for name in names
        }

    def run(self, *, budget_s: float) -> None:
        """Compute all that is cold, until the time is spent. Waits; what fails is logged and left."""
        started_s = time.monotonic()
        cold = [name for name, kept in self._kept.items() if self._state(kept) is State.COLD]
        for number, name in enumerate(cold):
            kept, begun_s = self._kept[name], time.monotonic()
            left_s = budget_s - (begun_s - started_s)
            if left_s <= 0:
                num_left = len(cold) - number
                _LOG.warning("warm-up ends after %.0f s: %d of %d templates stay cold", budget_s, num_left, len(cold))
                return
            self._warm(kept, timeout_s=left_s)
            what = f"template {name}, {len(kept.token_ids)} tokens, {kept.state}"
            _LOG.info("warm-up %d/%d: %s, %.0f ms", number + 1, len(cold), what, (time.monotonic() - begun_s) * 1e3)

    def keep(self, *, interval_s: float) -> None:
        """From now on look every interval_s for what was evicted, and compute it again while nobody waits."""
        if self._kept:
            threading.Thread(target=self._keep, args=(interval_s,), name="kvreuse-warm", daemon=True).start()

    def states(self) -> list[dict[str, object]]:
        """One object per template, in order of priority."""
        return [
            {"id": name, "state": self._state(kept).value, "tokens": len(kept.token_ids),
             "pinned": kept.pin is not None, "priority": kept.template.priority}
            for name, kept in self._kept.items()
        ]  # fmt: skip

    def _keep(self, interval_s: float) -> None:
        time.sleep(interval_s)
        while self._engine.is_alive:
            if not self._engine.snapshot()["waiting"]:
                self.run(budget_s=interval_s)
            time.sleep(interval_s)

    def _state(self, kept: _Kept) -> State:
        ttl_s = kept.template.ttl_s
        if kept.warmed_s and ttl_s is not None and time.monotonic() - kept.warmed_s > ttl_s:
            kept.state = State.EXPIRED
            pin, kept.pin = kept.pin, None  # the status page asks on another thread
            if pin is not None:
                self._engine.pins.unpin(pin)
        elif kept.state is State.WARM and self._num_resident(kept) < kept.num_warm_tokens:
            kept.state = State.COLD
        return kept.state

    def _num_resident(self, kept: _Kept) -> int:
        return self._engine.num_resident(kept.token_ids, scope=kept.scope)

    def _warm(self, kept: _Kept, *, timeout_s: float) -> None:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request_id = f"warm-up-{id(kept)}-{time.monotonic_ns()}"
        sampling = SamplingParams(max_new_tokens=1)
        request = Request(request_id=request_id, token_ids=kept.token_ids, sampling=sampling, scope=kept.scope)
        kept.state = State.FAILED
        try:
            self._engine.submit(request, events.put)
            while not isinstance(event := events.get(timeout=timeout_s), Done | Failed):
                pass
        except (KVReuseError, queue.Empty) as error:
            self._engine.abort(request_id)
            _LOG.warning("a template is not warm: %s", str(error) or "the time is spent")
            return
        kept.num_warm_tokens = self._num_resident(kept)
        if isinstance(event, Done) and kept.num_warm_tokens:
            kept.state = State.WARM
            kept.warmed_s = kept.warmed_s or time.monotonic()
            if kept.template.pin and kept.pin is None:
                kept.pin = self._engine.pins.pin((*kept.token_ids, 0), scope=kept.scope)
