"""Says answers as OpenAI servers do: chat completions, completions, and their chunks.

Knows completions and facts. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvreuse.api.call import Meta, Result
from kvreuse.api.facts import completions, finite, kv_cache, total, usage
from kvreuse.errors import KVReuseError
from kvreuse.types import Completion, Delta, FinishReason, TokenLogprob

__all__ = ["OpenAIView", "model_list"]

DONE = "[DONE]"


def model_list(model: str, created: int) -> dict[str, object]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": "kvreuse"}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIView:
    """Chat completions or completions, whole or in chunks; `n` answers to each prompt."""

    is_openai: ClassVar[bool] = True
    is_chat: bool
    includes_usage: bool = False
    n: int = 1

    def answer(self, results: Sequence[Result], meta: Meta) -> object:
        """Choices in the order of the prompts. One prompt that failed fails the call: a choice cannot hold an error."""
        for result in results:
            if isinstance(result, KVReuseError):
                raise result
        choices = [
            self._choice(number, completion, meta, is_whole=True) | _end(completion)
            for number, completion in completions(results)
        ]
        return self._object(choices, meta, is_whole=True) | _facts(results)

    def delta(self, prompt: int, event: Delta, meta: Meta) -> list[object]:
        """A chunk of new text. Why an answer ended is said with the facts, in the last chunks."""
        if not event.text and not event.logprobs:
            return []
        return [self._object([self._choice(prompt, event, meta)], meta)]

    def last(self, results: Sequence[Result], meta: Meta) -> list[object]:
        """One finishing chunk per answer, then (when asked) one with the usage and no choice, then [DONE]."""
        chunks = [
            self._object([self._choice(number, Delta(index=completion.index, text=""), meta) | _end(completion)], meta)
            for number, completion in completions(results)
        ]
        if self.includes_usage:
            chunks.append(self._object([], meta))
        chunks[-1] |= _facts(results)
        return [*chunks, DONE]

    def _object(self, choices: list[dict[str, object]], meta: Meta, *, is_whole: bool = False) -> dict[str, object]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion" if is_whole else "chat.completion.chunk"
        head = {"id": ("chatcmpl-" if self.is_chat else "cmpl-") + meta.request_id, "object": kind}
        usage_to_come = {"usage": None} if self.includes_usage and not is_whole else {}
        return {**head, "created": meta.created, "model": meta.model, **usage_to_come, "choices": choices}

    def _choice(
        self, prompt: int, part: Completion | Delta, meta: Meta, *, is_whole: bool = False
    ) -> dict[str, object]:
        choice = {"index": prompt * self.n + part.index, "finish_reason": None, "logprobs": None}
        if self.is_chat:
            said: dict[str, object] = {"message" if is_whole else "delta": {"role": "assistant", "content": part.text}}
        else:
            said = {"text": part.text}
        if part.logprobs:
            said["logprobs"] = (_chat_logprobs if self.is_chat else _text_logprobs)(part.logprobs, meta)
        return choice | said


def _facts(results: Sequence[Result]) -> dict[str, object]:
    return {"usage": usage(results), "kv_cache": kv_cache(total(results))}


def _end(completion: Completion) -> dict[str, object]:
    return {"finish_reason": "length" if completion.finish_reason is FinishReason.LENGTH else "stop"}


def _chat_logprobs(logprobs: Sequence[TokenLogprob], meta: Meta) -> dict[str, object]:
    def named(token_id: int, logprob: float) -> dict[str, object]:
        text = meta.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8"))}

    content = [named(lp.token_id, lp.logprob) | {"top_logprobs": [named(*top) for top in lp.top]} for lp in logprobs]
    return {"content": content, "refusal": None}


def _text_logprobs(logprobs: Sequence[TokenLogprob], meta: Meta) -> dict[str, object]:
    return {
        "tokens": [meta.token_text(lp.token_id) for lp in logprobs],
        "token_logprobs": [finite(lp.logprob) for lp in logprobs],
        "top_logprobs": [{meta.token_text(t): finite(p) for t, p in lp.top} for lp in logprobs],
        "text_offset": [],
    }
