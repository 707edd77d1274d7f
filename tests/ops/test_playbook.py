"""The playbook names only metrics, options, reasons and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from kvreuse.cli.main import COMMANDS
from kvreuse.config import OPTIONS
from kvreuse.telemetry.prometheus import METRICS
from kvreuse.types import MissReason

TEXT = (Path(__file__).parents[2] / "docs" / "playbook.md").read_text("utf-8")


def test_there_are_ten_reasons_each_with_metric_command_and_option() -> None:
    rows = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 11)]
    assert all(len(row) == 5 and "`kvreuse " in row[3] for row in rows)


def test_every_metric_exists() -> None:
    assert set(re.findall(r"kvreuse_\w+", TEXT)) <= {metric.name for metric in METRICS}


def test_every_option_exists() -> None:
    assert set(re.findall(r"option\.\w+", TEXT)) <= {option.key for option in OPTIONS.values()}


def test_every_reason_exists() -> None:
    assert set(re.findall(r'reason="(\w+)"', TEXT)) <= {reason.value for reason in MissReason}


def test_every_command_exists() -> None:
    assert set(re.findall(r"`kvreuse (\w+)", TEXT)) <= set(COMMANDS)
