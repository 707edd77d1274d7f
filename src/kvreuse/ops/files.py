"""Files that tools read and write.

Knows JSON, gzip and paths. Knows nothing of what a record means.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from kvreuse.errors import ConfigError

__all__ = ["read_json", "read_lines", "read_text", "show", "write_json", "write_text"]


def read_text(path: str) -> str:
    """UTF-8, gzipped or not. Raises ConfigError."""
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_lines(path: str) -> list[Any]:
    """The records of a JSON-lines file or a JSON array, gzipped or not; a line that is no JSON is itself.

    Raises ConfigError when it cannot be read or is empty.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except ValueError:
            pass  # lines may begin with a bracket too
    records = [_loads(line) for line in text.splitlines() if line.strip()]
    if not records:
        raise ConfigError(f"{path} holds nothing")
    return records


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises ConfigError."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} holds no JSON: {error}") from error


def show(text: str, figures: object, *, json_to: str | None) -> None:
    """What a tool has found: for people, and as JSON where `json_to` says, - being stdout, which is then JSON alone.

    Raises ConfigError.
    """
    print(text, file=sys.stderr if json_to == "-" else sys.stdout)
    if json_to:
        write_json(json_to, figures)


def write_json(path: str, value: object) -> None:
    """Indented; - is stdout. Raises ConfigError."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """- is stdout. Raises ConfigError."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _loads(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line
