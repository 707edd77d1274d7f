"""Who calls: the tenant, the session and the inference id. They come from headers, never from a body.

Knows headers. Knows nothing of bodies or the engine. A tenant's header is believed: whoever may set it must be trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvreuse.api.facts import CUSTOM_ATTRIBUTES
from kvreuse.errors import RequestError
from kvreuse.types import Scope

__all__ = ["INFERENCE_ID", "SESSION_ID", "Caller", "Tenancy", "join_headers"]

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
# No comma and no semicolon: two values of one header, or two attributes, must not pass for one name.
_NAME = re.compile(r"[!-+\--:<-~]{1,128}")


def join_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower names. A header that is there twice has both values, so that neither passes for the only one."""
    joined: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """`scope` is what the caller may share; empty ids mean that there is none."""

    scope: Scope = field(default_factory=Scope)
    session_id: str = ""
    inference_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenancy:
    """How tenants are told apart. mode: off, header or required. With `secret` names are HMAC-ed (SHA-256)."""

    mode: str = "off"
    header: str = "X-KVReuse-Tenant"
    secret: str | None = None

    def caller(self, headers: Mapping[str, str], *, is_admin: bool = False) -> Caller:
        """Who sent `headers`, in whatever case. An admin need not name a tenant.

        RequestError 400: no tenant where one is required, or none that can be a name.
        """
        lower = join_headers(headers)
        return Caller(
            scope=Scope(tenant=self._tenant(lower, is_required=self.mode == "required" and not is_admin)),
            session_id=lower.get(SESSION_ID.lower(), ""),
            inference_id=lower.get(INFERENCE_ID.lower(), ""),
        )

    def _tenant(self, headers: Mapping[str, str], *, is_required: bool) -> str:
        if self.mode == "off":
            return ""
        name = headers.get(self.header.lower(), "").strip()
        if self.header.lower() == CUSTOM_ATTRIBUTES.lower():
            pairs = [pair.partition("=") for pair in re.split("[;,]", name)]
            name = ",".join(value.strip() for key, _, value in pairs if key.strip() == "tenant")
        if not name and not is_required:
            return ""
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{self.header} must name one tenant in 1 to 128 visible ASCII characters", param=self.header
            )
        return hmac.digest(self.secret.encode(), name.encode(), hashlib.sha256).hex() if self.secret else name
