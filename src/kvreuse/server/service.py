"""From a body to an Answer: parse it by its schema, tokenize, hand over to the engine; count and log the end.

Knows the schemas and the engine. Knows nothing of HTTP, the toolkit or threads.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from kvreuse.api import openai, sagemaker
from kvreuse.api.call import Call, Chat, Meta, Prompt, Rules, Template
from kvreuse.api.facts import completions, kv_cache, total
from kvreuse.api.fields import parse_object
from kvreuse.api.templates import samples
from kvreuse.api.views import SageMakerView
from kvreuse.config import Config
from kvreuse.errors import KVReuseError, RequestError
from kvreuse.server.answer import JSON_TYPE, Answer
from kvreuse.server.callers import Caller, caller_of
from kvreuse.server.sessions import CLOSE, OPEN, Sessions
from kvreuse.server.warmup import WarmUp
from kvreuse.telemetry.request_log import RequestLog
from kvreuse.telemetry.stats import Stats
from kvreuse.types import Done, Request, SamplingParams

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine

__all__ = ["Service", "check_json", "new_request_id"]

_PARSERS = {
    "messages": openai.parse_chat,
    "prompt": openai.parse_completion,
    "inputs": sagemaker.parse,
    "template": sagemaker.parse,
}
# How a body is read; any other schema goes by which of these fields the body has.
_SUBJECTS = {"chat": "messages", "completion": "prompt"}
_LEFT = "disconnected"


def new_request_id() -> str:
    return uuid.uuid4().hex


def check_json(content_type: str | None) -> None:
    """RequestError 415 for anything but JSON; a body without a type is taken for it."""
    if (content_type or JSON_TYPE).split(";")[0].strip().lower() != JSON_TYPE:
        raise RequestError(f"the content type must be {JSON_TYPE}", param="Content-Type", status=415)


class Service:
    """The engine as callers see it. Thread-safe.

    prefixes: template id -> the tokens that all its prompts begin with, whatever the variables are.
    """

    def __init__(
        self, engine: Engine, config: Config, *, stats: Stats, log: RequestLog, templates: Mapping[str, Template]
    ) -> None:
        self.engine = engine
        self._config = config
        self._stats = stats
        self._log = log
        self._rules = Rules(max_n=config.max_n, template_variables=config.template_variables or {}, templates=templates)
        self._sessions = Sessions(engine.pins, config)
        self.prefixes: dict[str, tuple[int, ...]] = {}
        for name in templates:
            with suppress(RequestError):  # some values are not for every template to take
                one, other = (self._encode(prompt) for prompt in samples(name, rules=self._rules))
                both = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
                self.prefixes[name] = tuple(token_id for token_id, _ in both)
        self.warm_up = WarmUp(engine, config, templates=templates, prefixes=self.prefixes)

    def answer(
        self,
        data: str | bytes | bytearray | Mapping[str, object],
        *,
        schema: str = "invocations",
        request_id: str = "",
        wants_stream: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer to one body, not yet started. `headers` name the tenant, the session and the inference id.

        schema: chat, completion, or invocations, where the fields of the body tell.

        Raises RequestError 400 or 422 when it cannot be understood, OverloadedError when no more sessions are taken.
        """
        engine, config, request_id = self.engine, self._config, request_id or new_request_id()
        log = partial(self._write, request_id, schema)
        try:
            caller = caller_of(headers or {}, config)
            body = data if isinstance(data, Mapping) else parse_object(data)
            call = self._parse(body, schema, caller, wants_stream=wants_stream)
            items = tuple(self._items(call, caller, request_id))
            end_turn = self._sessions.turn(caller, items, body=body, is_stream=call.is_stream)
        except KVReuseError as error:
            self._stats.record_failure(error.type)
            log(status=error.status, error=error.type)
            raise

        def end(answer: Answer, error: KVReuseError | None) -> None:
            answer.headers.update(end_turn(answer.results))
            self._count(answer, error)
            log(**_ending(answer, error), template=body.get("template"))

        token_text = engine.tokenizer.token_text
        meta = Meta(request_id=request_id, model=engine.model_name, created=int(time.time()), token_text=token_text)
        timeout_s = config.stream_timeout_s if call.is_stream else config.request_timeout_s
        answer = Answer(engine=engine, items=items, call=call, meta=meta, timeout_s=timeout_s, on_end=end)
        if caller.inference_id and not caller.session_id and not call.is_stream:
            answer.join_key = (caller.scope, caller.inference_id, schema, repr(body))
        return answer

    def purge(self, headers: Mapping[str, str]) -> int:
        """Drop what is cached of the tenant that `headers` name, or everything; returns blocks. Sessions close."""
        tenant = caller_of(headers, self._config, is_admin=True).scope.tenant or None
        self._sessions.close_all(tenant)
        return self.engine.purge(tenant=tenant)

    def _parse(self, body: Mapping[str, object], schema: str, caller: Caller, *, wants_stream: bool) -> Call:
        if caller.session_id and body in (OPEN, CLOSE):
            return Call(prompts=(), sampling=SamplingParams(), view=SageMakerView(is_list=True))
        subjects = [_SUBJECTS[schema]] if schema in _SUBJECTS else [name for name in _PARSERS if name in body]
        if len(subjects) != 1:
            raise RequestError(f"the body must have exactly one of {', '.join(_PARSERS)}", param="inputs")
        return _PARSERS[subjects[0]](body, rules=self._rules, wants_stream=wants_stream)

    def _items(self, call: Call, caller: Caller, request_id: str) -> Iterator[Request | KVReuseError]:
        is_single = len(call.prompts) == 1
        make_mask = self.engine.grammars.compile(call.json_schema) if call.json_schema is not None else None
        for number, prompt in enumerate(call.prompts):
            try:
                request = self._request(call, prompt, request_id if is_single else f"{request_id}-{number}")
                yield replace(request, scope=caller.scope, make_mask=make_mask)
            except RequestError as error:
                if is_single:
                    raise
                yield error

    def _request(self, call: Call, prompt: Prompt, request_id: str) -> Request:
        token_ids = self._encode(prompt)
        if call.max_prompt_tokens is not None:
            token_ids = token_ids[-call.max_prompt_tokens :]
        if not token_ids:
            raise RequestError("the prompt is empty: it must hold at least one token", param="inputs")
        sampling = call.sampling
        if call.is_length_open:
            room = max(1, self.engine.max_model_len - len(token_ids))
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        return Request(request_id=request_id, token_ids=token_ids, sampling=sampling, reuse=call.reuse)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, RequestError):
            raise prompt
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        if isinstance(prompt, Chat):
            return self.engine.tokenizer.encode_chat(prompt.messages, tools=prompt.tools, variables=prompt.variables)
        return prompt

    def _count(self, answer: Answer, error: KVReuseError | None) -> None:
        for result in answer.results:
            if isinstance(result, Done):
                self._stats.record_request(
                    result.facts,
                    num_output_tokens=sum(len(completion.token_ids) for completion in result.completions),
                    duration_s=answer.duration_s,
                    finish_reason=result.completions[0].finish_reason.value,
                )
            else:
                self._stats.record_failure(result.type)
        for _ in range(answer.num_left):
            self._stats.record_failure(error.type if error else _LEFT)

    def _write(self, request_id: str, schema: str, **facts: object) -> None:
        """No message: it may name a field that the caller made up, and no text of a caller belongs in a log."""
        now = round(time.time(), 3)
        self._log.write({"event": "request", "time": now, "request_id": request_id, "schema": schema, **facts})


def _ending(answer: Answer, error: KVReuseError | None) -> dict[str, object]:
    """What the log says of an answer. Prompts without a result were left: by a fault, or because the caller went."""
    results = answer.results
    ended = [completion for _, completion in completions(results)]
    return {
        "status": error.status if error else 499 if answer.num_left else 200,
        "error": error.type if error else _LEFT if answer.num_left else None,
        "stream": answer.call.is_stream,
        "num_failed": answer.num_left + sum(isinstance(result, KVReuseError) for result in results),
        "finish_reasons": [completion.finish_reason.value for completion in ended],
        "completion_tokens": sum(len(completion.token_ids) for completion in ended),
        "duration_ms": round(answer.duration_s * 1000, 3),
        **(kv_cache(total(results)) if ended else {}),
    }
