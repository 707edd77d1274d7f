"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

from pathlib import Path

from kvreuse.telemetry.prometheus import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_has_its_row_and_every_row_its_metric() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.doc} |"
        for spec in METRICS
    ]
