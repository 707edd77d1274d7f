"""Says the numbers of a request: cache facts as `usage`, `kv_cache` and one header value; log-probabilities.

Knows results and CacheFacts. Knows nothing of schemas or HTTP beyond what a header value may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvreuse.api.call import Result
from kvreuse.types import CacheFacts, Done, Tier

__all__ = ["CUSTOM_ATTRIBUTES", "custom_attributes", "finite", "kv_cache", "total", "usage"]

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_MAX_ATTRIBUTES = 1024
_LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it: a token that cannot be chosen has minus infinity, said as OpenAI servers do."""
    return max(_LEAST_LOGPROB, logprob)  # in this order NaN counts as impossible too


def total(results: Sequence[Result]) -> CacheFacts:
    """The facts of all prompts that were answered, as one: tokens are summed, the slowest tier and times win.

    A reason for a miss belongs to one prompt, so a sum of several has none.
    """
    facts = [result.facts for result in results if isinstance(result, Done)]
    if len(facts) == 1:
        return facts[0]
    return CacheFacts(
        prompt_tokens=sum(f.prompt_tokens for f in facts),
        cached_tokens=sum(f.cached_tokens for f in facts),
        tier=max((f.tier for f in facts), key=list(Tier).index, default=Tier.NONE),
        lookup_ms=max((f.lookup_ms for f in facts), default=0.0),
        queue_ms=max((f.queue_ms for f in facts), default=0.0),
        ttft_ms=max((f.ttft_ms for f in facts), default=0.0),
    )


def usage(results: Sequence[Result]) -> dict[str, object]:
    """Token counts as OpenAI names them. `cached_tokens` is always an int."""
    facts = total(results)
    completions = [c for result in results if isinstance(result, Done) for c in result.completions]
    num_output_tokens = sum(len(c.token_ids) for c in completions)
    return {
        "prompt_tokens": facts.prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": facts.prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": facts.cached_tokens},
    }


def kv_cache(facts: CacheFacts) -> dict[str, object]:
    """The facts under their own names; `miss_reason` and `diverged_at` are null where they do not apply."""
    return {
        "cached_tokens": facts.cached_tokens,
        "prompt_tokens": facts.prompt_tokens,
        "tier": facts.tier.value,
        "miss_reason": facts.miss_reason.value if facts.miss_reason else None,
        "diverged_at": facts.diverged_at,
        "lookup_ms": round(facts.lookup_ms, 3),
        "queue_ms": round(facts.queue_ms, 3),
        "ttft_ms": round(facts.ttft_ms, 3),
    }


def custom_attributes(request_id: str, facts: CacheFacts | None) -> str:
    """`kvreuse=1; request_id=...; cached_tokens=...; ...`: visible ASCII, at most 1,024 characters.

    Without facts (a stream's header leaves before they are known) only the request is named.
    """
    pairs: dict[str, object] = {"kvreuse": 1, "request_id": request_id}
    if facts is not None:
        pairs |= {name: value for name, value in kv_cache(facts).items() if value is not None}
    text = "; ".join(f"{name}={value}" for name, value in pairs.items())
    return "".join(c for c in text if " " <= c <= "~")[:_MAX_ATTRIBUTES]
