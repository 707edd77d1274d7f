"""What every measurement hands back, and the table that people read.

Knows figures and columns. Knows nothing of any measurement.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from kvreuse import __version__

__all__ = ["Report", "Row", "as_table", "environment", "ratio", "size"]

_WIDTHS = (52, 18, 18, 10)

Row = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """`figures` is for --json. `fault` is one sentence when the answers are wrong, else None."""

    figures: Mapping[str, object]
    table: str
    fault: str | None = None


def environment() -> dict[str, object]:
    """Processors that this process may use, and versions."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    num_cpus = len(os.sched_getaffinity(0))
    return {"num_cpus": num_cpus, "python": platform.python_version(), "kvreuse": __version__, **versions}


def as_table(rows: Sequence[Row]) -> str:
    """One line per row: what, without reuse, with reuse, how many times better."""
    header = ("", "without reuse", "with reuse", "better")
    lines = (
        f"{what:<{_WIDTHS[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True))
        for what, *cells in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def ratio(more: float | None, less: float | None) -> str:
    """How many times; nothing where one of them is not known."""
    return f"{more / less:.1f} x" if more and less else ""


def size(num_bytes: int | None) -> str:
    return "not reported" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
