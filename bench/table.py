"""A table of results with its plot.

Knows text. Knows nothing of measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.plot import Bars, Lines

__all__ = ["Results", "Table", "markdown"]

Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """name: of its plot's file. rows: cells as shown, as many as `head` has."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    plot: Bars | Lines | None = None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
