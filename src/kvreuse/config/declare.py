"""How an option is declared and judged: its name, kind, default, unit and meaning.

Knows kinds of values. Knows nothing of which options exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvreuse.config.kinds import Kind
from kvreuse.errors import ConfigError

__all__ = ["META", "Option", "option"]

META = "option"  # where a field of Config keeps its Option
_MASK = "********"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What is declared of one option. `name` is its field in Config.

    key: its name in serving.properties. env: further environment variables that set it, strongest first.
    """

    name: str = ""
    key: str = ""
    kind: Kind
    doc: str
    unit: str = ""
    default: Any = None
    env: tuple[str, ...] = ()
    secret: bool = False

    def check(self, value: Any, *, shown_as: str | None = None) -> None:
        """Raise ConfigError that names the option, the value and what is allowed."""
        if not self.kind.accepts(value):
            shown = shown_as if shown_as is not None else str(value)
            shown = _MASK if self.secret else f"'{shown}'"
            raise ConfigError(f"{self.key} is {shown}, allowed is {self.kind.allowed}")

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


def option(
    default: T, kind: Kind, doc: str, *, unit: str = "", key: str = "", env: tuple[str, ...] = (), secret: bool = False
) -> T:
    """Declare a field of Config. `key` is needed only where it is not `option.<field>`."""
    declared = Option(key=key, kind=kind, doc=doc, unit=unit, default=default, env=env, secret=secret)
    declaration: T = field(default=default, metadata={META: declared})
    return declaration
