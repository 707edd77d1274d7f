"""The running state of one answer to a request.

Knows token ids, positions and times. Knows nothing of tensors, of other sequences or of the scheduler's choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvreuse.cache.hashing import BlockHasher
from kvreuse.cache.lease import Lease
from kvreuse.engine.detokenizer import Detokenizer
from kvreuse.engine.sampler import SamplingState
from kvreuse.engine.tokenizer import Tokenizer
from kvreuse.errors import RequestError
from kvreuse.types import CacheFacts, Completion, Delta, FinishReason, MissReason, OnEvent, Request, Tier, TokenLogprob

__all__ = ["Answers", "Sequence", "check_request"]


@dataclass(eq=False)
class Sequence:
    """One answer: its tokens so far, the KV it holds and how far it has been computed.

    token_ids:           [0 ............ prompt)[prompt ... generated)
    KV exists for:       [0 ........ num_computed_tokens)
    in tree nodes:       [0 .... lease.num_committed_tokens)
    """

    answers: Answers
    index: int
    token_ids: list[int]
    hasher: BlockHasher
    sampling: SamplingState
    detokenizer: Detokenizer
    lease: Lease | None = None
    num_computed_tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    passed_over_s: float = inf  # since when later ones go first
    group: bytes = b""  # of similar prompts, where these are grouped
    is_let_go: bool = False  # has waited for its group
    has_tried_tiers: bool = False
    _num_hashed: int = 0

    @classmethod
    def start(cls, answers: Answers, index: int, *, tokenizer: Tokenizer, block_size: int) -> Sequence:
        """Answer number `index` of a request, with nothing computed yet."""
        request, token_ids = answers.request, list(answers.request.token_ids)
        mask = request.make_mask(token_ids) if request.make_mask else None
        sequence = cls(
            answers=answers,
            index=index,
            token_ids=token_ids,
            hasher=BlockHasher(scope=request.scope, block_size=block_size),
            sampling=SamplingState(request.sampling, request.token_ids, index=index, mask=mask),
            detokenizer=Detokenizer(tokenizer, stop=request.sampling.stop, prompt_ids=request.token_ids),
        )
        answers.sequences.append(sequence)
        return sequence

    @property
    def request(self) -> Request:
        """What the client sent."""
        return self.answers.request

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV does not exist yet: 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens may still be sampled."""
        return self.request.sampling.max_new_tokens - self.num_generated_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete or given up."""
        return self.finish_reason is not None

    def hashes(self) -> list[bytes]:
        """Chained hashes of the whole blocks of `token_ids`."""
        new = self.token_ids[self._num_hashed :]
        self._num_hashed += len(new)
        return self.hasher.extend(new)

    def take(self, token_id: int, logprob: TokenLogprob | None, *, eos_token_ids: Collection[int]) -> Delta:
        """Append a sampled token; the delta is what the client sees of it and whether the answer ends."""
        sampling = self.request.sampling
        self.token_ids.append(token_id)
        logprobs = () if logprob is None else (logprob,)
        self.logprobs.extend(logprobs)
        is_eos = token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
        text = "" if is_eos else self.detokenizer.push(token_id)
        if is_eos:
            self.finish_reason = FinishReason.EOS
        elif self.detokenizer.stopped:
            self.finish_reason = FinishReason.STOP
        elif self.num_remaining_tokens <= 0:
            self.finish_reason = FinishReason.LENGTH
        return self._delta(text, token_ids=(token_id,), logprobs=logprobs)

    def abort(self) -> Delta:
        """Finish the answer as it stands."""
        self.finish_reason = FinishReason.ABORT
        return self._delta("")

    def _delta(self, text: str, **said: Any) -> Delta:
        """With the text that was held back, where it is the last one."""
        if self.is_finished:
            text += self.detokenizer.flush()
        self.text.append(text)
        return Delta(index=self.index, text=text, finish_reason=self.finish_reason, **said)

    def completion(self) -> Completion:
        """The answer as it stands."""
        return Completion(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            logprobs=tuple(self.logprobs),
        )


class Answers:
    """A request on its way: its sequences, its clock and the cache facts of the first sequence admitted."""

    def __init__(self, request: Request, on_event: OnEvent, clock: Callable[[], float]) -> None:
        self.request = request
        self.on_event = on_event
        self.sequences: list[Sequence] = []
        self._clock = clock
        self.arrival_s = clock()
        self._admitted_s = self._first_token_s = inf
        self._lease: Lease | None = None
        self._lookup_s = 0.0
        self.promoted_from = Tier.NONE  # the lower tier that some of the cached tokens came from
        self.is_load_slower = False  # a lower tier has more, but computing it is quicker

    @property
    def is_finished(self) -> bool:
        """Whether every sequence is."""
        return all(sequence.is_finished for sequence in self.sequences)

    def admitted(self, lease: Lease, *, lookup_s: float) -> None:
        """The first admission of the request fixes what is reported of the cache."""
        self._lookup_s += lookup_s
        if self._lease is None:
            self._lease, self._admitted_s = lease, self._clock()

    def got_token(self) -> None:
        """A token of any answer was sampled."""
        self._first_token_s = min(self._first_token_s, self._clock())

    def facts(self) -> CacheFacts:
        """What the caller is told."""
        lease, now = self._lease, self._clock()
        num_cached = lease.num_cached_tokens if lease else 0
        reason = lease.miss_reason if lease else None
        if reason is not None and self.is_load_slower:
            reason = MissReason.SLOWER_THAN_PREFILL
        return CacheFacts(
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=num_cached,
            tier=max(self.promoted_from, Tier.DEVICE, key=list(Tier).index) if num_cached else Tier.NONE,
            miss_reason=reason,
            diverged_at=lease.diverged_at if lease and reason is MissReason.DIVERGED else None,
            lookup_ms=self._lookup_s * 1e3,
            queue_ms=(min(now, self._admitted_s) - self.arrival_s) * 1e3,
            ttft_ms=(min(now, self._first_token_s) - self.arrival_s) * 1e3,
        )


def check_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Raises RequestError: an empty prompt or an unknown token id (400), prompt and answer too long together (422)."""
    num_prompt, max_new = len(request.token_ids), request.sampling.max_new_tokens
    if not num_prompt:
        raise RequestError("the prompt is empty, at least one token is needed", param="inputs")
    if num_prompt + max_new > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {max_new}: "
            f"together more than the {max_model_len} that this endpoint takes",
            param="inputs" if num_prompt >= max_model_len else "max_new_tokens",
            status=422,
        )
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
        raise RequestError(f"token ids must be in [0, {vocab_size})", param="inputs")
