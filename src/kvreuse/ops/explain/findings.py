"""From the lines of a request log to numbers: hit rates, reasons, times, where prompts part, and what they tell.

Knows the fields of a log line. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = ["UNNAMED", "explain", "read"]

UNNAMED = "(no template)"  # requests that named no registered template
HEAVY_LOOKUP, FAR_ABOVE, OFTEN = 0.2, 5.0, 0.1
_MAX_POSITIONS = 5
_ADVICE = {
    "cold": "first sight of a prefix: warm templates up, use fewer and larger instances, route by prefix",
    "below_min": "prompts shorter than a block: lower option.kv_cache_block_size",
    "diverged": "they part in their first half: move dates, ids and user text to the end of the prompt",
    "evicted": "the pool is too small for what is hot: raise option.kv_cache_memory_ratio or add a tier",
    "expired": "reused later than option.kv_cache_ttl_s allows: raise it",
    "scope": "the same prompts under several models, adapters or tenants, which never share",
    "disabled": "reuse is switched off, by option.kv_cache_reuse or by the request",
}

Record = Mapping[str, Any]
Times = dict[str, float | None]


def read(lines: Iterable[str]) -> list[Record]:
    """The records of requests; whatever else a log holds is passed over, a prefix before the object too."""
    found: list[Record] = []
    for line in lines:
        try:
            record = json.loads(line[line.index("{") :])
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("event") == "request":
            found.append(record)
    return found


def explain(records: Sequence[Record]) -> dict[str, Any]:
    """Everything that is shown. Shares are of prompt tokens, times in ms; None where nothing was observed."""
    timed = [record for record in records if "prompt_tokens" in record]
    by_template = _grouped(timed, lambda record: record.get("template") or UNNAMED)
    total_ms = sum(record.get("duration_ms", 0) for record in timed)
    found: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": sum(record.get("status", 200) >= 400 for record in records),
        "failures": _counts(records, "error"),
        "hit_rate": _hit_rate(timed),
        "misses": _counts(timed, "miss_reason"),
        "lookup_share": sum(r.get("lookup_ms", 0) for r in timed) / total_ms if total_ms else None,
        "ttft_ms": _times(timed, "ttft_ms"),
        **_by_outcome(timed),
        "queue_ms": _times(timed, "queue_ms"),
        "hours": _hours(timed),
        "templates": [
            {
                "name": name,
                "num_requests": len(group),
                "hit_rate": _hit_rate(group),
                "diverged_at": list(_counts(group, "diverged_at").items())[:_MAX_POSITIONS],
                "hours": _hours(group),
            }
            for name, group in sorted(by_template.items(), key=lambda item: -len(item[1]))
        ],
    }
    return {**found, "tell_tales": _tell_tales(found, timed)}


def _grouped(records: Iterable[Record], key: Any) -> dict[str, list[Record]]:
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return groups


def _hours(records: Sequence[Record]) -> list[dict[str, Any]]:
    by_hour = _grouped(records, lambda r: datetime.fromtimestamp(r["time"], UTC).strftime("%Y-%m-%dT%H:00Z"))
    return [
        {
            "hour": hour,
            "num_requests": len(group),
            "hit_rate": _hit_rate(group),
            **{name: times["p50"] for name, times in _by_outcome(group).items()},
        }
        for hour, group in sorted(by_hour.items())
    ]


def _hit_rate(records: Sequence[Record]) -> float | None:
    num_tokens = sum(record["prompt_tokens"] for record in records)
    return sum(record["cached_tokens"] for record in records) / num_tokens if num_tokens else None


def _counts(records: Iterable[Record], field: str) -> dict[Any, int]:
    """How often each value of a field was seen, most often first."""
    values = (record.get(field) for record in records)
    return dict(Counter(value for value in values if value is not None).most_common())


def _by_outcome(records: Sequence[Record]) -> dict[str, Times]:
    hits, misses = ([r for r in records if bool(r["cached_tokens"]) is is_hit] for is_hit in (True, False))
    return {"ttft_hit_ms": _times(hits, "ttft_ms"), "ttft_miss_ms": _times(misses, "ttft_ms")}


def _times(records: Sequence[Record], field: str) -> Times:
    ordered = sorted(record[field] for record in records)
    return {"count": len(ordered), "p50": _quantile(ordered, 0.5), "p99": _quantile(ordered, 0.99)}


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _tell_tales(found: Mapping[str, Any], timed: Sequence[Record]) -> list[str]:
    out = []
    p50, p99 = found["ttft_ms"]["p50"], found["ttft_ms"]["p99"]
    if p50 and p99 > FAR_ABOVE * p50:
        slow = [record for record in timed if record["ttft_ms"] >= p99]
        queued = sum(record["queue_ms"] > record["ttft_ms"] / 2 for record in slow)
        missed = sum(not record["cached_tokens"] for record in slow)
        where = f"TTFT p99 {p99:,.0f} ms is {p99 / p50:.0f} x p50"
        if 2 * queued >= len(slow):
            out.append(
                f"{where}: queueing, the slowest waited for more than half of it; scale out or scale out earlier"
            )
        elif 2 * missed >= len(slow):
            out.append(f"{where}: misses, the slowest had nothing cached; see the reasons")
        else:
            out.append(f"{where}: neither queueing nor misses alone; look at the length of these prompts")
    if (found["lookup_share"] or 0) > HEAVY_LOOKUP:
        out.append(
            f"looking up takes {found['lookup_share']:.0%} of the time: the index is too heavy; "
            "raise option.kv_cache_block_size, or the CPU is short"
        )
    for reason, count in Counter(record["miss_reason"] for record in timed if _is_telling(record)).most_common():
        if count > OFTEN * len(timed) and reason in _ADVICE:
            out.append(f"{reason} in {count / len(timed):.0%} of requests: {_ADVICE[reason]}")
    return out


def _is_telling(record: Record) -> bool:
    """Every prompt with text of its own parts from the others somewhere: only in its first half it is a fault."""
    place = record.get("diverged_at")
    return bool(record.get("miss_reason")) and (place is None or place < record["prompt_tokens"] / 2)
