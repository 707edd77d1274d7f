"""Works out the figures of the templates measurement and says them. docs/bench.md defines every one.

Knows replies and metrics. Knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvreuse.ops.bench.load import Reply
from kvreuse.ops.bench.report import Report, as_table, environment, ratio, size

__all__ = ["Burst", "Leg", "Outcome", "Settings", "report_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The flags of the same names. model and dtype say nothing where there is a url."""

    templates: int
    variants: int
    requests: int
    concurrency: int
    prefix_tokens: int
    own_tokens: int
    max_new_tokens: int
    seed: int
    model: str
    dtype: str
    url: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Variants of one template sent at once, and the server's metrics before and after."""

    replies: Sequence[Reply]
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were computed, by the engine's own count."""
        return int(self.after["kvreuse_prefilled_tokens_total"] - self.before["kvreuse_prefilled_tokens_total"])

    @property
    def peak_bytes(self) -> int | None:
        """KV that the burst held at most; None when the server has held more before, or cannot say."""
        before, after = (metrics.get("kvreuse_kv_max_used_slots", 0.0) for metrics in (self.before, self.after))
        return self._bytes(after - _used_slots(self.before)) if after > before else None

    @property
    def unshared_bytes(self) -> int | None:
        """KV of the same requests if each kept its whole prompt and answer for itself."""
        return self._bytes(sum(reply.prompt_tokens + reply.output_tokens for reply in self.replies))

    def _bytes(self, num_tokens: float) -> int | None:
        """None where the server has kept nothing, so that the bytes of a token are not known."""
        used_bytes, used_slots = self.after["kvreuse_kv_used_bytes"], _used_slots(self.after)
        return int(num_tokens * used_bytes / used_slots) if used_slots else None


@dataclass(slots=True)
class Leg:
    """The load with reuse on, or off. `duration_s` is the wall time of its batches."""

    replies: list[Reply] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return sum(reply.output_tokens for reply in self.replies) / self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that was measured. `on` and `off` answer the same prompts in the same order."""

    burst: Burst
    cold: Sequence[Reply]
    hits: Sequence[Reply]
    on: Leg
    off: Leg


def report_of(settings: Settings, outcome: Outcome) -> Report:
    """Everything there is to say about an outcome."""
    figures = _figures(settings, outcome)
    num_compared = len(outcome.on.replies)
    num_different = sum(on.text != off.text for on, off in zip(outcome.on.replies, outcome.off.replies, strict=True))
    figures |= {"outputs_equal": num_different == 0, "num_outputs_compared": num_compared}
    fault = f"{num_different} of {num_compared} answers differ between reuse on and reuse off"
    return Report(figures=figures, table=_table(settings, figures), fault=fault if num_different else None)


def _figures(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    burst = outcome.burst
    with_reuse = [*burst.replies, *outcome.cold, *outcome.hits, *outcome.on.replies]
    prompt_tokens = sum(reply.prompt_tokens for reply in burst.replies)
    own_tokens = prompt_tokens - settings.prefix_tokens * len(burst.replies)
    return {
        "ttft_cold_ms": _median_ttft_ms(outcome.cold),
        "ttft_hit_ms": _median_ttft_ms(outcome.hits),
        "token_hit_rate": sum(r.cached_tokens for r in with_reuse) / sum(r.prompt_tokens for r in with_reuse),
        "throughput_on_tps": outcome.on.output_tokens_per_s,
        "throughput_off_tps": outcome.off.output_tokens_per_s,
        "lookup_share": sum(r.lookup_ms for r in outcome.hits) / sum(r.total_ms for r in outcome.hits),
        "peak_kv_bytes": burst.peak_bytes,
        "unshared_kv_bytes": burst.unshared_bytes,
        "burst_prompt_tokens": prompt_tokens,
        "burst_computed_tokens": burst.num_computed_tokens,
        "template_prefills": (burst.num_computed_tokens - own_tokens) / settings.prefix_tokens,
        "settings": asdict(settings),
        "environment": environment(),
    }


def _table(settings: Settings, figures: Mapping[str, Any]) -> str:
    cold_ms, hit_ms = figures["ttft_cold_ms"], figures["ttft_hit_ms"]
    off_tps, on_tps = figures["throughput_off_tps"], figures["throughput_on_tps"]
    asked, computed = figures["burst_prompt_tokens"], figures["burst_computed_tokens"]
    unshared, peak, prefills = figures["unshared_kv_bytes"], figures["peak_kv_bytes"], figures["template_prefills"]
    rows = [
        (f"{settings.variants:,} variants of one template at once", "", "", ""),
        ("  prompt tokens computed", f"{asked:,}", f"{computed:,}", ratio(asked, computed)),
        ("  times the template was computed", f"{settings.variants:,}", f"{prefills:.3g}", ""),
        ("  KV memory", size(unshared), size(peak), ratio(unshared, peak)),
        ("one request at a time", "", "", ""),
        ("  time to first token", f"{cold_ms:,.0f} ms", f"{hit_ms:,.0f} ms", ratio(cold_ms, hit_ms)),
        (f"{settings.concurrency:,} at a time, {settings.max_new_tokens:,} new tokens each", "", "", ""),
        ("  output tokens per second", f"{off_tps:,.1f}", f"{on_tps:,.1f}", ratio(on_tps, off_tps)),
    ]
    equal = "all equal to" if figures["outputs_equal"] else "NOT all equal to"
    return f"""\
kvreuse bench templates: {settings.url or f"{settings.model}, {settings.dtype}"}
every prompt: {settings.prefix_tokens:,} tokens of its template and {settings.own_tokens:,} of its own

{as_table(rows)}

answers with reuse: {figures["num_outputs_compared"]:,} compared, {equal} those without
prompt tokens served from the store: {figures["token_hit_rate"]:.1%}
time spent looking prefixes up: {figures["lookup_share"]:.3%} of a hit"""


def _used_slots(metrics: Mapping[str, float]) -> float:
    return metrics["kvreuse_kv_slots"] - metrics["kvreuse_kv_free_slots"]


def _median_ttft_ms(replies: Sequence[Reply]) -> float:
    return median(reply.ttft_ms for reply in replies if reply.ttft_ms is not None)
