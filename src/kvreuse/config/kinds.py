"""Kinds of option values: how each is read from text, which values it allows, how it says so.

Knows text and values. Knows nothing of which options exist.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["Kind", "boolean", "byte_size", "choice", "integer", "json_object", "number", "optional", "text", "weights"]

_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_NO_SYNONYMS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """`parse` reads a value from text (ValueError or KeyError: it cannot); `accepts` judges one; `allowed` says it."""

    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    allowed: str


def integer(low: int, high: int) -> Kind:
    """An int in [low, high]."""
    return Kind(
        parse=int,
        accepts=lambda value: type(value) is int and low <= value <= high,
        allowed=f"an integer from {low} to {high}",
    )


def number(low: float, high: float, *, above_low: bool = False) -> Kind:
    """A finite float in [low, high], or in (low, high] with `above_low`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (value > low if above_low else value >= low) and value <= high

    return Kind(
        parse=float,
        accepts=accepts,
        allowed=f"a number {'above' if above_low else 'from'} {low:g} {'and up ' if above_low else ''}to {high:g}",
    )


def boolean() -> Kind:
    """A bool, written true or false in any case."""
    return Kind(
        parse=lambda raw: {"true": True, "false": False}[raw.lower()],
        accepts=lambda value: isinstance(value, bool),
        allowed="true or false",
    )


def choice(*values: str, synonyms: Mapping[str, str] = _NO_SYNONYMS) -> Kind:
    """One of `values`; case is ignored and `synonyms` are translated when read from text."""
    spellings = {value.lower(): value for value in values} | dict(synonyms)
    return Kind(
        parse=lambda raw: spellings[raw.lower()],
        accepts=lambda value: value in values,
        allowed=values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}",
    )


def text(allowed: str) -> Kind:
    """Any text that is not blank."""
    return Kind(
        parse=lambda raw: raw,
        accepts=lambda value: isinstance(value, str) and bool(value.strip()),
        allowed=allowed,
    )


def byte_size(low: int) -> Kind:
    """An int of at least `low` bytes, read from 1048576, 512MiB, 1.5GB ..."""

    def parse(raw: str) -> int:
        match = _BYTE_SIZE.fullmatch(raw.lower())
        if match is None or match[2] not in _BYTE_UNITS:
            raise ValueError(raw)
        return (
            int(float(match[1]) * _BYTE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _BYTE_UNITS[match[2]]
        )

    return Kind(
        parse=parse,
        accepts=lambda value: type(value) is int and value >= low,
        allowed=f"a size of at least {low} bytes, such as 512MiB, 2GiB or 1000000000",
    )


def json_object() -> Kind:
    """A dict, written as a JSON object."""
    return Kind(parse=json.loads, accepts=lambda value: isinstance(value, dict), allowed="a JSON object")


def weights(count: int) -> Kind:
    """`count` finite floats, none negative, not all zero, separated by commas."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) != count:
            return False
        return all(isinstance(part, float) and math.isfinite(part) and part >= 0 for part in value) and any(value)

    return Kind(
        parse=lambda raw: tuple(float(part) for part in raw.split(",")),
        accepts=accepts,
        allowed=f"{count} numbers separated by a comma, none negative, not all 0",
    )


def optional(kind: Kind) -> Kind:
    """`kind`, or None, which is written auto."""
    return Kind(
        parse=lambda raw: None if raw.lower() == "auto" else kind.parse(raw),
        accepts=lambda value: value is None or kind.accepts(value),
        allowed=f"auto, or {kind.allowed}",
    )
