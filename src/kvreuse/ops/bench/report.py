"""Works out the figures of the templates measurement.

Knows replies and metrics. Knows nothing of how they came about. docs/bench.md defines every figure.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from statistics import median

from kvreuse import __version__
from kvreuse.ops.bench.load import Reply
from kvreuse.ops.bench.table import table

__all__ = ["Burst", "Figures", "Leg", "Outcome", "Report", "Settings", "report_of"]

Figures = dict[str, object]


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
    def bytes_per_token(self) -> float:
        """0 where nothing was kept, so that it cannot be known."""
        return self.after["kvreuse_kv_used_bytes"] / max(1, _used_slots(self.after))

    @property
    def peak_bytes(self) -> int | None:
        """KV that the burst held at most; None when the server has held more before, or cannot say."""
        before, after = (metrics.get("kvreuse_kv_max_used_slots", 0.0) for metrics in (self.before, self.after))
        if after <= before:
            return None
        return int((after - _used_slots(self.before)) * self.bytes_per_token) or None

    @property
    def unshared_bytes(self) -> int | None:
        """KV of the same requests if each kept its whole prompt and answer for itself."""
        num_tokens = sum(reply.prompt_tokens + reply.output_tokens for reply in self.replies)
        return int(num_tokens * self.bytes_per_token) or None


@dataclass(slots=True)
class Leg:
    """The load with reuse on, or off."""

    replies: list[Reply] = field(default_factory=list)
    duration_s: float = 0.0

    def add(self, replies: Sequence[Reply], *, duration_s: float) -> None:
        self.replies += replies
        self.duration_s += duration_s

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """`fault` is one sentence when the answers are wrong, else None."""

    figures: Figures
    table: str
    fault: str | None


def report_of(settings: Settings, outcome: Outcome) -> Report:
    """Everything there is to say about an outcome."""
    figures = _figures(settings, outcome)
    num_compared = len(outcome.on.replies)
    num_different = sum(on.text != off.text for on, off in zip(outcome.on.replies, outcome.off.replies, strict=True))
    figures |= {"outputs_equal": num_different == 0, "num_outputs_compared": num_compared}
    fault = None
    if num_different:
        fault = f"{num_different} of {num_compared} answers differ between reuse on and reuse off"
    return Report(figures=figures, table=table(asdict(settings), figures), fault=fault)


def _figures(settings: Settings, outcome: Outcome) -> Figures:
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
        "environment": _environment(),
    }


def _used_slots(metrics: Mapping[str, float]) -> float:
    return metrics["kvreuse_kv_slots"] - metrics["kvreuse_kv_free_slots"]


def _median_ttft_ms(replies: Sequence[Reply]) -> float:
    return median(reply.ttft_ms for reply in replies if reply.ttft_ms is not None)


def _environment() -> Figures:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    num_cpus = len(os.sched_getaffinity(0))
    return {"num_cpus": num_cpus, "python": platform.python_version(), "kvreuse": __version__, **versions}
