"""Says answers as the Hugging Face containers do: [{"generated_text": ...}] and its stream of tokens.

Knows completions and facts. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvreuse.api.call import Meta, Prompt, Result
from kvreuse.api.errors import error_object
from kvreuse.api.facts import finite, kv_cache, usage
from kvreuse.errors import KVReuseError
from kvreuse.types import Completion, Delta, Done, FinishReason

__all__ = ["SageMakerView"]

_FINISH = {FinishReason.EOS: "eos_token", FinishReason.STOP: "stop_sequence"}


class SageMakerView:
    """`prompts` is empty unless the prompt text is to be repeated before the answer."""

    def __init__(
        self, *, prompts: Sequence[Prompt], is_list: bool, has_details: bool, n: int, seed: int | None = None
    ) -> None:
        self._prompts = prompts
        self._is_list = is_list
        self._has_details = has_details
        self._n = n
        self._seed = seed
        self._num_stream_tokens = 0

    def answer(self, results: Sequence[Result], meta: Meta) -> object:
        """One string: its n answers. A list: one entry per input (an array of answers where n > 1)."""
        answers = [self._item(number, result, meta) for number, result in enumerate(results)]
        if not self._is_list:
            return answers[0]
        return [item[0] if len(item) == 1 and self._n == 1 else item for item in answers]

    def _item(self, number: int, result: Result, meta: Meta) -> list[dict[str, object]]:
        if isinstance(result, KVReuseError):
            return [error_object(result, meta.request_id)]
        return [self._generated(number, result, completion, meta) for completion in result.completions]

    def _generated(self, number: int, done: Done, completion: Completion, meta: Meta) -> dict[str, object]:
        answer: dict[str, object] = {"generated_text": self._head(number) + completion.text}
        if self._has_details:
            answer["details"] = self._details(done, completion, meta)
        return answer

    def _head(self, number: int) -> str:
        prompt = self._prompts[number] if self._prompts else ""
        return prompt if isinstance(prompt, str) else ""

    def _details(self, done: Done, completion: Completion, meta: Meta) -> dict[str, object]:
        return {
            "finish_reason": _FINISH.get(completion.finish_reason, completion.finish_reason.value),
            "generated_tokens": len(completion.token_ids),
            "seed": self._seed,
            "prefill": [],
            "tokens": [self._token(completion, i, meta) for i in range(len(completion.token_ids))],
            "usage": usage([done]),
            "kv_cache": kv_cache(done.facts),
        }

    def _token(self, part: Completion | Delta, i: int, meta: Meta) -> dict[str, object]:
        token_id = part.token_ids[i]
        token: dict[str, object] = {"id": token_id, "text": meta.token_text(token_id)}
        if i < len(part.logprobs):
            logprob = part.logprobs[i]
            token["logprob"] = finite(logprob.logprob)
            token["top_tokens"] = [{"id": t, "text": meta.token_text(t), "logprob": finite(p)} for t, p in logprob.top]
        return token

    def delta(self, prompt: int, event: Delta, meta: Meta) -> Iterator[object]:
        """`token.text` is the new text, which may stem from several tokens; `index` counts tokens from 1."""
        self._num_stream_tokens += len(event.token_ids)
        if not event.token_ids and not event.text:
            return
        last = len(event.token_ids) - 1
        token = self._token(event, last, meta) if last >= 0 and event.logprobs else {}
        token |= {"id": event.token_ids[last] if last >= 0 else None, "text": event.text, "special": not event.text}
        yield {"index": self._num_stream_tokens, "token": token, "generated_text": None, "details": None}

    def last(self, results: Sequence[Result], meta: Meta) -> Iterator[object]:
        done = results[0]
        if isinstance(done, Done):
            completion = done.completions[0]
            text = self._head(0) + completion.text
            details = self._details(done, completion, meta) | {"tokens": []}
            token = {"id": completion.token_ids[-1] if completion.token_ids else None, "text": "", "special": True}
            yield {"index": self._num_stream_tokens, "token": token, "generated_text": text, "details": details}

    def error(self, error: KVReuseError, request_id: str) -> object:
        return error_object(error, request_id)
