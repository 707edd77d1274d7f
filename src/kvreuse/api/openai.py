"""The OpenAI schemas: chat completions and completions -> Call.

Knows OpenAI's field names, ranges and defaults. Knows nothing of answers, tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreuse.api.call import Call, Chat, Prompt
from kvreuse.api.fields import Fields, check_text
from kvreuse.api.openai_view import ChatView, TextView
from kvreuse.errors import RequestError
from kvreuse.types import SamplingParams

__all__ = ["CHAT", "COMPLETION", "IGNORED", "parse_chat", "parse_completion"]

MAX_TOKENS = 1_000_000
MAX_PROMPTS = 256
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_COMMON = (
    "model",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "logprobs",
    "kv_cache_reuse",
)
CHAT = (*_COMMON, "messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
COMPLETION = (*_COMMON, "prompt", "best_of", "echo", "suffix")
# OpenAI servers take these without an effect on the answer of a model like ours.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "tool_choice",
    "reasoning_effort",
    "verbosity",
)


def parse_chat(body: Mapping[str, object], *, max_n: int, wants_stream: bool = False) -> Call:
    """RequestError 400 names the field that is wrong and what it may be."""
    fields = Fields(body)
    fields.refuse_unknown((*CHAT, *IGNORED))
    chat = Chat(
        messages=_messages(body.get("messages")),
        tools=_objects(fields, "tools"),
        variables=fields.mapping("chat_template_kwargs") or None,
    )
    num_top = fields.integer("top_logprobs", default=0, low=0, high=20)
    wants_logprobs = fields.flag("logprobs", default=False)
    if num_top and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    max_tokens = fields.integer("max_tokens", default=MAX_TOKENS, low=1, high=MAX_TOKENS)
    max_new_tokens = fields.integer("max_completion_tokens", default=max_tokens, low=1, high=MAX_TOKENS)
    return Call(
        prompts=(chat,),
        sampling=_sampling(
            fields, max_new_tokens=max_new_tokens, logprobs=num_top if wants_logprobs else None, max_n=max_n
        ),
        view=ChatView(includes_usage=_includes_usage(fields)),
        is_stream=fields.flag("stream", default=wants_stream),
        reuse=fields.flag("kv_cache_reuse", default=True),
        is_length_open=max_new_tokens == MAX_TOKENS,
    )


def parse_completion(body: Mapping[str, object], *, max_n: int, wants_stream: bool = False) -> Call:
    """RequestError 400 names the field that is wrong and what it may be."""
    fields = Fields(body)
    fields.refuse_unknown((*COMPLETION, *IGNORED))
    n = fields.integer("n", default=1, low=1, high=max_n)
    if fields.integer("best_of", default=n, low=1, high=max_n) != n:
        raise RequestError("best_of must equal n", param="best_of")
    for name in ("echo", "suffix"):
        if fields.values.get(name):
            raise RequestError(f"{name} is not supported", param=name)
    has_logprobs = fields.values.get("logprobs") is not None
    return Call(
        prompts=_prompts(body.get("prompt")),
        sampling=_sampling(
            fields,
            max_new_tokens=fields.integer("max_tokens", default=16, low=1, high=MAX_TOKENS),
            logprobs=fields.integer("logprobs", default=0, low=0, high=20) if has_logprobs else None,
            max_n=max_n,
        ),
        view=TextView(includes_usage=_includes_usage(fields), n=n),
        is_stream=fields.flag("stream", default=wants_stream),
        reuse=fields.flag("kv_cache_reuse", default=True),
        is_length_open=fields.values.get("max_tokens") is None,
    )


def _sampling(fields: Fields, *, max_new_tokens: int, logprobs: int | None, max_n: int) -> SamplingParams:
    has_seed = fields.values.get("seed") is not None
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.number("temperature", default=1.0, low=0, high=2),
        top_p=fields.number("top_p", default=1.0, low=0, high=1, above_low=True),
        top_k=fields.integer("top_k", default=0, low=0, high=MAX_TOKENS),
        min_p=fields.number("min_p", default=0.0, low=0, high=1),
        typical_p=fields.number("typical_p", default=1.0, low=0, high=1, above_low=True),
        repetition_penalty=fields.number("repetition_penalty", default=1.0, low=0, high=100, above_low=True),
        presence_penalty=fields.number("presence_penalty", default=0.0, low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", default=0.0, low=-2, high=2),
        logit_bias=_logit_bias(fields),
        stop=fields.texts("stop", max_items=16),
        stop_token_ids=fields.token_ids("stop_token_ids", max_items=64),
        ignore_eos=fields.flag("ignore_eos", default=False),
        seed=fields.integer("seed", default=0, low=-(2**63), high=2**63 - 1) if has_seed else None,
        logprobs=logprobs,
        n=fields.integer("n", default=1, low=1, high=max_n),
    )


def _includes_usage(fields: Fields) -> bool:
    options = Fields(fields.mapping("stream_options"), where="stream_options")
    options.refuse_unknown(("include_usage", "include_obfuscation"))
    return options.flag("include_usage", default=False)


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = Fields(fields.mapping("logit_bias"), where="logit_bias")
    if len(bias.values) > 1024 or not all(key.isascii() and key.isdigit() and len(key) <= 9 for key in bias.values):
        raise fields.error("logit_bias", "an object of up to 1024 token ids and biases")
    return {int(key): bias.number(key, default=0.0, low=-100, high=100) for key in bias.values}


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt (text or token ids) or an array of prompts."""
    items = value if isinstance(value, list) and value and not _is_token_ids(value) else [value]
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"prompt must hold at most {MAX_PROMPTS} prompts", param="prompt")
    return tuple(_prompt(item) for item in items)


def _prompt(item: object) -> Prompt:
    if isinstance(item, str):
        return check_text(item, param="prompt")
    if isinstance(item, list) and _is_token_ids(item):
        return tuple(item)
    raise RequestError("prompt must be a string, an array of token ids, or an array of these", param="prompt")


def _is_token_ids(value: list[object]) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def _objects(fields: Fields, name: str) -> list[Mapping[str, object]] | None:
    value = fields.values.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise fields.error(name, "an array of objects")
    return value or None


def _messages(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a non-empty array of objects with role and content", param="messages")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(value)]


def _message(item: object, where: str) -> Mapping[str, object]:
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    fields = Fields(item, where=where)
    if item.get("role") is None:
        raise fields.error("role", "one of " + ", ".join(_ROLES))
    role = fields.choice("role", _ROLES, default="")
    content = item.get("content")
    if content is None and role == "assistant":
        return item
    return item | {"content": _content(content, fields.param("content"))}


def _content(content: object, where: str) -> str:
    """Text parts are joined: a text model's template knows strings only."""
    if not isinstance(content, list):
        return check_text(content, param=where)
    texts: list[str] = []
    for number, part in enumerate(content):
        param = f"{where}[{number}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(f"{param} must be a part of type text", param=param)
        texts.append(check_text(part.get("text"), param=f"{param}.text"))
    return "".join(texts)
