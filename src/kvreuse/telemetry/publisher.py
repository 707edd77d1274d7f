"""A thread that cuts time into windows and hands the metrics of each to sinks, apart from every request.

Knows the catalog and sinks. Knows nothing of CloudWatch or of how a sink writes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvreuse.telemetry.catalog import CATALOG
from kvreuse.telemetry.stats import Stats
from kvreuse.telemetry.window import Moment, Values, Window

__all__ = ["Datum", "Publisher", "Sink"]

_SAMPLED = ("running", "waiting", "up", "kv_usage")
_SAMPLES_PER_WINDOW = 12


@dataclass(frozen=True, slots=True)
class Datum:
    """The values of one metric in one window: at least one."""

    name: str
    unit: str
    values: Values


# Gets the metrics of one window and when it ended (Unix time); may take its time, must not raise.
Sink = Callable[[Sequence[Datum], float], None]


class Publisher:
    """`gauges` gives the engine's numbers by name. `sample` and `publish` are for one thread, by default its own."""

    def __init__(
        self,
        stats: Stats,
        gauges: Callable[[], Mapping[str, float]],
        sinks: Sequence[Sink],
        *,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._gauges = gauges
        self._sinks = sinks
        self._interval_s = interval_s
        self._clock = clock
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kvreuse-publish", daemon=True)
        self._begin = Moment(stats.snapshot(), {}, clock())
        self._samples: dict[str, Counter[float]] = {}

    def start(self) -> None:
        """Publish every interval from now on, if there is anyone to publish to."""
        if self._sinks:
            self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Publish what is left, waiting at most `timeout_s`."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def sample(self) -> Mapping[str, float]:
        """Look at the gauges: several looks per window show peaks that its end does not."""
        gauges = dict(self._gauges())
        if gauges.get("store_num_slots"):
            gauges["kv_usage"] = round(1 - gauges["store_free_slots"] / gauges["store_num_slots"], 3)
        for name in _SAMPLED:
            if name in gauges:
                self._samples.setdefault(name, Counter())[gauges[name]] += 1
        return gauges

    def publish(self) -> None:
        """End the window here and hand it on; the next one begins."""
        gauges = self.sample()
        end = Moment(self._stats.snapshot(), gauges, self._clock())
        data = _data(Window(self._begin, end, self._samples))
        self._begin, self._samples = end, {}
        for sink in self._sinks:
            sink(data, time.time())

    def _main(self) -> None:
        while not self._is_ending.wait(self._interval_s / _SAMPLES_PER_WINDOW):
            if self._clock() - self._begin.at_s >= self._interval_s:
                self.publish()
            else:
                self.sample()
        self.publish()


def _data(window: Window) -> list[Datum]:
    found = [(metric, metric.read(window)) for metric in CATALOG]
    return [
        Datum(metric.name, metric.unit, values if isinstance(values, Mapping) else {values: 1})
        for metric, values in found
        if values is not None and values != {}
    ]
