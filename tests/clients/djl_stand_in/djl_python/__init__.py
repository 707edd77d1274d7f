"""A small stand-in of DJL Serving's Python side: what a handler gets and gives. The real one is on no index."""

from __future__ import annotations

__all__ = ["Input", "Output"]


class Input:
    """One request: properties (headers among them) and a body. The first one of a process has no body."""

    def __init__(self, body: bytes | None = None, **properties: str) -> None:
        self.properties = {
            name.replace("_", "-") if name != "model_dir" else name: value for name, value in properties.items()
        }
        self._body = body

    def is_empty(self) -> bool:
        return self._body is None

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str) -> str | None:
        found = [value for name, value in self.properties.items() if name.lower() == key.lower()]
        return found[0] if found else None

    def get_as_bytes(self, key: str | None = None) -> bytearray | None:
        return None if self._body is None else bytearray(self._body)


class Output:
    """What goes back. `code` is DJL's own status; the other three travel inside and become the caller's answer."""

    def __init__(self, data: str, *, last: bool, error: str | None = None, code: int | None = None) -> None:
        self.code = 200
        self.properties: dict[str, str] = {}
        self.data, self.last, self.error, self.caller_code = data, last, error, code

    def add_property(self, key: str, value: str) -> Output:
        self.properties[key] = value
        return self
