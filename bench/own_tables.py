"""The tables of kvreuse's own measurements.

Knows the figures that `kvreuse bench` and bench.suffix write. Knows nothing of how they are laid out on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.parts import DTYPES, TRACES
from bench.plot import Bars, Lines
from bench.spread import Spread, spread_of
from bench.table import Results, Table

__all__ = ["own_tables"]


def own_tables(results: Results) -> Iterator[Table]:
    """Those that were measured."""
    for make in (_suffix, _decode, _templates, _restart, _precision, _policy, _store, _locks, _growth, _http):
        table = make(results)
        if table is not None:
            yield table


def _suffix(results: Results) -> Table | None:
    return _two_ways(
        results,
        part="suffix",
        title="A hit against a bare forward of its suffix",
        note="1,024 cached tokens and 32 new ones, in turn: time to first token over HTTP, and the forward alone.",
        columns={"hit, ms": lambda f: _ms(f["hit_ttft_s"]), "bare forward, ms": lambda f: _ms(f["bare_forward_s"])},
    )


def _decode(results: Results) -> Table | None:
    return _two_ways(
        results,
        part="decode",
        title="A decode step of 32 sequences on one prefix of 2,048 tokens",
        note="Shared KV, and private copies of it, in turn.",
        columns={
            "shared, ms": lambda f: spread_of(f["shared_step_ms_all"]),
            "unshared, ms": lambda f: spread_of(f["unshared_step_ms_all"]),
        },
    )


def _two_ways(
    results: Results, *, part: str, title: str, note: str, columns: Mapping[str, Callable[[Any], Spread | None]]
) -> Table | None:
    rows, groups = [], {}
    for dtype in DTYPES:
        if f"{part}-{dtype}" in results:
            spreads = {name: of(results[f"{part}-{dtype}"]) for name, of in columns.items()}
            groups[dtype] = {name: spread for name, spread in spreads.items() if spread}
            first, second = (spread.median for spread in groups[dtype].values())
            rows.append(
                [dtype, *(s.shown() for s in groups[dtype].values()), f"{max(first, second) / min(first, second):.2f}"]
            )
    plot = Bars(unit="ms", groups=groups)
    return (
        Table(name=part, title=title, note=note, head=("", *columns, "slower / faster"), rows=rows, plot=plot)
        if rows
        else None
    )


def _templates(results: Results) -> Table | None:
    figures = results.get("templates")
    if figures is None:
        return None
    pairs = {
        "time to first token, ms": (figures["ttft_cold_ms"], figures["ttft_hit_ms"]),
        "output tokens/s": (figures["throughput_off_tps"], figures["throughput_on_tps"]),
        "KV memory of the burst, MiB": tuple(
            (figures[key] or 0) / 2**20 for key in ("unshared_kv_bytes", "peak_kv_bytes")
        ),
        "prompt tokens computed in the burst": (figures["burst_prompt_tokens"], figures["burst_computed_tokens"]),
    }
    rows = [[what, *(f"{value:,.1f}" for value in pair)] for what, pair in pairs.items()]
    pair = pairs["time to first token, ms"]
    return Table(
        name="templates",
        title="Templates",
        note="`kvreuse bench templates`: see docs/bench.md.",
        head=("", "without reuse", "with reuse"),
        rows=rows,
        plot=_columns("ms to first token", {"without reuse": pair[0], "with reuse": pair[1]}),
    )


def _restart(results: Results) -> Table | None:
    figures = results.get("restart")
    if figures is None:
        return None
    names = {
        "nobody has seen it": ("ttft_cold_ms", "token_hit_rate_cold"),
        "after a kill, from disk": ("ttft_after_restart_disk_ms", "token_hit_rate_disk"),
        "on a new instance, from Redis": ("ttft_new_instance_remote_ms", "token_hit_rate_remote"),
    }
    measured = {name: keys for name, keys in names.items() if figures.get(keys[0]) is not None}
    return Table(
        name="restart",
        title="First requests after a start",
        head=("", "time to first token, ms", "token hit rate"),
        rows=[[name, f"{figures[ttft]:,.1f}", f"{figures[rate] or 0:.1%}"] for name, (ttft, rate) in measured.items()],
        plot=_columns("ms to first token", {name: figures[ttft] for name, (ttft, _) in measured.items()}),
    )


def _precision(results: Results) -> Table | None:
    forms = {
        name: form
        for name, form in results.get("precision", {}).items()
        if isinstance(form, dict) and "bytes_share_of_bf16" in form
    }
    if not forms:
        return None
    keys = ("bytes_share_of_bf16", "top1_agreement", "max_logit_difference")
    return Table(
        name="precision",
        title="Stored forms of KV",
        head=("form", "bytes, share of bfloat16", "same likeliest token", "largest difference of a logit"),
        rows=[[name, *(f"{form[key]:.3f}" for key in keys)] for name, form in forms.items()],
        plot=_columns("bytes, share of bfloat16", {name: form["bytes_share_of_bf16"] for name, form in forms.items()}),
    )


def _policy(results: Results) -> Table | None:
    rows, lines = [], {}
    keys = {"default": "token_hit_rate", "lru": "lru_token_hit_rate", "knows the future": "ceiling_token_hit_rate"}
    for trace, (_, capacities) in TRACES.items():
        measured = {c: results[f"policy-{trace}-{c}"] for c in capacities if f"policy-{trace}-{c}" in results}
        for capacity, figures in measured.items():
            shown = ["-" if figures[key] is None else f"{figures[key]:.2%}" for key in keys.values()]
            rows.append([trace, f"{capacity:,}", *shown, f"{figures['block_operations_per_s']:,}"])
        for name, key in keys.items():
            line = [(float(c), 100 * f[key]) for c, f in measured.items() if f[key] is not None]
            if line:
                lines[f"{trace}, {name}"] = line
    head = ("trace", "capacity, tokens", *keys, "block operations/s")
    plot = Lines(x_unit="tokens of the pool", unit="% of prompt tokens reused", lines=lines)
    title = "Eviction: share of prompt tokens reused"
    return Table(name="policy", title=title, head=head, rows=rows, plot=plot) if rows else None


def _store(results: Results) -> Table | None:
    figures = results.get("store")
    if figures is None:
        return None
    kinds = {"match": "match_us", "commit": "commit_us", "evict": "evict_us"}
    points = figures["points"]
    return Table(
        name="store",
        title="The store as it grows",
        head=("blocks", *(f"{kind}, us a block" for kind in kinds), "bytes a block"),
        rows=[
            [f"{p['entries']:,}", *(f"{p[key]:.2f}" for key in kinds.values()), f"{p['bytes_per_block']:,}"]
            for p in points
        ],
        plot=Lines(
            x_unit="blocks in the store",
            unit="us a block",
            lines={kind: [(p["entries"], p[key]) for p in points] for kind, key in kinds.items()},
        ),
    )


def _locks(results: Results) -> Table | None:
    threads = results.get("store", {}).get("threads")
    if not threads:
        return None
    many = f"{results['store']['settings']['threads']} threads"
    rates = {"1 thread": "one_thread_ops_per_s", many: "threads_ops_per_s"}
    groups = {
        f"{line['kind']}, {line['buckets']}": {name: _exact(line[key]) for name, key in rates.items()}
        for line in threads
    }
    return Table(
        name="locks",
        title=f"{many} on the store",
        note="Blocks a second by the clock; disjoint: each thread in index buckets of its own, equal: all in one.",
        head=("what, buckets", *rates),
        rows=[[what, *(f"{spread.median:,.0f}" for spread in group.values())] for what, group in groups.items()],
        plot=Bars(unit="blocks/s", groups=groups),
    )


def _growth(results: Results) -> Table | None:
    axes = results.get("growth", {}).get("axes")
    if not axes:
        return None
    rows = []
    for name, axis in axes.items():
        (first, first_ms), (last, last_ms) = axis["points"][0], axis["points"][-1]
        ends = (f"{first:,} to {last:,}", f"{first_ms:,.1f}", f"{last_ms:,.1f}")
        rows.append([name, *ends, f"{axis['slope']:.2f}", f"{axis['steepest']:.2f}"])
    return Table(
        name="growth",
        title="What a decode step costs as there is more",
        note="Slope of log time against log size: 0 costs nothing, 1 is proportional. Steepest: between neighbours.",
        head=("of", "from, to", "first, ms", "last, ms", "slope", "steepest"),
        rows=rows,
        plot=Lines(x_unit="how many", unit="ms a step", lines={name: axis["points"] for name, axis in axes.items()}),
    )


def _http(results: Results) -> Table | None:
    levels = results.get("http", {}).get("levels")
    if not levels:
        return None
    keys = ("output_tokens_per_s", "latency_p50_ms", "latency_p99_ms", "ttft_p50_ms", "ttft_p99_ms")
    rates = [(level["concurrency"], level["output_tokens_per_s"]) for level in levels]
    return Table(
        name="http",
        title="A server at rising concurrency",
        head=("at a time", *(key.replace("_ms", ", ms").replace("_", " ") for key in keys), "hit rate"),
        rows=[
            [
                f"{level['concurrency']}",
                *(f"{level[key] or 0:,.1f}" for key in keys),
                f"{level['token_hit_rate'] or 0:.1%}",
            ]
            for level in levels
        ],
        plot=Lines(x_unit="requests in flight", unit="output tokens/s", lines={"output tokens/s": rates}),
    )


def _columns(unit: str, values: Mapping[str, float]) -> Bars:
    return Bars(unit=unit, groups={name: {unit: _exact(value)} for name, value in values.items()})


def _exact(value: float) -> Spread:
    return Spread(median=value, low=value, high=value, count=1)


def _ms(seconds: list[float]) -> Spread | None:
    return spread_of([value * 1000 for value in seconds])
