"""Says answers as OpenAI servers do: chat completions, completions, and their chunks.

Knows completions and facts. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvreuse.api.call import Meta, Result
from kvreuse.api.errors import openai_error
from kvreuse.api.facts import finite, kv_cache, total, usage
from kvreuse.errors import KVReuseError
from kvreuse.types import Completion, Delta, Done, FinishReason, TokenLogprob

__all__ = ["ChatView", "TextView", "model_list"]

DONE = "[DONE]"


def model_list(model: str, created: int) -> dict[str, object]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": "kvreuse"}]}


def _finish_reason(reason: FinishReason) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"


class _View:
    """What both schemas share. A schema says its id, its object names, a whole choice and a piece of one."""

    id_prefix: str
    whole: str
    chunk: str

    def __init__(self, *, includes_usage: bool, n: int = 1) -> None:
        self._includes_usage = includes_usage
        self._n = n

    def choice(self, part: Completion | Delta, *, is_whole: bool, meta: Meta) -> dict[str, object]:
        raise NotImplementedError

    def answer(self, results: Sequence[Result], meta: Meta) -> object:
        """Choices in the order of the prompts. One prompt that failed fails the call: a choice cannot hold an error."""
        for result in results:
            if isinstance(result, KVReuseError):
                raise result
        choices = [
            self._numbered(number, completion, is_whole=True, meta=meta)
            | {"finish_reason": _finish_reason(completion.finish_reason)}
            for number, completion in _completions(results)
        ]
        return self._head(self.whole, meta) | {"choices": choices} | self._facts(results)

    def delta(self, prompt: int, event: Delta, meta: Meta) -> Iterator[object]:
        """A chunk of new text. Why an answer ended is said with the facts, in the last chunks."""
        if event.text or event.logprobs:
            yield self._head(self.chunk, meta) | {"choices": [self._numbered(prompt, event, is_whole=False, meta=meta)]}

    def last(self, results: Sequence[Result], meta: Meta) -> Iterator[object]:
        """One finishing chunk per answer, then (when asked) one with the usage and no choice, then [DONE]."""
        finished = list(_completions(results))
        for place, (number, completion) in enumerate(finished):
            empty = Delta(index=completion.index, text="")
            choice = self._numbered(number, empty, is_whole=False, meta=meta)
            choice |= {"finish_reason": _finish_reason(completion.finish_reason)}
            is_last = place == len(finished) - 1 and not self._includes_usage
            yield self._head(self.chunk, meta) | {"choices": [choice]} | (self._facts(results) if is_last else {})
        if self._includes_usage:
            yield self._head(self.chunk, meta) | {"choices": []} | self._facts(results)
        yield DONE

    def error(self, error: KVReuseError, request_id: str) -> object:
        return openai_error(error, request_id)

    def _head(self, kind: str, meta: Meta) -> dict[str, object]:
        head = {"id": self.id_prefix + meta.request_id, "object": kind, "created": meta.created, "model": meta.model}
        return head | ({"usage": None} if self._includes_usage and kind == self.chunk else {})

    def _facts(self, results: Sequence[Result]) -> dict[str, object]:
        return {"usage": usage(results), "kv_cache": kv_cache(total(results))}

    def _numbered(self, prompt: int, part: Completion | Delta, *, is_whole: bool, meta: Meta) -> dict[str, object]:
        base = {"index": prompt * self._n + part.index, "finish_reason": None, "logprobs": None}
        return base | self.choice(part, is_whole=is_whole, meta=meta)


def _completions(results: Sequence[Result]) -> Iterator[tuple[int, Completion]]:
    for number, result in enumerate(results):
        if isinstance(result, Done):
            for completion in result.completions:
                yield number, completion


class ChatView(_View):
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, part: Completion | Delta, *, is_whole: bool, meta: Meta) -> dict[str, object]:
        message = {"role": "assistant", "content": part.text}
        choice: dict[str, object] = {"message" if is_whole else "delta": message}
        if part.logprobs:
            choice["logprobs"] = {"content": [self._token(lp, meta) for lp in part.logprobs], "refusal": None}
        return choice

    def _token(self, logprob: TokenLogprob, meta: Meta) -> dict[str, object]:
        top = [_named(token_id, value, meta) for token_id, value in logprob.top]
        return _named(logprob.token_id, logprob.logprob, meta) | {"top_logprobs": top}


def _named(token_id: int, logprob: float, meta: Meta) -> dict[str, object]:
    text = meta.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8"))}


class TextView(_View):
    """text_completion, whole and streamed."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, part: Completion | Delta, *, is_whole: bool, meta: Meta) -> dict[str, object]:
        choice: dict[str, object] = {"text": part.text}
        if part.logprobs:
            choice["logprobs"] = {
                "tokens": [meta.token_text(lp.token_id) for lp in part.logprobs],
                "token_logprobs": [finite(lp.logprob) for lp in part.logprobs],
                "top_logprobs": [{meta.token_text(t): finite(p) for t, p in lp.top} for lp in part.logprobs],
                "text_offset": [],
            }
        return choice
