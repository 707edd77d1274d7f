"""The numbers that the page GET /status asks for every second.

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
from kvreuse.config import Config
from kvreuse.server.handler import Process
from kvreuse.telemetry.stats import StatsSnapshot, quantile
from kvreuse.types import Tier

__all__ = ["PAGE_HEADERS", "Status"]

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


class Status:
    """Made once per server; any thread may ask."""

    def __init__(self, process: Process, config: Config) -> None:
        self._process = process
        self._config = config
        self._numbers = b""
        self._next_s = 0.0

    def numbers(self) -> bytes:
        """A JSON object, at most some moments old. Totals are since the start; the page takes differences."""
        if time.monotonic() >= self._next_s:
            started_s = time.thread_time()
            self._numbers = json.dumps(self._collect()).encode()
            took_s = time.thread_time() - started_s
            self._next_s = time.monotonic() + max(_LEAST_PAUSE_S, took_s / _MAX_SHARE)
        return self._numbers

    def _collect(self) -> dict[str, Any]:
        stats, gauges, service = self._process.stats.snapshot(), self._process.gauges(), self._process.service
        outline = service.engine.outline(_MAX_NODES, service.prefixes) if service else Outline(0, [], [], 0)
        return {
            "time": time.time(),
            "version": __version__,
            "model": service.engine.model_name if service else "",
            "up": bool(gauges["up"]),
            "running": gauges.get("running", 0),
            "waiting": gauges.get("waiting", 0),
            "max_concurrency": self._config.concurrency(),
            **_totals(stats),
            "ttft": {cache: _times(stats, cache) for cache in ("hit", "miss")},
            "tiers": [_device_tier(gauges, outline), *_lower_tiers(gauges)] if service else [],
            "templates": service.warm_up.states() if service else [],
            "tree": _tree(gauges, outline),
        }


def _totals(stats: StatsSnapshot) -> dict[str, Any]:
    names = ("requests", "failures", "prompt_tokens", "cached_tokens", "generated_tokens", "hits", "saved_s")
    total: Counter[str] = Counter()
    for (name, _), value in stats.counters.items():
        total[name] += value  # type: ignore[assignment]  # Counter also adds floats
    misses = {labels[0]: value for (name, labels), value in stats.counters.items() if name == "misses"}
    return {**{name: total[name] for name in names}, "misses": misses}


def _times(stats: StatsSnapshot, cache: str) -> dict[str, float | None]:
    histogram = stats.histograms.get(("ttft_s", (cache,)))
    if histogram is None:
        return {"count": 0, "sum_s": 0.0, "p50_s": None, "p99_s": None}
    p50_s, p99_s = (quantile(histogram.fine, share) for share in (0.5, 0.99))
    return {"count": histogram.count, "sum_s": histogram.sum, "p50_s": p50_s, "p99_s": p99_s}


def _lower_tiers(gauges: Mapping[str, float]) -> list[dict[str, Any]]:
    """Fastest first, without a strip: below the device nothing has a place that would tell anything."""
    return [
        {"name": tier.value, "used_bytes": used, "max_bytes": gauges.get(f"tiers_{tier.value}_max_bytes", 0)}
        for tier in Tier
        if (used := gauges.get(f"tiers_{tier.value}_num_bytes")) is not None
    ]


def _device_tier(gauges: Mapping[str, float], outline: Outline) -> dict[str, Any]:
    return {
        "name": Tier.DEVICE.value,
        "used_bytes": gauges.get("store_used_bytes", 0),
        "max_bytes": outline.num_slots * gauges.get("bytes_per_token", 0),
        "num_slots": outline.num_slots,
        "strip": outline.strip,
    }


def _tree(gauges: Mapping[str, float], outline: Outline) -> dict[str, Any]:
    bytes_per_token = int(gauges.get("bytes_per_token", 0))
    nodes = [
        {**asdict(node), "num_bytes": node.num_tokens * bytes_per_token, "tier": Tier.DEVICE.value}
        for node in outline.nodes
    ]
    return {"num_nodes": outline.num_nodes, "nodes": nodes}
