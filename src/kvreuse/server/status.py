"""What GET /status shows: a page, and the numbers that it asks for every second.

Knows counts, the store's picture and template names. Never sees a prompt, so it cannot show one.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvreuse import __version__
from kvreuse.cache.outline import Outline
from kvreuse.errors import RequestError
from kvreuse.server.host import Host
from kvreuse.telemetry.page import render
from kvreuse.telemetry.stats import StatsSnapshot, quantile
from kvreuse.types import Tier

__all__ = ["PAGE_HEADERS", "StatusPage"]

# Nothing from elsewhere, in no frame, never from a cache.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_MAX_NODES = 200
# Numbers are made anew once that costs less than this share of one core, however many look and however large the pool.
_MAX_SHARE = 0.005
_LEAST_PAUSE_S = 0.5


class StatusPage:
    """Made once per server. `numbers` may be called from any thread."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._page = ""
        self._numbers = b""
        self._next_s = 0.0

    def page(self) -> str:
        """The HTML. Raises RequestError 404 where the page is switched off."""
        self._check()
        self._page = self._page or render("status.html")
        return self._page

    def numbers(self) -> bytes:
        """A JSON object, at most some moments old. Totals are since the start; the page takes differences."""
        self._check()
        if time.monotonic() >= self._next_s:
            started_s = time.thread_time()
            self._numbers = json.dumps(self._collect()).encode()
            took_s = time.thread_time() - started_s
            self._next_s = time.monotonic() + max(_LEAST_PAUSE_S, took_s / _MAX_SHARE)
        return self._numbers

    def _check(self) -> None:
        if not self._host.has_status_page:
            raise RequestError("the status page is switched off by option.status_page", status=404)

    def _collect(self) -> dict[str, Any]:
        stats, gauges, service = self._host.stats.snapshot(), self._host.gauges(), self._host.service_if_any
        outline = service.engine.outline(_MAX_NODES, service.prefixes) if service else None
        return {
            "time": time.time(),
            "version": __version__,
            "model": service.engine.model_name if service else "",
            "up": bool(gauges["up"]),
            "running": gauges.get("running", 0),
            "waiting": gauges.get("waiting", 0),
            "max_concurrency": self._host.max_concurrency,
            **_totals(stats),
            "ttft": {cache: _times(stats, "ttft_s", (cache,)) for cache in ("hit", "miss")},
            "tiers": _tiers(gauges, outline),
            "templates": service.warm_up.states() if service else [],
            "tree": _tree(outline, int(gauges.get("bytes_per_token", 0))),
        }


def _totals(stats: StatsSnapshot) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for (name, _), value in stats.counters.items():
        total[name] += value  # type: ignore[assignment]  # Counter also adds floats
    names = ("requests", "failures", "prompt_tokens", "cached_tokens", "generated_tokens", "hits", "saved_s")
    misses = {labels[0]: value for (name, labels), value in stats.counters.items() if name == "misses"}
    return {**{name: total[name] for name in names}, "misses": misses}


def _times(stats: StatsSnapshot, name: str, labels: tuple[str, ...]) -> dict[str, float | None]:
    histogram = stats.histograms.get((name, labels))
    if histogram is None:
        return {"count": 0, "sum_s": 0.0, "p50_s": None, "p99_s": None}
    p50_s, p99_s = (quantile(histogram.fine, share) for share in (0.5, 0.99))
    return {"count": histogram.count, "sum_s": histogram.sum, "p50_s": p50_s, "p99_s": p99_s}


def _tiers(gauges: Mapping[str, float], outline: Outline | None) -> list[dict[str, Any]]:
    """Fastest first; only the device tier has a strip: below it nothing has a place that would tell anything."""
    lower = [
        {"name": tier.value, "used_bytes": used, "max_bytes": gauges.get(f"tiers_{tier.value}_max_bytes", 0)}
        for tier in Tier
        if (used := gauges.get(f"tiers_{tier.value}_num_bytes")) is not None
    ]
    if outline is None:
        return lower
    device = {
        "name": Tier.DEVICE.value,
        "used_bytes": gauges.get("store_used_bytes", 0),
        "max_bytes": outline.num_slots * gauges.get("bytes_per_token", 0),
        "num_slots": outline.num_slots,
        "strip": outline.strip,
    }
    return [device, *lower]


def _tree(outline: Outline | None, bytes_per_token: int) -> dict[str, Any]:
    if outline is None:
        return {"num_nodes": 0, "nodes": []}
    nodes = [
        {**asdict(node), "num_bytes": node.num_tokens * bytes_per_token, "tier": Tier.DEVICE.value}
        for node in outline.nodes
    ]
    return {"num_nodes": outline.num_nodes, "nodes": nodes}
