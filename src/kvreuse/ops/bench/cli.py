"""`kvreuse bench NAME`: the measurements there are and what they have in common.

Knows names, flags and how a result is shown. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.load import LoadError
from kvreuse.ops.bench.report import Report

__all__ = ["BENCHES", "add_parser", "run"]

# name -> (module with add_flags(parser) and measure(args) -> Report, help)
BENCHES = {
    "decode": ("kvreuse.ops.bench.decode", "one decode step on a shared prefix and on private copies"),
    "precision": ("kvreuse.ops.bench.precision", "what each stored form of KV costs in bytes and in answers"),
    "growth": ("kvreuse.ops.bench.growth", "a decode step as sequences, prefixes, nodes and templates grow"),
    "http": ("kvreuse.ops.bench.sweep", "a server or a SageMaker endpoint under load, by concurrency"),
    "restart": ("kvreuse.ops.bench.restart", "first requests after a kill and on a new instance"),
    "policy": ("kvreuse.ops.bench.policy", "what eviction keeps of a trace of prompts, without a model"),
    "store": ("kvreuse.ops.bench.store", "what the prefix cache costs per block as it grows, without a model"),
    "templates": ("kvreuse.ops.bench.templates", "time, throughput and memory of templated prompts"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` with one subcommand per measurement."""
    parser = subparsers.add_parser("bench", help="measure what reuse brings", description="Measure what reuse brings")
    benches = parser.add_subparsers(title="measurements", metavar="NAME", dest="bench", required=True)
    for name, (module, help_text) in BENCHES.items():
        bench = benches.add_parser(name, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        importlib.import_module(module).add_flags(bench)
        bench.add_argument("--json", metavar="FILE", help="write the figures there, - is stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and show. 0, or 1 when the measurement failed or its answers are wrong: one sentence on stderr.

    Raises ConfigError when it could not begin.
    """
    out = _open(args.json)
    measure: Callable[[argparse.Namespace], Report] = importlib.import_module(BENCHES[args.bench][0]).measure
    try:
        with _terminated_as_interrupted():
            report = measure(args)
    except LoadError as error:
        return _fail(error.message)
    print(report.table, file=sys.stderr if args.json == "-" else sys.stdout)
    if out is not None:
        out.write(json.dumps(report.figures, indent=2) + "\n")
        out.flush()
        if out is not sys.stdout:
            out.close()
    return 0 if report.fault is None else _fail(report.fault)


def _fail(sentence: str) -> int:
    print(f"kvreuse: error: {sentence}", file=sys.stderr)
    return 1


def _open(file: str | None) -> TextIO | None:
    """Before minutes are spent, not after."""
    if file is None or file == "-":
        return sys.stdout if file else None
    try:
        return Path(file).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that a server that was started is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
