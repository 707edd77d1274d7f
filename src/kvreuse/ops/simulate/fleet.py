"""Runs a trace through a fleet: arrivals, routing, and what happens to the fleet meanwhile.

Knows instances, a router and events. Knows nothing of files or of how an instance works.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from statistics import fmean, quantiles

from kvreuse.ops.simulate.instance import Flight, Instance, RemoteTier, Settings
from kvreuse.ops.simulate.routing import Router
from kvreuse.ops.trace import Trace, TraceRequest

__all__ = ["FleetEvent", "Outcome", "simulate"]

_NUM_RECENT = 256  # prompts whose shared prefixes warm a new instance


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """At `at_s` of the trace `change` instances come (positive) or leave (negative); 0: all begin anew."""

    at_s: float
    change: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """hit_rate and windows: cached / prompt tokens, overall and per window by arrival. Times in s. load_skew: the most
    requests that an instance got / the mean. Requests that never ended are `num_failed`.
    """

    hit_rate: float
    windows: list[float]
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    load_skew: float
    num_computed_tokens: int
    num_requests: int
    num_failed: int
    duration_s: float


def simulate(
    trace: Trace,
    settings: Settings,
    router: Router,
    *,
    num_instances: int,
    events: Sequence[FleetEvent] = (),
    is_warmed: bool = False,
    remote: RemoteTier | None = None,
    window_s: float = 300.0,
) -> Outcome:
    """is_warmed: an instance that comes later first computes the prefixes that recent requests shared, then takes
    traffic. remote: what one instance has computed all others can load. What is in flight on leaving is finished.
    """
    fleet = _Fleet(settings, is_warmed=is_warmed, remote=remote)
    fleet.change(FleetEvent(0.0, num_instances))
    origin_s, due, flights = trace.requests[0].arrival_s, deque(sorted(events, key=lambda e: e.at_s)), []
    for request in trace.requests:
        while due and origin_s + due[0].at_s <= request.arrival_s:
            event = due.popleft()
            fleet.change(FleetEvent(origin_s + event.at_s, event.change))
        flights.append(fleet.submit(request, router))
    fleet.advance(inf)
    return _outcome(trace, flights, fleet, window_s)


class _Fleet:
    def __init__(self, settings: Settings, *, is_warmed: bool, remote: RemoteTier | None) -> None:
        self._settings, self._is_warmed, self._remote = settings, is_warmed, remote
        self._active: list[Instance] = []
        self._recent: deque[TraceRequest] = deque(maxlen=_NUM_RECENT)
        self._uses: Counter[int] = Counter()
        self.all: list[Instance] = []

    def change(self, event: FleetEvent) -> None:
        """Instances come, leave from the end, or all begin anew under their numbers."""
        self.advance(event.at_s)
        numbers = [instance.number for instance in self._active]
        if event.change > 0:
            taken = set(numbers)
            wanted = [number for number in range(len(taken) + event.change) if number not in taken][: event.change]
        else:
            wanted = [] if event.change else numbers
            self._active = self._active[: max(1, len(numbers) + event.change)] if event.change else []
        self._active += [self._start(number, event.at_s) for number in wanted]

    def submit(self, request: TraceRequest, router: Router) -> tuple[Instance, Flight]:
        self.advance(request.arrival_s)
        ready = [instance for instance in self._active if instance.ready_s <= request.arrival_s]
        instance = router.choose(request, ready or self._active)
        self._recent.append(request)
        self._uses.update(request.blocks)
        return instance, instance.submit(request, at_s=request.arrival_s)

    def advance(self, until_s: float) -> None:
        for instance in self.all:
            if instance.num_in_flight:
                instance.advance(until_s)

    def _start(self, number: int, now_s: float) -> Instance:
        instance = Instance(self._settings, number=number, now_s=now_s, remote=self._remote)
        self.all.append(instance)
        recent = self._recent if self._is_warmed else ()
        shared = {tuple(takewhile(lambda block: self._uses[block] > 1, request.blocks)) for request in recent}
        for prefix in sorted(shared):
            num_tokens = len(prefix) * self._settings.block_size + 1
            instance.submit(TraceRequest(now_s, num_tokens, 1, prefix, ""), at_s=now_s)
        instance.advance(inf)
        instance.ready_s = instance.now_s
        return instance


def _outcome(trace: Trace, flights: list[tuple[Instance, Flight]], fleet: _Fleet, window_s: float) -> Outcome:
    origin_s = trace.requests[0].arrival_s
    done = [flight for _, flight in flights if flight.end_s is not None]
    hits, prompts = Counter[int](), Counter[int]()
    for flight in done:
        window = int((flight.request.arrival_s - origin_s) / window_s)
        hits[window] += flight.hit_tokens or 0
        prompts[window] += flight.request.num_prompt_tokens
    ttfts = [flight.ttft_s for flight in done if flight.ttft_s is not None]
    cuts = quantiles(ttfts, n=20) if len(ttfts) > 1 else [0.0] * 19
    loads = Counter(instance.number for instance, _ in flights)
    return Outcome(
        hit_rate=hits.total() / max(1, prompts.total()),
        windows=[hits[window] / max(1, prompts[window]) for window in range(max(prompts, default=0) + 1)],
        ttft_mean_s=fmean(ttfts) if ttfts else 0.0,
        ttft_p50_s=cuts[9],
        ttft_p95_s=cuts[18],
        load_skew=max(loads.values()) * len({instance.number for instance in fleet.all}) / len(flights),
        num_computed_tokens=sum(instance.num_computed_tokens for instance in fleet.all),
        num_requests=len(flights),
        num_failed=len(flights) - len(done),
        duration_s=trace.duration_s,
    )
