"""Says the figures of the templates measurement to a newcomer. Knows figures, nothing of how they are worked out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["table"]

_WIDTHS = (52, 18, 18, 10)


def table(settings: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Lines of text: what was measured, without and with reuse, and how many times better that is."""
    new, concurrency = settings["max_new_tokens"], settings["concurrency"]
    cold_ms, hit_ms = figures["ttft_cold_ms"], figures["ttft_hit_ms"]
    off_tps, on_tps = figures["throughput_off_tps"], figures["throughput_on_tps"]
    asked, computed = figures["burst_prompt_tokens"], figures["burst_computed_tokens"]
    unshared, peak = figures["unshared_kv_bytes"], figures["peak_kv_bytes"]
    burst = f"{settings['variants']:,} variants of one template at once"
    rows = [
        ("", "without reuse", "with reuse", "better"),
        (burst, "", "", ""),
        ("  prompt tokens computed", f"{asked:,}", f"{computed:,}", _times(asked, computed)),
        (
            "  the template was computed",
            f"{settings['variants']:,} times",
            f"{figures['template_prefills']:.3g} times",
            "",
        ),
        ("  KV memory", _size(unshared), _size(peak), _times(unshared, peak)),
        ("one request at a time", "", "", ""),
        ("  time to first token", f"{cold_ms:,.0f} ms", f"{hit_ms:,.0f} ms", _times(cold_ms, hit_ms)),
        (f"{concurrency:,} requests at a time, {new:,} new tokens each", "", "", ""),
        ("  output tokens per second", f"{off_tps:,.1f}", f"{on_tps:,.1f}", _times(on_tps, off_tps)),
    ]
    return "\n".join([*_head(settings), "", *(_line(row) for row in rows), "", *_foot(figures)])


def _head(settings: Mapping[str, Any]) -> list[str]:
    served = settings["url"] or f"{settings['model']}, {settings['dtype']}"
    return [
        f"kvreuse bench templates: {served}",
        f"prompts of {settings['prefix_tokens']:,} tokens that the variants of a template share "
        f"and {settings['own_tokens']:,} of their own",
    ]


def _foot(figures: Mapping[str, Any]) -> list[str]:
    equal = "all equal to" if figures["outputs_equal"] else "NOT all equal to"
    return [
        f"answers with reuse: {figures['num_outputs_compared']:,} compared, {equal} those without",
        f"prompt tokens served from the store: {figures['token_hit_rate']:.1%}",
        f"time spent looking prefixes up: {figures['lookup_share']:.3%} of a hit",
    ]


def _line(cells: tuple[str, str, str, str]) -> str:
    first, *others = cells
    return (f"{first:<{_WIDTHS[0]}}" + "".join(f"{c:>{w}}" for c, w in zip(others, _WIDTHS[1:], strict=True))).rstrip()


def _size(num_bytes: int | None) -> str:
    return "not reported" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"


def _times(more: float | None, less: float | None) -> str:
    return f"{more / less:.1f} x" if more and less else ""
