"""From a body to an Answer: parse it by its schema, tokenize, hand over to the engine; count and log the end.

Knows the schemas and the engine. Knows nothing of HTTP, the toolkit or threads.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from kvreuse.api import openai, sagemaker
from kvreuse.api.call import Call, Chat, Meta, Prompt, Rules
from kvreuse.api.facts import kv_cache
from kvreuse.api.fields import parse_object
from kvreuse.api.sagemaker_view import SageMakerView
from kvreuse.api.templates import samples
from kvreuse.errors import KVReuseError, RequestError
from kvreuse.server.answer import Answer
from kvreuse.server.callers import Caller, Tenancy
from kvreuse.server.sessions import CLOSE, OPEN, Sessions
from kvreuse.server.warmup import WarmUp
from kvreuse.telemetry.request_log import RequestLog
from kvreuse.telemetry.stats import Stats
from kvreuse.types import Done, Request, SamplingParams, Scope

if TYPE_CHECKING:
    from kvreuse.engine.engine import Engine

__all__ = ["Limits", "Schema", "Service", "new_request_id"]


_LEFT = "disconnected"


class Schema(StrEnum):
    """How a body is read. BY_SHAPE looks at which of messages, prompt and inputs it has."""

    BY_SHAPE = "invocations"
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one call may take. Times in seconds."""

    request_timeout_s: float = 55.0
    stream_timeout_s: float = 450.0
    session_ttl_s: float = 1200.0
    max_sessions: int = 64


_PARSERS = {
    "messages": openai.parse_chat,
    "prompt": openai.parse_completion,
    "inputs": sagemaker.parse,
    "template": sagemaker.parse,
}
_SUBJECTS = {Schema.CHAT: "messages", Schema.COMPLETION: "prompt"}


def new_request_id() -> str:
    return uuid.uuid4().hex


