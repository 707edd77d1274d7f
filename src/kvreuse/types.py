"""The values that cross package borders: a request, what is streamed back, and the cache facts of it.

Knows ints, strings and times. Knows nothing of tensors, HTTP or the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvreuse.errors import KVReuseError

__all__ = [
    "CacheFacts",
    "Completion",
    "Delta",
    "Done",
    "Event",
    "Failed",
    "FinishReason",
    "MakeMask",
    "MissReason",
    "OnEvent",
    "Request",
    "SamplingParams",
    "Scope",
    "Tier",
    "TokenLogprob",
]


class Tier(StrEnum):
    """Where the cached tokens of a request came from (the slowest tier involved)."""

    NONE = "none"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class MissReason(StrEnum):
    """Why not more of the prompt was cached. Absent when every block that can match did."""

    COLD = "cold"  # this continuation was never seen
    BELOW_MIN = "below_min"  # the prompt is too short to hold one whole block before its last token
    DIVERGED = "diverged"  # a cached prompt differs from this one at token `diverged_at`
    EVICTED = "evicted"  # it was here and was evicted
    EXPIRED = "expired"  # it was here and its TTL ran out
    SCOPE = "scope"  # the caller's own tokens are cached under another model or adapter
    SLOWER_THAN_PREFILL = "slower_than_prefill"  # a lower tier has it, but computing it is quicker
    DISABLED = "disabled"  # reuse is off, for the endpoint or for this request


class FinishReason(StrEnum):
    """Why a completion ended."""

    LENGTH = "length"  # max_new_tokens or the model's length
    EOS = "eos"  # an end-of-sequence or stop token id
    STOP = "stop"  # a stop string
    ABORT = "abort"  # the client went away or asked to stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What must be equal before two prefixes may share. Part of every block hash."""

    model: str = ""
    adapter: str = ""
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens. Never part of the prefix key. Ranges are checked in api/.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, typical_p 1 switch the respective filter off.
    `logprobs` is None (off) or how many alternatives to report beside the chosen token (0 = only the chosen one).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1


# From the live list of an answer's token ids, prompt first, to its mask: bool [vocab] of what may come next.
MakeMask = Callable[[Sequence[int]], Callable[[], Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the client asked for. Immutable; its running state is `engine.sequence.Sequence`.

    token_ids: the whole prompt, at least one id.
    reuse: False computes the prompt afresh and stores nothing.
    make_mask: limits what each answer may say; None is free text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    scope: Scope = Scope()
    reuse: bool = True
    make_mask: MakeMask | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFacts:
    """The truth about one request, as reported to its caller.

    cached_tokens: prompt tokens served from the store at admission (0 is an int, never null).
    diverged_at: index of the first token that differs, only with MissReason.DIVERGED.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    tier: Tier = Tier.NONE
    miss_reason: MissReason | None = None
    diverged_at: int | None = None
    lookup_ms: float = 0.0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """log p of a chosen token and of the likeliest alternatives [(token_id, logprob)], best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished answer (there are `sampling.n` of them)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text of answer `index`. `text` may be empty and never holds half a character.

    `finish_reason` is set on the last delta of that answer.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The last event of a request that went well (an abort included)."""

    completions: tuple[Completion, ...]
    facts: CacheFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The last event of a request that did not."""

    error: KVReuseError


Event = Delta | Done | Failed
# Called on the engine thread: must return at once and must not raise.
OnEvent = Callable[[Event], None]
