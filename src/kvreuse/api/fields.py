"""Reads one JSON object field by field and says exactly what is wrong with a bad one.

Knows JSON types and ranges. Knows nothing of schemas, prompts or HTTP. Values that may be prompt text are never
repeated in a message.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvreuse.errors import RequestError

__all__ = ["Fields", "check_text", "nearest", "parse_object"]

_MAX_SHOWN = 64


def parse_object(data: str | bytes | bytearray) -> dict[str, object]:
    """The JSON object in `data`, or RequestError 400. NaN and Infinity are not JSON."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON: a number is too long or the nesting too deep") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {_type_name(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not allowed", "", 0)


def check_text(value: object, *, param: str) -> str:
    """`value` as text that UTF-8 can carry (JSON may smuggle in half a surrogate pair)."""
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string, got {_type_name(value)}", param=param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} holds half a surrogate pair at character {error.start}", param=param) from None
    return value


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` when one of `known` is close to `name`, else the empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _type_name(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object. A field that is absent or null takes its default. `where` is the path to the object."""

    values: Mapping[str, object]
    where: str = ""

    def param(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def refuse_unknown(self, known: Collection[str]) -> None:
        """RequestError naming the first unknown field and the nearest known one."""
        for name in self.values:
            if name not in known:
                shown = name[:_MAX_SHOWN].encode("ascii", "backslashreplace").decode()
                raise RequestError(f"unknown parameter {shown!r}{nearest(name, known)}", param=self.param(shown))

    def error(self, name: str, allowed: str) -> RequestError:
        value = self.values.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
        got = f"{value}" if number else _type_name(value) if not isinstance(value, str) else "another string"
        return RequestError(f"{self.param(name)} must be {allowed}, got {got}", param=self.param(name))

    def integer(self, name: str, *, default: int, low: int, high: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON knows one kind of number, and some clients write 64.0
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, default: float, low: float, high: float, above_low: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with `above_low`."""
        value = self.values.get(name)
        if value is None:
            return default
        allowed = f"a number {'above' if above_low else 'from'} {low:g} {'up to' if above_low else 'to'} {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise self.error(name, allowed)
        if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
            raise self.error(name, allowed)
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, options: Sequence[str], *, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if value not in options:
            raise self.error(name, "one of " + ", ".join(options))
        return str(value)

    def texts(self, name: str, *, max_items: int) -> tuple[str, ...]:
        """A string or an array of up to `max_items` strings, none of them empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > max_items or not all(isinstance(x, str) and x for x in items):
            raise self.error(name, f"a non-empty string or up to {max_items} of them")
        return tuple(check_text(item, param=self.param(name)) for item in items)

    def token_ids(self, name: str, *, max_items: int) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) and len(value) <= max_items else [None]
        if not all(type(item) is int and 0 <= item < 2**31 for item in items):
            raise self.error(name, f"an array of up to {max_items} token ids")
        return tuple(items)

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value
