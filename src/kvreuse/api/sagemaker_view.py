"""Says answers as the Hugging Face containers do: [{"generated_text": ...}] and its stream of tokens.

Knows completions and facts. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvreuse.api.call import Meta, Prompt, Result
from kvreuse.api.facts import error_object, finite, kv_cache, usage
from kvreuse.errors import KVReuseError
from kvreuse.types import Completion, Delta, Done, FinishReason

__all__ = ["SageMakerView"]

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
