"""The sampling fields that both schemas share, with their ranges, defaults and meaning.

Knows SamplingParams. Knows nothing of prompts or answers.
"""

from __future__ import annotations

from dataclasses import fields as dataclass_fields

from kvreuse.api.call import Rules
from kvreuse.api.fields import Fields
from kvreuse.types import SamplingParams

__all__ = ["MAX_TOKENS", "SAMPLING_NAMES", "read_sampling"]

MAX_TOKENS = 1_000_000
_OTHERS = ("max_new_tokens", "logprobs")

SAMPLING_NAMES = tuple(field.name for field in dataclass_fields(SamplingParams) if field.name not in _OTHERS)


def read_sampling(
    fields: Fields, rules: Rules, *, max_new_tokens: int, logprobs: int | None, max_temperature: float = 2.0
) -> SamplingParams:
    """RequestError 400 names the field that is wrong and its range."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.number("temperature", default=1.0, low=0, high=max_temperature),
        top_k=fields.integer("top_k", default=0, low=0, high=MAX_TOKENS),
        top_p=fields.number("top_p", default=1.0, low=0, high=1, above_low=True),
        typical_p=fields.number("typical_p", default=1.0, low=0, high=1, above_low=True),
        min_p=fields.number("min_p", default=0.0, low=0, high=1),
        repetition_penalty=fields.number("repetition_penalty", default=1.0, low=0, high=100, above_low=True),
        presence_penalty=fields.number("presence_penalty", default=0.0, low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", default=0.0, low=-2, high=2),
        logit_bias=_logit_bias(fields),
        stop=fields.texts("stop", max_items=16),
        stop_token_ids=fields.token_ids("stop_token_ids", max_items=64),
        ignore_eos=fields.flag("ignore_eos", default=False),
        seed=fields.integer("seed", default=None, low=-(2**63), high=2**63 - 1),
        logprobs=logprobs,
        n=fields.integer("n", default=1, low=1, high=rules.max_n),
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = Fields(fields.mapping("logit_bias"), where=fields.param("logit_bias"))
    if len(bias.values) > 1024 or not all(key.isascii() and key.isdigit() and len(key) <= 9 for key in bias.values):
        raise fields.error("logit_bias", "an object of up to 1024 token ids and biases")
    return {int(key): bias.number(key, default=0.0, low=-100, high=100) for key in bias.values}
