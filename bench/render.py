"""Writes bench/RESULTS.md and one plot per table from the figures that were kept.

Knows the page. Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.bars import bars_table
from bench.own_tables import own_tables
from bench.peer_tables import peer_tables
from bench.plot import svg
from bench.table import Results, Table, markdown

__all__ = ["write_page"]

_TITLES = {
    "date": "Date",
    "commit": "Commit",
    "cpu": "Processor",
    "num_cpus": "Processors",
    "num_threads": "Threads of every model",
    "versions": "Versions",
}


def write_page(results: Results, *, facts: Mapping[str, object], faults: Mapping[str, str], page: Path) -> None:
    """`page`, and its plots in the folder plots beside it. faults: result name -> the sentence it failed with."""
    plots = page.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    tables = [bars_table(results), *peer_tables(results), *own_tables(results)]
    for table in tables:
        if table.plot is not None:
            (plots / f"{table.name}.svg").write_text(svg(table.plot), encoding="utf-8")
    page.write_text("\n\n".join(_parts(tables, facts, faults)) + "\n", encoding="utf-8")


def _parts(tables: list[Table], facts: Mapping[str, object], faults: Mapping[str, str]) -> Iterator[str]:
    yield "# Results"
    yield (
        "Written by `make bench` ([docs/bench.md](../docs/bench.md)). A figure is the median of its repetitions, the "
        "least and the most in brackets."
    )
    yield "\n".join(f"* {title}: {facts[key]}" for key, title in _TITLES.items() if facts.get(key))
    if faults:
        yield "\n".join(f"* **{name} failed**: {sentence}" for name, sentence in faults.items())
    for table in tables:
        yield f"## {table.title}"
        if table.note:
            yield table.note
        yield markdown(table.head, table.rows)
        if table.plot is not None:
            yield f"![{table.title}](plots/{table.name}.svg)"
