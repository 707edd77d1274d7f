"""Reads the text of a Java properties file, which serving.properties is.

Knows the format. Knows nothing of the options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvreuse.errors import ConfigError

__all__ = ["parse_properties"]

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
# The key ends at the first unescaped '=', ':' or blank; one '=' or ':' may follow, with blanks around it.
_PAIR = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)


def parse_properties(text: str) -> dict[str, str]:
    """Return key -> value in file order; blanks at the end of a value are dropped.

    Comments, continuation lines and escapes are as in Java. A key that is given twice raises ConfigError: Java lets
    the last one win in silence, which hides a mistake.
    """
    pairs: dict[str, str] = {}
    first_seen: dict[str, int] = {}
    for line_number, line in _logical_lines(text):
        match = _PAIR.fullmatch(line)
        assert match is not None  # every part of the pattern may be empty
        key, value = map(_unescape, match.groups())
        if key in pairs:
            raise ConfigError(f"{key} is given twice, on lines {first_seen[key]} and {line_number}")
        pairs[key], first_seen[key] = value.rstrip(), line_number
    return pairs


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, joined line) without comments and blank lines."""
    start, joined = 0, ""
    for line_number, raw in enumerate(text.splitlines(), start=1):
        line = raw.lstrip()
        if not start and (not line or line[0] in "#!"):
            continue
        start = start or line_number
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        joined += line[:-1] if is_continued else line
        if not is_continued:
            yield start, joined
            start, joined = 0, ""
    if joined:
        yield start, joined


def _unescape(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROL.get(code, code)

    return _ESCAPE.sub(replace, text)
