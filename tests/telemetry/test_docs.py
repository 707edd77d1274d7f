"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvreuse.config import OPTIONS
from kvreuse.telemetry.catalog import CATALOG
from kvreuse.telemetry.prometheus import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows(part: int) -> list[str]:
    """The rows of the page's first or second table."""
    text = PAGE.read_text(encoding="utf-8").split("## CloudWatch")[part]
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_every_metric_has_its_row_and_every_row_its_metric() -> None:
    assert rows(0) == [
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.doc} |"
        for spec in METRICS
    ]


def test_every_published_metric_has_its_row_with_what_is_healthy_and_what_to_do() -> None:
    begins = [f"| `{m.name}` | `{m.prometheus}` | {m.unit} | {m.doc} | " for m in CATALOG]
    found = rows(1)
    assert [row[: len(begin)] for row, begin in zip(found, begins, strict=True)] == begins
    advice = [row[len(begin) :].removesuffix(" |").split(" | ") for row, begin in zip(found, begins, strict=True)]
    assert all(len(cells) == 2 and all(cells) for cells in advice)


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_the_prometheus_name_of_a_published_metric_exists(metric: object) -> None:
    known = {spec.name for spec in METRICS}
    names = re.findall(r"kvreuse_\w+", metric.prometheus)  # type: ignore[attr-defined]
    assert names
    assert {name.removesuffix("_sum") for name in names} <= known


def test_every_option_that_the_page_names_exists() -> None:
    named = set(re.findall(r"option\.\w+", PAGE.read_text(encoding="utf-8")))
    assert named <= {option.key for option in OPTIONS.values()}
