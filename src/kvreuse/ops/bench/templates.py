"""`kvreuse bench templates`: a burst of variants of one template, first sight and hits, and load with reuse on and off.

Knows the order of the measurement. Knows nothing of HTTP, of processes or of how figures are worked out.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.figures import Burst, Leg, Outcome, Settings, report_of
from kvreuse.ops.bench.load import Ask, Client, Reply
from kvreuse.ops.bench.numbers import add_numbers
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.report import Report
from kvreuse.ops.bench.server import serving
from kvreuse.ops.bench.workload import Workload, load_tokenizer

__all__ = ["add_flags", "measure"]

_HITS_PER_TEMPLATE = 4
_REQUEST_TIMEOUT_S = 600


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement; every default is what `make demo` shows."""
    # name, default, lowest, help
    numbers = (
        ("templates", 4, 1, "templates that the load is drawn from"),
        ("variants", 100, 1, "variants of one template sent at once"),
        ("requests", 16, 1, "requests of the load, each with reuse on and off"),
        ("concurrency", 8, 1, "requests of the load in flight"),
        ("prefix-tokens", 1024, 64, "tokens that variants share"),
        ("own-tokens", 48, 16, "further tokens of each prompt"),
        ("max-new-tokens", 16, 1, "tokens of each answer"),
        ("seed", 0, 0, "the same seed gives the same prompts"),
    )
    add_numbers(parser, numbers)
    parser.add_argument("--model", default="demo", help="model to serve: demo, a folder or a hub id")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV of the served model")
    parser.add_argument("--url", help="measure this running server and start none")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="where tokenizer.json is, if --model has none")


def measure(args: argparse.Namespace) -> Report:
    """Run it all. Raises ConfigError when it cannot begin, LoadError when the server does not answer as it should."""
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    workload = Workload(
        load_tokenizer(args.tokenizer or args.model),
        prefix_tokens=args.prefix_tokens,
        own_tokens=args.own_tokens,
        seed=args.seed,
        marker=f"Copy {secrets.token_hex(4)}. " if args.url else "",
    )
    progress = Progress(sys.stderr, num_steps=_Run.num_requests(settings) + 1)
    try:
        progress.start("starting the server" if args.url is None else "looking for the server")
        with _server(settings) as url:
            client = Client(url)
            if not client.is_ready():
                raise ConfigError(f"{url}/ping does not answer 200")
            progress.advance()
            outcome = _Run(settings, workload, client, progress).outcome()
    finally:
        progress.close()
    return report_of(settings, outcome)


def _server(settings: Settings) -> AbstractContextManager[str]:
    if settings.url is not None:
        return nullcontext(settings.url)
    return serving(
        {
            "model_id": settings.model,
            "dtype": settings.dtype,
            # All variants of the burst shall be in flight at once.
            "max_batch_size": max(64, settings.variants),
            "request_timeout_s": _REQUEST_TIMEOUT_S,
        }
    )


class _Run:
    def __init__(self, settings: Settings, workload: Workload, client: Client, progress: Progress) -> None:
        self._settings = settings
        self._workload = workload
        self._client = client
        self._progress = progress

    @staticmethod
    def num_requests(settings: Settings) -> int:
        """Of a whole run."""
        num_one_by_one = (_num_templates(settings) - 1) * (1 + _HITS_PER_TEMPLATE)
        return 1 + settings.variants + num_one_by_one + 2 * settings.requests

    def outcome(self) -> Outcome:
        """The burst comes first: only then is the peak of a fresh server its own."""
        self._progress.start("warming up")
        # Code paths and memory are warm afterwards, the store is as empty as before.
        self._ask(_num_templates(self._settings), reuse=False)
        burst = self._burst()
        cold, hits = self._latency()
        on, off = self._load()
        return Outcome(burst=burst, cold=cold, hits=hits, on=on, off=off)

    def _burst(self) -> Burst:
        self._progress.start(f"{self._settings.variants} variants of one template at once")
        prompts = [self._workload.variant(0) for _ in range(self._settings.variants)]
        before = self._client.metrics()
        replies = self._ask_all(prompts, reuse=True)
        return Burst(replies=replies, before=before, after=self._client.metrics())

    def _latency(self) -> tuple[list[Reply], list[Reply]]:
        """One at a time: the first request of a template, then others of it."""
        self._progress.start("first sight and hits, one at a time")
        cold: list[Reply] = []
        hits: list[Reply] = []
        for template in range(1, _num_templates(self._settings)):
            cold.append(self._ask(template))
            hits += [self._ask(template) for _ in range(_HITS_PER_TEMPLATE)]
        return cold, hits

    def _load(self) -> tuple[Leg, Leg]:
        """Batch by batch, each with reuse on and off, in changing order so that a drift of the machine hits both."""
        size = self._settings.concurrency
        prompts = self._workload.draw(self._settings.requests, num_templates=self._settings.templates)
        legs = {True: Leg(), False: Leg()}
        for start in range(0, len(prompts), size):
            for reuse in (True, False) if start // size % 2 == 0 else (False, True):
                self._progress.start(f"{size} at a time, reuse {'on' if reuse else 'off'}")
                started_at = time.perf_counter()
                legs[reuse].replies += self._ask_all(prompts[start : start + size], reuse=reuse)
                legs[reuse].duration_s += time.perf_counter() - started_at
        return legs[True], legs[False]

    def _ask(self, template: int, *, reuse: bool = True) -> Reply:
        return self._ask_all([self._workload.variant(template)], reuse=reuse)[0]

    def _ask_all(self, prompts: list[str], *, reuse: bool) -> list[Reply]:
        """All at once. Every second one of several is asked for in one piece, the others as streams."""
        new = self._settings.max_new_tokens
        asks = [
            Ask(text=text, max_new_tokens=new, reuse=reuse, is_stream=number % 2 == 0)
            for number, text in enumerate(prompts)
        ]
        return self._client.ask_all(asks, on_reply=self._progress.advance)


def _num_templates(settings: Settings) -> int:
    """0 is that of the burst, the others are measured one request at a time: enough for a median."""
    return max(4, settings.templates)
