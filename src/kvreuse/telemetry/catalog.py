"""What is published beyond Prometheus: names, units, meanings, and how each is read from a window of time.

Knows the names. Knows nothing of where the values go. docs/metrics.md adds what is healthy and what to do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvreuse.telemetry.window import Values, Window
from kvreuse.types import MissReason, Tier

__all__ = ["CATALOG", "Published"]

Read = Callable[[Window], float | Values | None]


@dataclass(frozen=True, slots=True)
class Published:
    """One metric. `read` gives its values in a window: one number, several with their counts, or none.

    prometheus: where the same is found on /metrics.
    """

    name: str
    unit: str
    prometheus: str
    doc: str
    read: Read


def _count(name: str, label: str | None = None) -> Read:
    """How much a counter rose; one label of it is published only when it did, for every name is billed."""
    return lambda window: window.count(name, label) or (0 if label is None else None)


def _observed(name: str) -> Read:
    return lambda window: window.values_ms(name)


def _sampled(name: str) -> Read:
    return lambda window: window.samples.get(name)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rise(name: str) -> Read:
    """How much a counter of the engine rose, where the engine has it."""
    return lambda window: window.engine(name) if name in window.end.engine else None


_CACHED, _MISSES = "kvreuse_cached_prompt_tokens_total", "kvreuse_cache_misses_total"
_LOOKUP = "kvreuse_lookup_time_seconds_sum / kvreuse_request_duration_seconds_sum"
_ROWS: tuple[tuple[str, str, str, str, Read], ...] = (
    ("KV_CACHE_HIT_RATE", "None", f"{_CACHED} / kvreuse_prompt_tokens_total",
     "Share of prompt tokens served from the store",
     lambda w: _share(w.count("cached_tokens"), w.count("prompt_tokens"))),
    ("KV_CACHE_HITS", "Count", "kvreuse_cache_hits_total", "Requests that reused at least one block", _count("hits")),
    ("KV_CACHE_MISSES", "Count", _MISSES,
     "Requests of which not every block hit (a hit in part is in both)", _count("misses")),
    *((f"KV_CACHE_MISSES_{reason.name}", "Count", f'{_MISSES}{{reason="{reason}"}}',
       f"Of these, for the reason {reason}", _count("misses", reason)) for reason in MissReason),
    *((f"KV_TIER_TOKENS_{tier.name}", "Count", f'{_CACHED}{{tier="{tier}"}}',
       f"Prompt tokens of which the slowest came from {tier}", _count("cached_tokens", tier))
      for tier in Tier if tier is not Tier.NONE),
    ("KV_MEMORY_USAGE", "None", "1 - kvreuse_kv_free_slots / kvreuse_kv_slots",
     "Share of the KV pool that holds something", _sampled("kv_usage")),
    ("KV_CACHE_EVICTION_RATE", "Count/Second", "rate(kvreuse_kv_evicted_blocks_total)",
     "Blocks evicted to make room", lambda w: w.engine("store_num_evicted_blocks") / w.duration_s),
    ("KV_CACHE_OOM", "Count", "kvreuse_kv_oom_total",
     "Reservations refused because all memory was pinned", _rise("store_num_oom")),
    ("KV_LOOKUP_SHARE", "None", _LOOKUP, "Share of request time spent looking prompts up",
     lambda w: _share(w.seconds("lookup_s"), w.seconds("duration_s"))),
    ("KV_TRANSFER_MS", "Milliseconds", "kvreuse_transfer_time_seconds",
     "Loads from a slower tier", _observed("transfer_s")),
    ("SAVED_PREFILL_TOKENS", "Count", _CACHED, "Prompt tokens that were not computed again", _count("cached_tokens")),
    ("SAVED_PREFILL_MS", "Milliseconds", "kvreuse_saved_prefill_seconds_total",
     "Time these would have taken, from that of misses", lambda w: w.count("saved_s") * 1000),
    ("TTFT", "Milliseconds", "kvreuse_time_to_first_token_seconds",
     "From arrival to the first token", _observed("ttft_s")),
    ("ITL", "Milliseconds", "kvreuse_inter_token_latency_seconds",
     "Mean time between tokens of a request", _observed("itl_s")),
    ("QUEUE_MS", "Milliseconds", "kvreuse_queue_time_seconds", "From arrival to the first step", _observed("queue_s")),
    ("RUNNING", "Count", "kvreuse_running_requests", "Sequences in the running batch", _sampled("running")),
    ("WAITING", "Count", "kvreuse_waiting_requests", "Sequences that wait for a place", _sampled("waiting")),
    ("ENGINE_UP", "Count", "kvreuse_up", "1 when the container can serve", _sampled("up")),
    ("FAILURES", "Count", "kvreuse_failures_total", "Requests that ended in an error", _count("failures")),
    ("KV_AUDITS", "Count", "kvreuse_audits_total",
     "Hits computed again without reuse and compared", _rise("audits")),
    ("KV_AUDIT_MISMATCHES", "Count", "kvreuse_audit_mismatches_total",
     "Of these, hits that differed", _rise("audit_mismatches")),
    ("DROPPED_METRICS", "Count", "kvreuse_dropped_metrics_total",
     "Metrics that no publisher could send", lambda w: w.count("dropped_metrics") or None),
)  # fmt: skip
CATALOG = tuple(Published(*row) for row in _ROWS)
