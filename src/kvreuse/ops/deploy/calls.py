"""A call to AWS as a value. Knows how one is named and shown; sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from botocore import xform_name

__all__ = ["Call", "call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request. `operation` is spelled as in IAM (CreateModel); `wait` names boto3's waiter for its end, if any."""

    service: str
    operation: str
    parameters: Mapping[str, Any]
    wait: str = ""

    @property
    def method(self) -> str:
        """Of a boto3 client."""
        return str(xform_name(self.operation))

    def shown(self) -> dict[str, Any]:
        """The call as JSON can carry it."""
        shown = {"service": self.service, "operation": self.operation, "parameters": self.parameters}
        return shown | ({"wait": self.wait} if self.wait else {})


def call(service: str, operation: str, *, wait: str = "", **parameters: Any) -> Call:
    """A call with these parameters; those that are None are left out."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return Call(service=service, operation=operation, parameters=given, wait=wait)
