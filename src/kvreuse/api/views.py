"""Says answers, whole and streamed: as the Hugging Face containers do and as OpenAI servers do.

Knows completions and facts. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvreuse.api.call import Meta, Prompt, Result
from kvreuse.api.facts import completions, error_object, finite, kv_cache, total, usage
from kvreuse.errors import KVReuseError
from kvreuse.types import Completion, Delta, Done, FinishReason, TokenLogprob

__all__ = ["OpenAIView", "SageMakerView", "model_list"]

DONE = "[DONE]"
_FINISH = {FinishReason.EOS: "eos_token", FinishReason.STOP: "stop_sequence"}


@dataclass(kw_only=True, slots=True)
class SageMakerView:
    """`prompts` is empty unless the prompt text is to be repeated before the answer."""

    is_openai: ClassVar[bool] = False
    prompts: Sequence[Prompt] = ()
    is_list: bool = False
    has_details: bool = False
    n: int = 1
    seed: int | None = None
    num_stream_tokens: int = 0

    def answer(self, results: Sequence[Result], meta: Meta) -> object:
        """One string: its n answers. A list: one entry per input (an array of answers where n > 1)."""
        answers = [self._item(number, result, meta) for number, result in enumerate(results)]
        if not self.is_list:
            return answers[0]
        return [item[0] if self.n == 1 else item for item in answers]

    def _item(self, number: int, result: Result, meta: Meta) -> list[dict[str, object]]:
        if isinstance(result, KVReuseError):
            return [error_object(result, meta.request_id)]
        answers: list[dict[str, object]] = []
        for completion in result.completions:
            details = {"details": self._details(result, completion, meta)} if self.has_details else {}
            answers.append({"generated_text": self._head(number) + completion.text, **details})
        return answers

    def _head(self, number: int) -> str:
        prompt = self.prompts[number] if self.prompts else ""
        return prompt if isinstance(prompt, str) else ""

    def _details(self, done: Done, completion: Completion, meta: Meta) -> dict[str, object]:
        return {
            "finish_reason": _FINISH.get(completion.finish_reason, completion.finish_reason.value),
            "generated_tokens": len(completion.token_ids),
            "seed": self.seed,
            "prefill": [],
            "tokens": [_token(completion, i, meta) for i in range(len(completion.token_ids))],
            "usage": usage([done]),
            "kv_cache": kv_cache(done.facts),
        }

    def delta(self, prompt: int, event: Delta, meta: Meta) -> list[object]:
        """`token.text` is the new text, which may stem from several tokens; `index` counts tokens from 1."""
        self.num_stream_tokens += len(event.token_ids)
        if not event.token_ids and not event.text:
            return []
        token = _token(event, len(event.token_ids) - 1, meta) if event.token_ids and event.logprobs else {}
        token |= {"id": _last_id(event), "text": event.text, "special": not event.text}
        return [{"index": self.num_stream_tokens, "token": token, "generated_text": None, "details": None}]

    def last(self, results: Sequence[Result], meta: Meta) -> list[object]:
        done = results[0]
        if not isinstance(done, Done):
            return []
        completion = done.completions[0]
        text = self._head(0) + completion.text
        details = self._details(done, completion, meta) | {"tokens": []}
        token = {"id": _last_id(completion), "text": "", "special": True}
        return [{"index": self.num_stream_tokens, "token": token, "generated_text": text, "details": details}]


def _last_id(part: Completion | Delta) -> int | None:
    return part.token_ids[-1] if part.token_ids else None


def _token(part: Completion | Delta, i: int, meta: Meta) -> dict[str, object]:
    token_id = part.token_ids[i]
    token: dict[str, object] = {"id": token_id, "text": meta.token_text(token_id)}
    if i < len(part.logprobs):
        logprob = part.logprobs[i]
        token["logprob"] = finite(logprob.logprob)
        token["top_tokens"] = [{"id": t, "text": meta.token_text(t), "logprob": finite(p)} for t, p in logprob.top]
    return token


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
