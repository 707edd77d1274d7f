"""The bars that the product is held to, as data, and whether they are met.

Knows results and numbers. Knows nothing of how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from bench.parts import DTYPES, TRACES
from bench.peer_tables import peer_spread
from bench.spread import spread_of
from bench.table import Results, Table

__all__ = ["BARS", "Bar", "bars_table"]

Value = Callable[[Results], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """value: of the results, None when it was not measured. is_floor: at least `limit`, else at most."""

    text: str
    value: Value
    limit: float
    is_floor: bool
    form: str = "{:.2f} x"

    def row(self, results: Results) -> list[str]:
        """What, value, bar, verdict."""
        value = self.value(results)
        shown = "-" if value is None else self.form.format(value)
        bar = f"{'>=' if self.is_floor else '<='} {self.form.format(self.limit)}"
        return [self.text, shown, bar, self._verdict(value)]

    def _verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        is_met = value >= self.limit if self.is_floor else value <= self.limit
        return "met" if is_met else "**not met**"


def bars_table(results: Results) -> Table:
    """Every bar, met or not."""
    rows = [bar.row(results) for bar in BARS]
    met = sum(row[-1] == "met" for row in rows)
    note = f"{met} of {len(rows)} are met."
    return Table(name="bars", title="Bars", note=note, head=("what", "value", "bar", ""), rows=rows)


def _rate_against(peers: Sequence[str], dtype: str, concurrency: int) -> Value:
    """kvreuse's output tokens per second / those of the best of `peers`."""
    return _against(peers, "output_tokens_per_s", dtype=dtype, concurrency=concurrency, best=max)


def _against(
    peers: Sequence[str], figure: str, *, dtype: str, concurrency: int, best: Callable[[list[float]], float]
) -> Value:
    def value(results: Results) -> float | None:
        def of(peer: str) -> float | None:
            spread = peer_spread(results, figure, peer=peer, dtype=dtype, concurrency=concurrency)
            return spread.median if spread else None

        own, others = of("kvreuse"), [other for peer in peers if (other := of(peer)) is not None]
        return own / best(others) if own is not None and others else None

    return value


def _single_against(peers: Sequence[str], dtype: str) -> Value:
    def value(results: Results) -> float | None:
        runs = results.get("peers", {"runs": []})["runs"]

        def of(peer: str) -> float | None:
            wanted = [run for run in runs if run["peer"] == peer and run["dtype"] == dtype]
            spread = spread_of([itl for run in wanted for itl in run.get("single_itl_s", [])])
            return spread.median if spread else None

        own, others = of("kvreuse"), [other for peer in peers if (other := of(peer)) is not None]
        return own / min(others) if own is not None and others else None

    return value


def _figure(result: str, of: Callable[[Results], float]) -> Value:
    return lambda results: of(results[result]) if result in results else None


def _policy(trace: str, capacity: int) -> Value:
    return _figure(f"policy-{trace}-{capacity}", lambda figures: figures["token_hit_rate"])


def _worst_policy(of: Callable[[Results], float]) -> Value:
    def value(results: Results) -> float | None:
        names = [f"policy-{trace}-{capacity}" for trace, (_, capacities) in TRACES.items() for capacity in capacities]
        return min((of(results[name]) for name in names if name in results), default=None)

    return value


def _load_bars() -> Iterator[Bar]:
    rivals = ("vllm", "transformers", "transformers_cb", "llamacpp")
    for dtype in DTYPES:
        for concurrency, openvino in ((8, 1.0), (32, 1.3)):
            where = f"{concurrency} at a time, {dtype}"
            yield Bar(
                text=f"output tokens/s against the best of vLLM, Transformers and llama.cpp, {where}",
                value=_rate_against(rivals, dtype, concurrency),
                limit=1.5,
                is_floor=True,
            )
            yield Bar(
                text=f"output tokens/s against OpenVINO GenAI, {where}",
                value=_rate_against(("openvino",), dtype, concurrency),
                limit=openvino,
                is_floor=True,
            )
            yield Bar(
                text=f"TTFT p50 of a hit against the best peer, {where}",
                value=_against((*rivals, "openvino"), "hit_p50_ms", dtype=dtype, concurrency=concurrency, best=min),
                limit=1.15,
                is_floor=False,
            )
        yield Bar(
            text=f"one stream that shares nothing, time per token against the best PyTorch peer, {dtype}",
            value=_single_against(("vllm", "transformers", "transformers_cb"), dtype),
            limit=1.1,
            is_floor=False,
        )


def _own_bars() -> Iterator[Bar]:
    for dtype in DTYPES:
        yield Bar(
            text=f"TTFT of a hit against a bare Transformers forward of the suffix, {dtype}",
            value=_figure(f"suffix-{dtype}", lambda figures: figures["ratio"]),
            limit=1.1,
            is_floor=False,
        )
        yield Bar(
            text=f"decode step of 32 sequences on 2,048 tokens, unshared against shared, {dtype}",
            value=_figure(f"decode-{dtype}", lambda f: f["unshared_step_ms"] / f["shared_step_ms"]),
            limit=2.5,
            is_floor=True,
        )
    yield Bar(
        text="growth of a decode step where it is steepest, log against log",
        value=_figure("growth", lambda figures: max(axis["steepest"] for axis in figures["axes"].values())),
        limit=1.15,
        is_floor=False,
        form="{:.2f}",
    )
    for kind in ("match", "commit", "evict"):
        yield Bar(
            text=f"cost of a block to {kind} in the largest store against the smallest",
            value=_figure("store", itemgetter(f"{kind}_growth")),
            limit=1.5,
            is_floor=False,
        )


def _policy_bars() -> Iterator[Bar]:
    wanted = (
        ("mooncake_conversation", 512_000, 0.085),
        ("mooncake_conversation", 2_000_000, 0.16),
        ("mooncake_conversation", 8_000_000, 0.28),
        ("tau_bench", 8_000, 0.6),
    )
    for trace, capacity, limit in wanted:
        text = f"prompt tokens reused on {trace}, {capacity:,} tokens"
        yield Bar(text=text, value=_policy(trace, capacity), limit=limit, is_floor=True, form="{:.1%}")
    yield Bar(
        text="reuse above LRU where it is least, points",
        value=_worst_policy(lambda figures: 100 * (figures["token_hit_rate"] - figures["lru_token_hit_rate"])),
        limit=-0.5,
        is_floor=True,
        form="{:.2f}",
    )
    yield Bar(
        text="block operations of the policy per second where they are fewest",
        value=_worst_policy(lambda figures: figures["block_operations_per_s"]),
        limit=50_000,
        is_floor=True,
        form="{:,.0f}",
    )


BARS: tuple[Bar, ...] = (*_load_bars(), *_own_bars(), *_policy_bars())
