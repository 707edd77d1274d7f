"""The OpenAI schemas: chat completions and completions -> Call.

Knows OpenAI's field names, ranges and defaults. Knows nothing of answers, tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreuse.api.call import Call, Chat, Prompt, Rules
from kvreuse.api.fields import Fields, check_text, is_token_ids
from kvreuse.api.sampling import MAX_TOKENS, SAMPLING_NAMES, read_sampling
from kvreuse.api.views import OpenAIView
from kvreuse.errors import RequestError

__all__ = ["CHAT", "COMPLETION", "IGNORED", "parse_chat", "parse_completion", "read_messages"]

MAX_PROMPTS = 256
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_COMMON = (
    *SAMPLING_NAMES, "model", "stream", "stream_options", "max_tokens", "logprobs", "response_format", "kv_cache_reuse",
)  # fmt: skip
CHAT = (
    *_COMMON, "messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "variables",
)  # fmt: skip
COMPLETION = (*_COMMON, "prompt", "best_of", "echo", "suffix")
# OpenAI servers take these without an effect on the answer of a model like ours.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "tool_choice", "reasoning_effort", "verbosity",
)  # fmt: skip
_RULES = Rules()


def parse_chat(body: Mapping[str, object], *, rules: Rules = _RULES, wants_stream: bool = False) -> Call:
    """RequestError 400 names the field that is wrong and what it may be."""
    fields = Fields(body)
    fields.refuse_unknown((*CHAT, *IGNORED))
    variables = {**fields.mapping("chat_template_kwargs"), **fields.mapping("variables")}
    chat = Chat(
        messages=read_messages(body.get("messages")),
        tools=fields.objects("tools") or None,
        variables={**rules.template_variables, **variables} or None,
    )
    num_top = fields.integer("top_logprobs", default=0, low=0, high=20)
    logprobs = num_top if fields.flag("logprobs", default=False) else None
    if num_top and logprobs is None:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    max_tokens = fields.integer("max_tokens", default=MAX_TOKENS, low=1, high=MAX_TOKENS)
    max_tokens = fields.integer("max_completion_tokens", default=max_tokens, low=1, high=MAX_TOKENS)
    return Call(
        prompts=(chat,),
        sampling=read_sampling(fields, rules, max_new_tokens=max_tokens, logprobs=logprobs),
        view=OpenAIView(is_chat=True, includes_usage=_includes_usage(fields)),
        is_stream=fields.flag("stream", default=wants_stream),
        reuse=fields.flag("kv_cache_reuse", default=True),
        is_length_open=max_tokens == MAX_TOKENS,
        json_schema=_json_schema(fields),
    )


def parse_completion(body: Mapping[str, object], *, rules: Rules = _RULES, wants_stream: bool = False) -> Call:
    """RequestError 400 names the field that is wrong and what it may be."""
    fields = Fields(body)
    fields.refuse_unknown((*COMPLETION, *IGNORED))
    max_tokens = fields.integer("max_tokens", default=16, low=1, high=MAX_TOKENS)
    logprobs = fields.integer("logprobs", default=None, low=0, high=20)
    sampling = read_sampling(fields, rules, max_new_tokens=max_tokens, logprobs=logprobs)
    if fields.integer("best_of", default=sampling.n, low=1, high=rules.max_n) != sampling.n:
        raise RequestError("best_of must equal n", param="best_of")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise RequestError(f"{name} is not supported", param=name)
    return Call(
        prompts=_prompts(body.get("prompt")),
        sampling=sampling,
        view=OpenAIView(is_chat=False, includes_usage=_includes_usage(fields), n=sampling.n),
        is_stream=fields.flag("stream", default=wants_stream),
        reuse=fields.flag("kv_cache_reuse", default=True),
        is_length_open=body.get("max_tokens") is None,
        json_schema=_json_schema(fields),
    )


def _json_schema(fields: Fields) -> Mapping[str, object] | None:
    """What response_format asks of the answer; None is free text."""
    wanted = Fields(fields.mapping("response_format"), where="response_format")
    wanted.refuse_unknown(("type", "json_schema"))
    kind = wanted.choice("type", ("text", "json_object", "json_schema"), default="text")
    if kind != "text" and fields.values.get("ignore_eos"):
        reason = "ignore_eos cannot go with response_format: such an answer ends where it is"
        raise RequestError(reason, param="ignore_eos")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    named = Fields(wanted.mapping("json_schema"), where="response_format.json_schema")
    named.refuse_unknown(("name", "description", "schema", "strict"))
    schema = named.mapping("schema")
    if not schema:
        raise named.error("schema", "a JSON schema")
    return schema


def _includes_usage(fields: Fields) -> bool:
    options = Fields(fields.mapping("stream_options"), where="stream_options")
    options.refuse_unknown(("include_usage", "include_obfuscation"))
    return options.flag("include_usage", default=False)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt (text or token ids) or an array of prompts."""
    items = value if isinstance(value, list) and value and not is_token_ids(value) else [value]
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"prompt must hold at most {MAX_PROMPTS} prompts", param="prompt")
    return tuple(_prompt(item) for item in items)


def _prompt(item: object) -> Prompt:
    if isinstance(item, str):
        return check_text(item, param="prompt")
    if item and is_token_ids(item):
        return tuple(item)
    raise RequestError("prompt must be a string, an array of token ids, or an array of these", param="prompt")


def read_messages(value: object) -> list[Mapping[str, object]]:
    """`messages` checked, with their content as text. RequestError 400."""
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
