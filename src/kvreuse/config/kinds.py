"""How an option is declared and judged, and the kinds of values: how each is read from text, what it allows.

Knows text and values. Knows nothing of which options exist.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from kvreuse.errors import ConfigError

__all__ = ["Kind", "Option", "boolean", "byte_size", "choice", "integer", "json_object", "number", "option", "optional",
           "text", "weights"]  # fmt: skip

_MASK = "********"
_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` reads a value from text (ValueError or KeyError: it cannot); `accepts` judges one; `allowed` says it."""

    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    allowed: str

    def read(self, raw: str) -> Any:
        """The value; text that is none stays text, which no kind but text accepts."""
        try:
            return self.parse(raw)
        except (ValueError, KeyError, OverflowError):
            return raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What is declared of one option.

    key: its name in serving.properties. env: further environment variables that set it, strongest first.
    """

    key: str = ""
    kind: Kind
    doc: str
    unit: str = ""
    default: Any = None
    env: tuple[str, ...] = ()
    secret: bool = False

    def check(self, value: Any, *, shown_as: str | None = None, source: str = "") -> None:
        """Raise ConfigError that names the option, the value, what is allowed and, if it is known, where it was set."""
        if not self.kind.accepts(value):
            shown = _MASK if self.secret else f"'{value if shown_as is None else shown_as}'"
            hint = f"\nhint: it is set by {source}" if source else ""
            raise ConfigError(f"{self.key} is {shown}, allowed is {self.kind.allowed}{hint}")

    def shown(self, value: Any) -> str:
        """The value as it would be written in serving.properties; secrets are masked."""
        if value is None:
            return "auto"
        if self.secret:
            return _MASK
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:.12g}"
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        return ",".join(f"{part:.12g}" for part in value) if isinstance(value, tuple) else str(value)


def option(default: T, kind: Kind, doc: str, **more: Any) -> T:
    """Declare a field of Config; `more` are further fields of Option. The kind of one that is None is optional.

    `key` is needed only where it is not `option.<field>`, `unit` only where the field's name does not end in it.
    """
    judged = optional(kind) if default is None else kind
    declaration: T = field(default=default, metadata={"option": Option(kind=judged, doc=doc, default=default, **more)})
    return declaration


def integer(low: int, high: int) -> Kind:
    """An int in [low, high]."""
    return Kind(int, lambda value: type(value) is int and low <= value <= high, f"an integer from {low} to {high}")


def number(low: float, high: float, *, above_low: bool = False) -> Kind:
    """A finite float in [low, high], or in (low, high] with `above_low`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (value > low if above_low else value >= low) and value <= high

    start = f"above {low:g} and up" if above_low else f"from {low:g}"
    return Kind(float, accepts, f"a number {start} to {high:g}")


def boolean() -> Kind:
    """A bool, written true or false in any case."""
    values = {"true": True, "false": False}
    return Kind(lambda raw: values[raw.lower()], lambda value: isinstance(value, bool), "true or false")


def choice(*values: str, **synonyms: str) -> Kind:
    """One of `values`; case is ignored and `synonyms` are translated when read from text."""
    spellings = {value.lower(): value for value in values} | synonyms
    allowed = " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
    return Kind(lambda raw: spellings[raw.lower()], lambda value: value in values, allowed)


def text(allowed: str) -> Kind:
    """Any text that is not blank."""
    return Kind(str, lambda value: isinstance(value, str) and bool(value.strip()), allowed)


def byte_size(low: int) -> Kind:
    """An int of at least `low` bytes, read from 1048576, 512MiB, 1.5GB ..."""

    def parse(raw: str) -> int:
        match = _BYTE_SIZE.fullmatch(raw.lower())
        if match is None:
            raise ValueError(raw)
        return int(Fraction(match[1]) * _BYTE_UNITS[match[2]])

    allowed = f"a size of at least {low} bytes, such as 512MiB, 2GiB or 1000000000"
    return Kind(parse, lambda value: type(value) is int and value >= low, allowed)


def json_object() -> Kind:
    """A dict, written as a JSON object."""
    return Kind(json.loads, lambda value: isinstance(value, dict), "a JSON object")


def weights(count: int) -> Kind:
    """`count` finite floats, none negative, not all zero, separated by commas."""

    def accepts(value: Any) -> bool:
        is_sound = isinstance(value, tuple) and len(value) == count and any(value)
        return is_sound and all(isinstance(part, float) and 0 <= part < math.inf for part in value)

    allowed = f"{count} numbers separated by a comma, none negative, not all 0"
    return Kind(lambda raw: tuple(map(float, raw.split(","))), accepts, allowed)


def optional(kind: Kind) -> Kind:
    """`kind`, or None, which is written auto."""
    return Kind(
        lambda raw: None if raw.lower() == "auto" else kind.parse(raw),
        lambda value: value is None or kind.accepts(value),
        f"auto, or {kind.allowed}",
    )
