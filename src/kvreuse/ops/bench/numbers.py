"""Checks of numbers given as flags.

Knows argparse. Knows nothing of any measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

__all__ = ["add_numbers", "at_least", "many"]

_MAX_NUMBER = 1_000_000


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` to a million."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= _MAX_NUMBER:
            raise argparse.ArgumentTypeError(f"{text} is not an integer from {low} to {_MAX_NUMBER}")
        return int(text)

    return parse


def add_numbers(parser: argparse.ArgumentParser, numbers: Iterable[tuple[str, int, int, str]]) -> None:
    """A flag for each (name, default, lowest, help)."""
    for name, default, low, text in numbers:
        parser.add_argument(f"--{name}", type=at_least(low), default=default, metavar="N", help=text)


def many(one: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argparse type: values of the type `one` with commas between them, smallest first."""
    return lambda text: sorted({one(part) for part in text.split(",")})
