"""Measures the peers that are installed, one server at a time, and writes what was measured as JSON.

    python -m bench.peers.compare --json peers.json --quick

Knows sessions, repetitions and figures of a run. Knows nothing of how a peer is started or what is made of the figures.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.peers.load import Answer, ask, ask_all
from bench.peers.process import PeerError, interrupted_by_sigterm, running, usage
from bench.peers.prompts import PREFIX_TOKENS, Load, PeerPrompt, templated, unrelated
from bench.peers.reference import agrees, digest, references
from bench.peers.roster import FOLDER, MODEL, PEERS, ROOT, Launch, Peer, environment
from kvreuse.ops.bench.server import free_port
from kvreuse.ops.bench.workload import load_tokenizer

__all__ = ["Comparison", "main", "make_parser"]

FULL = Load(num_templates=8, prefix_tokens=PREFIX_TOKENS, max_tokens=64, num_requests={1: 16, 8: 32, 32: 64})
QUICK = Load(num_templates=2, prefix_tokens=(512,), max_tokens=16, num_requests={1: 8, 8: 8})
DTYPES = ("float32", "bfloat16")
_NUM_SINGLE = 3
_SINGLE_TOKENS = 256
# Long and short, first sight and repeat: some peers compile what they have not done before.
_WARM_TOKENS = (1100, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Session:
    """One server from start to stop. concurrencies: runs on it, each with an empty cache."""

    peer: Peer
    dtype: str
    concurrencies: tuple[int, ...]


class Comparison:
    """All runs: `records` holds one object for each run, or for each session that failed.

    limit_s: a run begins no further request after it. budget_s: for all repetitions but the first; where it is not
    enough for all peers, the quickest ones are repeated.
    """

    def __init__(self, load: Load, *, num_threads: int, limit_s: float, budget_s: float) -> None:
        self._load = load
        self._num_threads = num_threads
        self._limit_s = limit_s
        self._budget_s = budget_s
        tokenizer = load_tokenizer("demo")
        self._prompts = templated(load, tokenizer)
        self._single_prompts = unrelated(tokenizer, num_tokens=_SINGLE_TOKENS, count=_NUM_SINGLE)
        self._warm_prompts = [
            unrelated(tokenizer, num_tokens=length, count=_NUM_SINGLE + 1)[-1] for length in _WARM_TOKENS
        ]
        self._references: list[str] = []
        self.records: list[dict[str, Any]] = []

    def prepare(self) -> None:
        """Find the texts to compare with. PeerError when there is no model, or plain Transformers cannot be asked."""
        if not MODEL.exists():
            raise PeerError("has no model: run bench/peers/setup.sh")
        prompts = [prompt.text for prompt in self._prompts]
        self._references = references(
            prompts,
            model=digest(MODEL / "model.safetensors"),
            max_tokens=self._load.max_tokens,
            compute=self._plain_texts,
            file=FOLDER / "reference.json",
        )

    def run(self, peers: Sequence[Peer], *, dtypes: Sequence[str], num_repetitions: int) -> Iterator[None]:
        """Measure; yields whenever records were added."""
        sessions = [session for dtype in dtypes for peer in peers for session in self._sessions(peer, dtype)]
        took_s = dict.fromkeys((peer.name for peer in peers), 0.0)
        ends_at = math.inf
        for repetition in range(num_repetitions):
            fitting = _fitting(took_s, ends_at - time.monotonic())
            for session in [s for s in sessions if s.peer.name in fitting]:
                at = time.monotonic()
                self._measure(session, repetition)
                if repetition == 0:
                    took_s[session.peer.name] += time.monotonic() - at
                yield
            if repetition == 0:
                ends_at = time.monotonic() + self._budget_s

    def _sessions(self, peer: Peer, dtype: str) -> list[_Session]:
        concurrencies = tuple(peer.concurrencies or self._load.num_requests)
        groups = [concurrencies] if peer.reset else [(concurrency,) for concurrency in concurrencies]
        return [_Session(peer=peer, dtype=dtype, concurrencies=group) for group in groups]

    def _measure(self, session: _Session, repetition: int) -> None:
        facts = {"peer": session.peer.name, "dtype": session.dtype, "repetition": repetition}
        began_at = time.monotonic()
        try:
            with self._server(session) as (url, pid):
                facts |= {"version": _version(url, session.peer), "start_s": time.monotonic() - began_at}
                self._warm(url, max(session.concurrencies))
                for concurrency in session.concurrencies:
                    if session.peer.reset:
                        _request(url, "POST", session.peer.reset)
                    record = self._one_run(url, pid, concurrency)
                    if concurrency == 1:
                        record["single_itl_s"] = self._single(url)
                    self._add({**facts, "concurrency": concurrency, **record})
        except PeerError as error:
            self._add({**facts, "concurrency": session.concurrencies[0], "error": str(error)})

    def _one_run(self, url: str, pid: int, concurrency: int) -> dict[str, Any]:
        prompts = self._prompts[: self._load.num_requests[concurrency]]
        before = usage(pid)
        answers = ask_all(
            url,
            [prompt.text for prompt in prompts],
            concurrency=concurrency,
            max_tokens=self._load.max_tokens,
            limit_s=self._limit_s,
        )
        after = usage(pid)
        return {
            **_figures(prompts, answers),
            "num_equal": sum(agrees(a.text, r) for a, r in zip(answers, self._references, strict=False)),
            "cpu_s_per_request": (after.cpu_s - before.cpu_s) / len(answers),
            "peak_rss_bytes": after.peak_rss_bytes,
        }

    def _warm(self, url: str, concurrency: int) -> None:
        for text in self._warm_prompts * 2:
            ask(url, text, max_tokens=4)
        if concurrency > 1:
            repeated = [f"{self._warm_prompts[0]} {number}" for number in range(8)]
            ask_all(url, repeated, concurrency=concurrency, max_tokens=4, limit_s=self._limit_s)

    def _single(self, url: str) -> list[float]:
        answers = [ask(url, text, max_tokens=self._load.max_tokens) for text in self._single_prompts]
        return [answer.itl_s for answer in answers if answer.itl_s is not None]

    def _plain_texts(self, prompts: Sequence[str]) -> Iterator[str]:
        print(f"computing {len(prompts)} texts to compare with", file=sys.stderr)
        with self._server(_Session(peer=PEERS["transformers"], dtype="float32", concurrencies=(1,))) as (url, _):
            for prompt in prompts:
                yield ask(url, prompt, max_tokens=self._load.max_tokens).text

    @contextmanager
    def _server(self, session: _Session) -> Iterator[tuple[str, int]]:
        port = free_port()
        launch = Launch(
            dtype=session.dtype, num_threads=self._num_threads, concurrency=max(session.concurrencies), port=port
        )
        url = f"http://127.0.0.1:{port}"
        peer = session.peer
        variables = environment(peer, self._num_threads)
        with running(peer.command(launch), health=url + peer.health, environment=variables, cwd=ROOT) as pid:
            yield url, pid

    def _add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        what = "{peer} {dtype}, {concurrency} at a time".format_map(record)
        done = record.get("error") or "{output_tokens_per_s:.1f} output tokens/s in {duration_s:.0f} s".format_map(
            record
        )
        print(f"{what}: {done}", file=sys.stderr)


def _fitting(took_s: Mapping[str, float], left_s: float) -> set[str]:
    """As many peers as can be measured again in that time, the quickest first."""
    ordered = sorted(took_s, key=took_s.__getitem__)
    ends_s = accumulate(took_s[name] for name in ordered)
    return {name for name, end_s in zip(ordered, ends_s, strict=True) if end_s <= left_s}


def _figures(prompts: Sequence[PeerPrompt], answers: Sequence[Answer]) -> dict[str, Any]:
    """Of the requests that were sent; prompts beyond them do not count."""
    pairs = list(zip(prompts, answers, strict=False))
    duration_s = max(answer.ended_at for answer in answers) - min(answer.started_at for answer in answers)
    return {
        "num_requests": len(answers),
        "duration_s": duration_s,
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / duration_s,
        "ttft_cold_s": [answer.ttft_s for prompt, answer in pairs if prompt.is_first],
        "ttft_hit_s": [answer.ttft_s for prompt, answer in pairs if not prompt.is_first],
        "cached_tokens": [answer.cached_tokens for answer in answers],
    }


def _described(load: Load) -> str:
    lengths = ", ".join(f"{length:,}" for length in sorted(load.prefix_tokens))
    requests = ", ".join(f"{requests} at {concurrency}" for concurrency, requests in load.num_requests.items())
    return f"{load.num_templates} templates of {lengths} tokens, {load.max_tokens} new tokens, {requests} at a time"


def _version(url: str, peer: Peer) -> str:
    if peer.version:
        return peer.version
    body = _request(url, "GET", peer.health)
    return str(json.loads(body)["version"]) if body.startswith(b"{") else ""


def _request(url: str, method: str, route: str) -> bytes:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, route)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise PeerError(f"{method} {route} answered {response.status}")
    return body


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, nargs="+", default=list(PEERS), help="those that are installed")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--threads", type=int, default=1, help="of every peer")
    parser.add_argument("--repetitions", type=int, default=3, help="as far as --minutes allow")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="for the repetitions after the first, quickest peers first"
    )
    parser.add_argument("--run-seconds", type=float, default=90.0, help="a run begins no further request after this")
    parser.add_argument("--quick", action="store_true", help="2 templates of 512 tokens, 8 requests of 16 new tokens")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written after every session")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when nothing could be measured."""
    args = make_parser().parse_args(argv)
    load = QUICK if args.quick else FULL
    comparison = Comparison(
        load, num_threads=args.threads, limit_s=args.run_seconds, budget_s=0 if args.quick else args.minutes * 60
    )
    try:
        comparison.prepare()
    except PeerError as error:
        print(f"compare.py: error: plain Transformers {error}", file=sys.stderr)
        return 1
    peers = [PEERS[name] for name in args.peer if PEERS[name].is_installed]
    left_out = [name for name in args.peer if not PEERS[name].is_installed]
    for _ in comparison.run(peers, dtypes=args.dtype, num_repetitions=args.repetitions):
        settings = {
            "num_threads": args.threads,
            "is_quick": args.quick,
            "run_seconds": args.run_seconds,
            "left_out": left_out,
            "workload": _described(load),
        }
        args.json.write_text(json.dumps({"settings": settings, "runs": comparison.records}, indent=1))
    return 0 if any("error" not in record for record in comparison.records) else 1


if __name__ == "__main__":
    interrupted_by_sigterm()
    sys.exit(main())
