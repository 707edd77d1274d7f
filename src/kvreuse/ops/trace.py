"""Requests as a planner sees them: when, how long, and which blocks they share.

Knows files of four kinds. Knows nothing of models, caches or routing.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.files import read_lines
from kvreuse.ops.lint.prompts import read_prompts, splitter
from kvreuse.ops.lint.template import plain

__all__ = ["Trace", "TraceRequest", "add_trace_flags", "read_trace", "read_trace_of"]

_MAX_BLOCK_REFS = 800_000  # beyond it blocks are merged, so that a trace of any length is simulated in a minute
_SESSION_GAP_S = 60.0
_LONGEST_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks`: one number per block of the prompt, a partial last one included; equal only after equal prefixes."""

    arrival_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    blocks: tuple[int, ...]
    session: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival; a block holds `block_size` tokens."""

    requests: list[TraceRequest]
    block_size: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        return max(self.requests[-1].arrival_s - self.requests[0].arrival_s, 1e-9)


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """What every tool that reads a trace takes."""
    parser.add_argument("trace", help="requests: lines with hash_ids, sessions, or prompts")
    parser.add_argument("--block-size", metavar="N", type=at_least(1), default=0, help="tokens of a block of the file")
    parser.add_argument("--tokenizer", metavar="T", help="of a file of prompts: demo, or a folder with tokenizer.json")
    parser.add_argument(
        "--rate", metavar="R", type=float, default=1.0, help="requests per second of prompts without time"
    )


def read_trace_of(args: argparse.Namespace) -> Trace:
    """The trace that the flags name. Raises ConfigError."""
    return read_trace(args.trace, block_size=args.block_size, tokenizer=args.tokenizer, rate=args.rate)


def read_trace(
    path: str, *, block_size: int = 0, tokenizer: str | None = None, rate: float = 1.0, is_exact: bool = False
) -> Trace:
    """block_size: tokens of a block of the file, where it does not say so itself. rate: requests/s of a prompt file.
    is_exact: however long it is, its blocks are not merged into larger ones.

    Kinds: lines with hash_ids, input_length, output_length and timestamp (in ms; in s beside a chat_id); one session
    per line with its requests; prompts as `kvreuse lint` reads them, with time or timestamp (s) and max_new_tokens.
    Raises ConfigError.
    """
    rows = read_lines(path)
    try:
        found, size = _rows(rows, block_size, tokenizer, rate)
        ordered = sorted(found, key=lambda row: row.arrival_s)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no trace that is known: {error!r}") from error
    merge = 1 if is_exact else 1 + sum(len(run) for row in ordered for run in row.runs) // _MAX_BLOCK_REFS
    return Trace(list(_interned(ordered, size, merge)), size * merge)


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as the file has it. `runs`: the names of its blocks, in one run or more, all of `scope`."""

    arrival_s: float
    num_prompt: int
    num_new: int
    runs: list[Sequence[Any]]
    session: str = ""
    scope: str = ""


def _runs(ids: list[Any]) -> list[Sequence[Any]]:
    """From block names, or from [start, length] of numbers."""
    is_short = bool(ids) and isinstance(ids[0], list)
    return [range(start, start + length) for start, length in ids] if is_short else [ids]


def _rows(rows: list[Any], block_size: int, tokenizer: str | None, rate: float) -> tuple[Iterable[_Row], int]:
    first = rows[0] if isinstance(rows[0], Mapping) else {}
    if "hash_ids" in first:
        return _lines(rows), block_size or _block_size(rows)
    if "requests" in first:
        return _sessions(rows), block_size or int(first["block_size"])
    return _prompts(rows, block_size or 32, tokenizer, rate), block_size or 32


def _block_size(rows: list[Any]) -> int:
    """The power of two with which every prompt has as many blocks as names, whether a partial one has a name or not."""
    for power in range(15, -1, -1):
        if all(len(r["hash_ids"]) - (r["input_length"] >> power) in (0, 1) for r in rows):
            return 1 << power
    raise ValueError("the size of its blocks does not follow from it, say it")


def _lines(rows: list[Any]) -> Iterator[_Row]:
    scale = 1.0 if "chat_id" in rows[0] else 1e-3
    for row in rows:
        num_new, session = row.get("output_length", 1), str(row.get("session_id", ""))
        yield _Row(row["timestamp"] * scale, row["input_length"], num_new, _runs(row["hash_ids"]), session)


def _sessions(rows: list[Any]) -> Iterator[_Row]:
    """Sessions whose own clocks start at 0: they begin one after another at random, a minute apart on average."""
    chance, start_s = random.Random(0), 0.0
    for row in (row for row in rows if "requests" in row):
        yield from _session(row["requests"], start_s, str(row["id"]))
        start_s += chance.expovariate(1 / _SESSION_GAP_S)


def _session(requests: list[Any], start_s: float, name: str) -> Iterator[_Row]:
    now_s, before_s = start_s, None
    for request in requests:
        now_s += 0.0 if before_s is None else min(request["t"] - before_s, _LONGEST_PAUSE_S)
        before_s = request["t"]
        if "requests" in request:
            yield from _session(request["requests"], now_s, name)
        else:
            yield _Row(now_s, request["in"], request.get("out", 0), _runs(request["hash_ids"]), name, name)


def _prompts(rows: list[Any], block_size: int, tokenizer: str | None, rate: float) -> Iterator[_Row]:
    split = splitter(tokenizer)
    for number, prompt in enumerate(read_prompts(rows, render=plain)):
        tokens, record = split(prompt.text)[0], prompt.record or {}
        blocks: list[Any] = [tuple(tokens[i : i + block_size]) for i in range(0, len(tokens), block_size)]
        arrival_s = float(record.get("time", record.get("timestamp", number / rate)))
        num_new = int(record.get("max_new_tokens") or (record.get("parameters") or {}).get("max_new_tokens") or 64)
        yield _Row(arrival_s, len(tokens), num_new, [blocks], str(record.get("session", "")))


def _interned(rows: Iterable[_Row], block_size: int, merge: int) -> Iterator[TraceRequest]:
    """Block ids become numbers of (parent, id); a request whose prompt goes on where another's ended is its session."""
    numbers: dict[tuple[int, Any], int] = {}
    ends: dict[int, str] = {}
    for row in rows:
        names, num_known = list(chain.from_iterable(row.runs)), len(numbers)
        names = names[merge - 1 :: merge] + names[-1:] * bool(len(names) % merge)
        node, blocks = numbers.setdefault((-1, row.scope), len(numbers)), []
        for name in names:
            node = numbers.setdefault((node, name), len(numbers))
            blocks.append(node)
        session = row.session or next((ends[b] for b in reversed(blocks) if b in ends), "") or f"s{len(numbers)}"
        whole = blocks[: (row.num_prompt - 1) // (block_size * merge)]
        if whole and whole[-1] >= num_known:
            ends[whole[-1]] = session
        yield TraceRequest(row.arrival_s, row.num_prompt, row.num_new, tuple(blocks), session)