class Service:
    """The engine as callers see it. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        *,
        stats: Stats,
        log: RequestLog,
        limits: Limits | None = None,
        rules: Rules | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        self.engine = engine
        self.tenancy = tenancy or Tenancy()
        self._stats = stats
        self._log = log
        self._limits = limits or Limits()
        self._rules = rules or Rules()
        self._sessions = Sessions(engine.pins, ttl_s=self._limits.session_ttl_s, max_sessions=self._limits.max_sessions)

    def answer(
        self,
        data: str | bytes | bytearray | Mapping[str, object],
        *,
        schema: Schema = Schema.BY_SHAPE,
        request_id: str = "",
        wants_stream: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer to one body, not yet started. `headers` name the tenant, the session and the inference id.

        Raises RequestError 400 or 422 when it cannot be understood, OverloadedError when no more sessions are taken.
        """
        meta = self._meta(request_id or new_request_id())
        try:
            caller = self.tenancy.caller(headers or {})
            body = data if isinstance(data, Mapping) else parse_object(data)
            call = self._parse(body, schema, caller, wants_stream=wants_stream)
            items = tuple(self._items(call, caller.scope, meta.request_id))
            end_turn = self._sessions.turn(caller, items, body=body, is_stream=call.is_stream)
        except KVReuseError as error:
            self._stats.record_failure(error.type)
            self._log_end(schema, meta.request_id, status=error.status, error=error.type)
            raise

        def end(answer: Answer, error: KVReuseError | None) -> None:
            answer.headers.update(end_turn(answer.results))
            self._end(schema, answer, error, template=body.get("template"))

        answer = Answer(
            self.engine,
            items,
            view=call.view,
            meta=meta,
            is_stream=call.is_stream,
            timeout_s=self._limits.stream_timeout_s if call.is_stream else self._limits.request_timeout_s,
            on_end=end,
        )
        if caller.inference_id and not caller.session_id and not call.is_stream:
            answer.join_key = (caller.scope, caller.inference_id, schema, repr(body))
        return answer

    @cached_property
    def prefixes(self) -> Mapping[str, tuple[int, ...]]:
        """Template id -> the tokens that all its prompts begin with, whatever the variables are."""
        found = {}
        for name in self._rules.templates:
            with suppress(RequestError):  # some values are not for every template to take
                one, other = (self._encode(prompt) for prompt in samples(name, rules=self._rules))
                found[name] = tuple(
                    a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
                )
        return found

    @cached_property
    def warm_up(self) -> WarmUp:
        """Keeps the registered templates in the store."""
        return WarmUp(self.engine, self._rules.templates, self.prefixes, tenancy=self.tenancy)

    def purge(self, headers: Mapping[str, str]) -> int:
        """Drop what is cached of the tenant that `headers` name, or everything; returns blocks. Sessions close."""
        tenant = self.tenancy.caller(headers, is_admin=True).scope.tenant or None
        self._sessions.close_all(tenant)
        return self.engine.purge(tenant=tenant)

    def _meta(self, request_id: str) -> Meta:
        engine = self.engine
        return Meta(
            request_id=request_id,
            model=engine.model_name,
            created=int(time.time()),
            token_text=engine.tokenizer.token_text,
        )

    def _parse(self, body: Mapping[str, object], schema: Schema, caller: Caller, *, wants_stream: bool) -> Call:
        if caller.session_id and body in (OPEN, CLOSE):
            view = SageMakerView(is_list=True)
            return Call(prompts=(), sampling=SamplingParams(), view=view)
        subject = _SUBJECTS.get(schema, "")
        if not subject:
            subjects = [name for name in _PARSERS if name in body]
            if len(subjects) != 1:
                known = ", ".join(_PARSERS)
                raise RequestError(f"the body must have exactly one of {known}", param="inputs")
            subject = subjects[0]
        return _PARSERS[subject](body, rules=self._rules, wants_stream=wants_stream)

    def _items(self, call: Call, scope: Scope, request_id: str) -> Iterator[Request | KVReuseError]:
        is_single = len(call.prompts) == 1
        make_mask = self.engine.grammars.compile(call.json_schema) if call.json_schema is not None else None
        for number, prompt in enumerate(call.prompts):
            try:
                request = self._request(call, prompt, request_id if is_single else f"{request_id}-{number}")
                yield replace(request, scope=scope, make_mask=make_mask)
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
        tokenizer = self.engine.tokenizer
        match prompt:
            case RequestError():
                raise prompt
            case str():
                return tokenizer.encode(prompt)
            case Chat():
                return tokenizer.encode_chat(prompt.messages, tools=prompt.tools, variables=prompt.variables)
            case _:
                return prompt

    def _end(self, schema: Schema, answer: Answer, error: KVReuseError | None, *, template: object) -> None:
        done = [result for result in answer.results if isinstance(result, Done)]
        for result in done:
            self._stats.record_request(
                result.facts,
                num_output_tokens=sum(len(c.token_ids) for c in result.completions),
                duration_s=answer.duration_s,
                finish_reason=result.completions[0].finish_reason.value,
            )
        failures = [result.type for result in answer.results if isinstance(result, KVReuseError)]
        # What has no result was left: because of `error`, or because the caller went away.
        num_left = answer.num_prompts - len(answer.results)
        failures += [error.type if error else _LEFT] * num_left
        for failure in failures:
            self._stats.record_failure(failure)
        self._log_end(
            schema,
            answer.meta.request_id,
            status=error.status if error else 499 if num_left else 200,
            error=error.type if error else _LEFT if num_left else None,
            extra={
                "template": template,
                "stream": answer.is_stream,
                "num_failed": len(failures),
                "finish_reasons": [c.finish_reason.value for result in done for c in result.completions],
                "completion_tokens": sum(len(c.token_ids) for result in done for c in result.completions),
                "duration_ms": round(answer.duration_s * 1000, 3),
                **(kv_cache(answer.facts) if done else {}),
            },
        )

    def _log_end(
        self,
        schema: Schema,
        request_id: str,
        *,
        status: int,
        error: str | None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """No message: it may name a field that the caller made up, and no text of a caller belongs in a log."""
        self._log.write(
            {
                "event": "request",
                "time": round(time.time(), 3),
                "request_id": request_id,
                "schema": schema.value,
                "status": status,
                "error": error,
                **(extra or {}),
            }
        )
