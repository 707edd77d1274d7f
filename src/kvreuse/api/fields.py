"""Reads one JSON object field by field and says exactly what is wrong with a bad one.

Knows JSON types and ranges. Knows nothing of schemas, prompts or HTTP. Values that may be prompt text are never
repeated in a message.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard, TypeVar

from kvreuse.errors import RequestError

__all__ = ["Fields", "as_text", "check_text", "is_number", "is_token_ids", "parse_object"]

_MAX_SHOWN = 64

D = TypeVar("D")


def as_text(data: bytes | bytearray) -> str:
    """`data` as UTF-8, or RequestError 400."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None


def parse_object(data: str | bytes | bytearray) -> dict[str, object]:
    """The JSON object in `data`, or RequestError 400. NaN and Infinity are not JSON."""
    try:
        value = json.loads(data if isinstance(data, str) else as_text(data), parse_constant=_refuse_constant)
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


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)


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
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise RequestError(f"unknown parameter {shown!r}{hint}", param=self.param(shown))

    def error(self, name: str, allowed: str) -> RequestError:
        value = self.values.get(name)
        got = "another string" if isinstance(value, str) else _type_name(value)
        if is_number(value) and abs(value) < 1e15:
            got = f"{value}"
        return RequestError(f"{self.param(name)} must be {allowed}, got {got}", param=self.param(name))

    def read(self, name: str, default: D, is_sound: Callable[[Any], bool], allowed: str) -> Any | D:
        """The field, or RequestError 400 that says what is `allowed`."""
        value = self.values.get(name)
        if value is None:
            return default
        if not is_sound(value):
            raise self.error(name, allowed)
        return value

    def integer(self, name: str, *, default: D, low: int, high: int) -> int | D:
        """JSON knows one kind of number, and some clients write 64.0."""
        allowed = f"an integer from {low} to {high}"
        value = self.read(name, default, lambda v: is_number(v) and low <= v <= high and v == int(v), allowed)
        return int(value) if isinstance(value, float) else value

    def number(self, name: str, *, default: D, low: float, high: float, above_low: bool = False) -> float | D:
        """A number in [low, high], or in (low, high] with `above_low`."""

        def is_sound(value: object) -> bool:
            return is_number(value) and low <= value <= high and not (above_low and value == low)

        allowed = f"a number {'above' if above_low else 'from'} {low:g} {'up to' if above_low else 'to'} {high:g}"
        value = self.read(name, default, is_sound, allowed)
        return float(value) if isinstance(value, int) else value

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self.read(name, default, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, name: str, options: Sequence[str], *, default: str) -> str:
        return str(self.read(name, default, lambda value: value in options, "one of " + ", ".join(options)))

    def texts(self, name: str, *, max_items: int) -> tuple[str, ...]:
        """A string or an array of up to `max_items` strings, none of them empty."""
        value = self.values.get(name)
        items = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(items, list) or len(items) > max_items or not all(isinstance(x, str) and x for x in items):
            raise self.error(name, f"a non-empty string or up to {max_items} of them")
        return tuple(check_text(item, param=self.param(name)) for item in items)

    def token_ids(self, name: str, *, max_items: int) -> tuple[int, ...]:
        allowed = f"an array of up to {max_items} token ids"
        return tuple(self.read(name, (), lambda value: is_token_ids(value) and len(value) <= max_items, allowed))

    def objects(self, name: str) -> Sequence[Mapping[str, object]]:
        def is_sound(value: object) -> bool:
            return isinstance(value, list) and all(isinstance(item, dict) for item in value)

        return list(self.read(name, [], is_sound, "an array of objects"))

    def mapping(self, name: str) -> Mapping[str, object]:
        return dict(self.read(name, {}, lambda value: isinstance(value, dict), "an object"))
