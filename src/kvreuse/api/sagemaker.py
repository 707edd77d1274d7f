"""The Hugging Face schema of /invocations: {"inputs": ..., "parameters": {...}} -> Call.

Knows the names that text-generation users know. Knows nothing of answers, tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvreuse.api.call import Call, Prompt, Rules
from kvreuse.api.fields import Fields, check_text
from kvreuse.api.sampling import MAX_TOKENS, SAMPLING_NAMES, read_sampling
from kvreuse.api.templates import fill
from kvreuse.api.views import SageMakerView
from kvreuse.errors import RequestError
from kvreuse.types import SamplingParams

__all__ = ["MAX_INPUTS", "PARAMETERS", "TOP_LEVEL", "parse"]

MAX_INPUTS = 256
_RULES = Rules()
TOP_LEVEL = ("inputs", "prefix", "template", "variables", "parameters", "stream")
PARAMETERS = (
    *SAMPLING_NAMES, "max_new_tokens", "do_sample", "num_return_sequences", "num_beams", "truncate",
    "return_full_text", "details", "logprobs", "top_n_tokens", "stream", "kv_cache_reuse",
)  # fmt: skip
# Any of these asks for sampling unless do_sample says otherwise.
_WARPERS = ("temperature", "top_k", "top_p", "typical_p", "min_p")


def parse(body: Mapping[str, object], *, rules: Rules = _RULES, wants_stream: bool = False) -> Call:
    """RequestError 400 names the field that is wrong and what it may be. A bad item of a list spoils only itself."""
    top = Fields(body)
    top.refuse_unknown(TOP_LEVEL)
    fields = Fields(top.mapping("parameters"), where="parameters")
    fields.refuse_unknown(PARAMETERS)
    sampling = _sampling(fields, rules)
    is_stream = top.flag("stream", default=fields.flag("stream", default=wants_stream))
    prompts = _prompts(top, rules)
    if is_stream and (len(prompts) > 1 or sampling.n > 1):
        raise RequestError("a stream carries one answer: send one input and n = 1", param="stream")
    view = SageMakerView(
        prompts=prompts if fields.flag("return_full_text", default=False) else (),
        is_list=isinstance(body.get("inputs"), list),
        has_details=fields.flag("details", default=False) or sampling.logprobs is not None,
        n=sampling.n,
        seed=sampling.seed,
    )
    return Call(
        prompts=prompts,
        sampling=sampling,
        view=view,
        is_stream=is_stream,
        reuse=fields.flag("kv_cache_reuse", default=True),
        max_prompt_tokens=fields.integer("truncate", default=None, low=1, high=MAX_TOKENS),
        is_length_open=fields.values.get("max_new_tokens") is None,
    )


def _prompts(top: Fields, rules: Rules) -> tuple[Prompt, ...]:
    """A prefix and its input are one text, tokenized at once: tokens may cross the seam as in any other prompt."""
    inputs, prefix = top.values.get("inputs"), top.values.get("prefix")
    if top.values.get("template") is not None:
        if inputs is not None or prefix is not None:
            raise RequestError("a template takes variables, neither inputs nor prefix", param="template")
        return (fill(top.values["template"], top.mapping("variables"), rules=rules),)
    if top.values.get("variables") is not None:
        raise RequestError("variables need a template", param="variables")
    head = "" if prefix is None else check_text(prefix, param="prefix")
    if isinstance(inputs, str):
        return (head + check_text(inputs, param="inputs"),)
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MAX_INPUTS:
        raise RequestError(f"inputs must be a string or an array of 1 to {MAX_INPUTS} strings", param="inputs")
    return tuple(_item(item, number, head) for number, item in enumerate(inputs))


def _item(item: object, number: int, head: str) -> Prompt:
    try:
        return head + check_text(item, param=f"inputs[{number}]")
    except RequestError as error:
        return error


def _sampling(fields: Fields, rules: Rules) -> SamplingParams:
    if fields.integer("num_beams", default=1, low=1, high=1_000) > 1:
        raise RequestError(
            "num_beams must be 1: beams reorder the KV at every step, which shared prefixes rule out; use n",
            param="parameters.num_beams",
        )
    is_sampled = fields.flag("do_sample", default=any(fields.values.get(name) is not None for name in _WARPERS))
    max_new_tokens = fields.integer("max_new_tokens", default=256, low=1, high=MAX_TOKENS)
    sampling = read_sampling(
        fields, rules, max_new_tokens=max_new_tokens, logprobs=_logprobs(fields), max_temperature=100
    )
    n = fields.integer("num_return_sequences", default=1, low=1, high=rules.max_n)
    n = fields.integer("n", default=n, low=1, high=rules.max_n)
    return replace(sampling, n=n, temperature=sampling.temperature if is_sampled else 0.0)


def _logprobs(fields: Fields) -> int | None:
    num_alternatives = fields.integer("top_n_tokens", default=0, low=1, high=20)
    return num_alternatives or (0 if fields.flag("logprobs", default=False) else None)
