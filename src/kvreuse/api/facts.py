"""Says what every schema says alike: errors, and the numbers of a request as `usage`, `kv_cache` and one header value.

Knows results and CacheFacts. Knows nothing of schemas or HTTP beyond what a header value may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kvreuse.api.call import Result
from kvreuse.errors import KVReuseError
from kvreuse.types import CacheFacts, Completion, Done, Tier

__all__ = [
    "CUSTOM_ATTRIBUTES",
    "completions",
    "custom_attributes",
    "error_object",
    "finite",
    "kv_cache",
    "total",
    "usage",
]

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_MAX_ATTRIBUTES = 1024
_LEAST_LOGPROB = -9999.0


def error_object(error: KVReuseError, request_id: str, *, is_openai: bool = False) -> dict[str, object]:
    """The body of an error. OpenAI's has the status in it too; `request_id` is ours."""
    param = getattr(error, "param", None)
    said = {"type": error.type, "message": error.message, "param": param, "request_id": request_id}
    return {"error": said | {"code": error.status} if is_openai else said}


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it: a token that cannot be chosen has minus infinity, said as OpenAI servers do."""
    return max(_LEAST_LOGPROB, logprob)  # in this order NaN counts as impossible too


def completions(results: Sequence[Result]) -> list[tuple[int, Completion]]:
    """Every finished answer with the number of its prompt."""
    return [(i, c) for i, result in enumerate(results) if isinstance(result, Done) for c in result.completions]


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
    num_output_tokens = sum(len(completion.token_ids) for _, completion in completions(results))
    return {
        "prompt_tokens": facts.prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": facts.prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": facts.cached_tokens},
    }


def kv_cache(facts: CacheFacts) -> dict[str, object]:
    """The facts under their own names; `miss_reason` and `diverged_at` are null where they do not apply."""
    named = {"cached_tokens": facts.cached_tokens, **asdict(facts)}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in named.items()}


def custom_attributes(request_id: str, facts: CacheFacts | None) -> str:
    """`kvreuse=1; request_id=...; cached_tokens=...; ...`: visible ASCII, at most 1,024 characters.

    Without facts (a stream's header leaves before they are known) only the request is named.
    """
    pairs: dict[str, object] = {"kvreuse": 1, "request_id": request_id}
    if facts is not None:
        pairs |= {name: value for name, value in kv_cache(facts).items() if value is not None}
    text = "; ".join(f"{name}={value}" for name, value in pairs.items())
    return "".join(c for c in text if " " <= c <= "~")[:_MAX_ATTRIBUTES]
