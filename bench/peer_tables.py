"""The tables of the comparison with other servers.

Knows the runs that bench.peers.compare writes. Knows nothing of how they are laid out on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.parts import DTYPES
from bench.peers.roster import PEERS
from bench.plot import Bars
from bench.spread import Spread, percentile, spread_of
from bench.table import Results, Table

__all__ = ["peer_spread", "peer_tables"]

_HEAD = (
    "at a time", "peer", "output tokens/s", "TTFT cold p50, ms", "p99", "TTFT hit p50, ms", "p99", "CPU s/request",
    "peak RSS, MiB", "equal texts", "requests", "runs",
)  # fmt: skip
Run = Mapping[str, Any]


def _ttft_ms(key: str, percent: float) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        value = percentile(run[key], percent)
        return None if value is None else value * 1000

    return of


# figure -> (its value in one run, digits shown)
FIGURES: dict[str, tuple[Callable[[Run], float | None], int]] = {
    "output_tokens_per_s": (lambda run: run["output_tokens_per_s"], 1),
    "cold_p50_ms": (_ttft_ms("ttft_cold_s", 50), 0),
    "cold_p99_ms": (_ttft_ms("ttft_cold_s", 99), 0),
    "hit_p50_ms": (_ttft_ms("ttft_hit_s", 50), 0),
    "hit_p99_ms": (_ttft_ms("ttft_hit_s", 99), 0),
    "cpu_s": (lambda run: run["cpu_s_per_request"], 2),
    "peak_rss_mib": (lambda run: run["peak_rss_bytes"] / 2**20, 0),
}


def peer_tables(results: Results) -> Iterator[Table]:
    """One table of the shared-prefix load for each dtype, and one of a single stream."""
    peers = results.get("peers")
    if peers is None:
        return
    for dtype in DTYPES:
        rows = [row for concurrency in _concurrencies(peers) for row in _rows(peers, dtype, concurrency)]
        if rows:
            yield Table(
                name=f"peers-{dtype}",
                title=f"Shared prefixes, {dtype}",
                note=_note(peers, dtype),
                head=_HEAD,
                rows=rows,
                plot=_plot(peers, dtype),
            )
    if any("single_itl_s" in run for run in peers["runs"]):
        yield _single(peers)


def peer_spread(results: Results, figure: str, *, peer: str, dtype: str, concurrency: int) -> Spread | None:
    """A figure of one peer over its repetitions. One that takes a request at a time does as many per second at any
    concurrency; its time to first token there would be its queue, so it has none."""
    peers = results.get("peers", {"runs": []})
    is_serial = PEERS[peer].concurrencies == (1,)
    if is_serial and concurrency > 1 and figure != "output_tokens_per_s":
        return None
    value = FIGURES[figure][0]
    runs = _runs(peers, peer=peer, dtype=dtype, concurrency=1 if is_serial else concurrency)
    return spread_of([number for run in runs if (number := value(run)) is not None])


def _versions(peers: Mapping[str, Any]) -> str:
    """Those that peers told, each behind the name where it does not say it itself."""
    told = {run["peer"]: run["version"] for run in peers["runs"] if run.get("version")}
    named = (version if version[:1].isupper() else f"{PEERS[peer].title} {version}" for peer, version in told.items())
    return "; ".join(dict.fromkeys(named))


def _runs(peers: Mapping[str, Any], **wanted: object) -> list[Run]:
    runs = (run for run in peers["runs"] if "error" not in run)
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def _concurrencies(peers: Mapping[str, Any]) -> list[int]:
    return sorted({run["concurrency"] for run in peers["runs"]})


def _rows(peers: Mapping[str, Any], dtype: str, concurrency: int) -> Iterator[list[str]]:
    for peer in PEERS:
        runs = _runs(peers, peer=peer, dtype=dtype, concurrency=concurrency)
        if runs:
            values = (spread_of([v for run in runs if (v := value(run)) is not None]) for value, _ in FIGURES.values())
            cells = [
                spread.shown(digits) if spread else "-"
                for spread, (_, digits) in zip(values, FIGURES.values(), strict=True)
            ]
            equal, sent = sum(run["num_equal"] for run in runs), [run["num_requests"] for run in runs]
            counts = str(min(sent)) if min(sent) == max(sent) else f"{min(sent)} to {max(sent)}"
            yield [str(concurrency), PEERS[peer].title, *cells, f"{equal} of {sum(sent)}", counts, str(len(runs))]


def _plot(peers: Mapping[str, Any], dtype: str) -> Bars:
    groups: dict[str, dict[str, Spread]] = {}
    for concurrency in _concurrencies(peers):
        group = {}
        for peer in PEERS:
            spread = peer_spread(
                {"peers": peers}, "output_tokens_per_s", peer=peer, dtype=dtype, concurrency=concurrency
            )
            if spread:
                group[PEERS[peer].title] = spread
        groups[f"{concurrency} at a time"] = group
    return Bars(unit="output tokens/s", groups=groups)


def _single(peers: Mapping[str, Any]) -> Table:
    groups: dict[str, dict[str, Spread]] = {}
    for dtype in DTYPES:
        itl_s = {peer: _runs(peers, peer=peer, dtype=dtype, concurrency=1) for peer in PEERS}
        spreads = {
            peer: spread_of([value * 1000 for run in runs for value in run["single_itl_s"]])
            for peer, runs in itl_s.items()
        }
        groups[dtype] = {PEERS[peer].title: spread for peer, spread in spreads.items() if spread}
    rows = [
        [PEERS[peer].title, *(_shown(groups[dtype].get(PEERS[peer].title)) for dtype in DTYPES)]
        for peer in PEERS
        if any(PEERS[peer].title in group for group in groups.values())
    ]
    return Table(
        name="peers-single",
        title="One stream that shares nothing",
        note="Time from token to token of one answer behind a prompt of 256 tokens that nobody has seen.",
        head=("peer", *(f"{dtype}, ms per token" for dtype in DTYPES)),
        rows=rows,
        plot=Bars(unit="ms per token", groups=groups),
    )


def _shown(spread: Spread | None) -> str:
    return spread.shown(1) if spread else "-"


def _note(peers: Mapping[str, Any], dtype: str) -> str:
    settings = peers["settings"]
    notes = [
        f"Every run: {settings['workload']}. Each peer has {settings['num_threads']} thread(s) and begins with an "
        "empty cache. Cold: first sight of a template; hit: any later one, also while the first is still computed. "
        f"Equal texts: the same as plain Transformers in float32. Versions: {_versions(peers)}.",
    ]
    if settings["is_quick"]:
        notes.insert(0, "A quick run, to see that all works and not to compare.")
    failed: Sequence[Run] = [run for run in peers["runs"] if "error" in run and run["dtype"] == dtype]
    notes += [f"{PEERS[run['peer']].title} at {run['concurrency']}: failed: {run['error']}." for run in failed]
    if settings["left_out"]:
        notes.append(f"Not installed: {', '.join(PEERS[name].title for name in settings['left_out'])}.")
    serial = [peer.title for peer in PEERS.values() if peer.concurrencies == (1,)]
    notes.append(f"{', '.join(serial)} takes one request at a time: its tokens per second are the same with more.")
    return " ".join(notes)
