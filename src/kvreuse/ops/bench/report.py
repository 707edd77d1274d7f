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

BYTES_PER_TOKEN = "kvreuse_kv_bytes_per_token"
USED_SLOTS = "kvreuse_kv_used_slots"
MAX_USED_SLOTS = "kvreuse_kv_max_used_slots"
PREFILLED_TOKENS = "kvreuse_prefilled_tokens_total"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What was asked for. model and dtype are None where the server was not ours, url is None where it was."""

    templates: int
    variants: int
    requests: int
    concurrency: int
    prefix_tokens: int
    own_tokens: int
    max_new_tokens: int
    seed: int
    model: str | None
    dtype: str | None
    url: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Variants of one template sent at once, and the server's metrics before and after."""

    replies: Sequence[Reply]
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not served from the store: the engine's count, else the answers'."""
        if PREFILLED_TOKENS in self.after:
            return int(self.after[PREFILLED_TOKENS] - self.before.get(PREFILLED_TOKENS, 0))
        return sum(reply.prompt_tokens - reply.cached_tokens for reply in self.replies)

    @property
    def peak_bytes(self) -> int | None:
        """KV that the burst held at most; None when the server does not say or has held more before."""
        needed = (BYTES_PER_TOKEN, USED_SLOTS, MAX_USED_SLOTS)
        if any(name not in found for name in needed for found in (self.before, self.after)):
            return None
        if self.after[MAX_USED_SLOTS] <= self.before[MAX_USED_SLOTS]:
            return None
        return int((self.after[MAX_USED_SLOTS] - self.before[USED_SLOTS]) * self.after[BYTES_PER_TOKEN])

    @property
    def unshared_bytes(self) -> int | None:
        """KV of the same requests if each kept its whole prompt and answer for itself."""
        if BYTES_PER_TOKEN not in self.after:
            return None
        num_tokens = sum(reply.prompt_tokens + reply.output_tokens for reply in self.replies)
        return int(num_tokens * self.after[BYTES_PER_TOKEN])


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


def _median_ttft_ms(replies: Sequence[Reply]) -> float:
    return median(reply.ttft_ms for reply in replies if reply.ttft_ms is not None)


def _environment() -> Figures:
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    num_cpus = len(os.sched_getaffinity(0))
    return {"num_cpus": num_cpus, "python": platform.python_version(), "kvreuse": __version__, **versions}
