"""Who calls: the tenant, the session and the inference id. They come from headers, never from a body.

Knows headers. Knows nothing of bodies or the engine. A tenant's header is believed: whoever may set it must be trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvreuse.api.facts import CUSTOM_ATTRIBUTES
from kvreuse.config import Config
from kvreuse.errors import RequestError
from kvreuse.types import Scope

__all__ = ["INFERENCE_ID", "SESSION_ID", "Caller", "caller_of", "join_headers", "scope_of"]

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
# No comma and no semicolon: two values of one header, or two attributes, must not pass for one name.
_NAME = re.compile(r"[!-+\--:<-~]{1,128}")
_EVERYBODY = Scope()


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """`scope` is what the caller may share; empty ids mean that there is none."""

    scope: Scope = _EVERYBODY
    session_id: str = ""
    inference_id: str = ""


def join_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower names. A header that is there twice has both values, so that neither passes for the only one."""
    joined: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


def caller_of(headers: Mapping[str, str], config: Config, *, is_admin: bool = False) -> Caller:
    """Who sent `headers`, in whatever case. An admin need not name a tenant.

    RequestError 400: no tenant where one is required, or none that can be a name.
    """
    lower = join_headers(headers)
    tenant = lower.get(config.tenant_header.lower(), "").strip()
    if config.tenant_header.lower() == CUSTOM_ATTRIBUTES.lower():
        pairs = [pair.partition("=") for pair in re.split("[;,]", tenant)]
        tenant = ",".join(value.strip() for key, _, value in pairs if key.strip() == "tenant")
    return Caller(
        scope=scope_of(tenant, config, is_required=config.tenant_mode == "required" and not is_admin),
        session_id=lower.get(SESSION_ID.lower(), ""),
        inference_id=lower.get(INFERENCE_ID.lower(), ""),
    )


def scope_of(tenant: str, config: Config, *, is_required: bool = False) -> Scope:
    """What the tenant of this name may share; with a secret its name is HMAC-ed (SHA-256). RequestError 400."""
    if config.tenant_mode == "off" or not (tenant or is_required):
        return _EVERYBODY
    header, secret = config.tenant_header, config.tenant_secret
    if not _NAME.fullmatch(tenant):
        raise RequestError(f"{header} must name one tenant in 1 to 128 visible ASCII characters", param=header)
    return Scope(tenant=hmac.digest(secret.encode(), tenant.encode(), hashlib.sha256).hex() if secret else tenant)
