"""One simulated instance: the engine's scheduler and store over blocks, and a clock that a cost model moves.

Knows requests of a trace and seconds. Knows nothing of other instances or of routing. A block of a trace is four tokens
of the scheduler, so a step costs the same whether it holds 16 tokens or 512, and nobody keeps a partial one; a sequence
that decodes rests with all its tokens computed until it needs another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, inf

from kvreuse.cache.store import PrefixCache
from kvreuse.engine.scheduler import Scheduled, Scheduler, SchedulerLimits
from kvreuse.engine.sequence import Answers, Sequence
from kvreuse.ops.trace import TraceRequest
from kvreuse.types import Request, SamplingParams

__all__ = ["Costs", "Flight", "Instance", "RemoteTier", "Settings"]

_PARTS = 4  # tokens of the scheduler per block of the trace
_OWN_TOKEN = 1 << 31  # generated blocks: each is met once


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of a step, per token computed, per token loaded from the remote tier, per sequence that decodes."""

    step_s: float = 0.01
    prefill_token_s: float = 1e-4
    load_token_s: float = 1e-5
    decode_s: float = 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of every instance. Tokens are real ones; block_size is that of the trace."""

    pool_tokens: int
    block_size: int
    max_batch_size: int = 64
    max_batch_tokens: int = 8192
    policy: str = "size_weighted_lru"
    costs: Costs = Costs()


class RemoteTier:
    """Blocks that some instance has computed and all can load; None tokens: without bound."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def put(self, blocks: Items[int]) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._num_blocks is not None and len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def num_leading(self, blocks: Items[int]) -> int:
        return sum(1 for _ in takewhile(self._blocks.__contains__, blocks))


@dataclass(eq=False, slots=True)
class Flight:
    """A request on an instance. Times are of the simulated clock; ttft_s and end_s stay None where it never came to."""

    request: TraceRequest
    sequence: Sequence
    hit_tokens: int | None = None
    loaded_until: int = 0
    num_decoded: int = 0
    ttft_s: float | None = None
    end_s: float | None = None


class _NoTokenizer:
    """Nobody reads what a simulated model says."""

    has_byte_fallback = False

    def decode(self, token_ids: Items[int]) -> str:
        return ""

    def is_visible(self, token_id: int) -> bool:
        return False

    def is_byte(self, token_id: int) -> bool:
        return False


class Instance:
    """`advance` lets it work up to a moment; a step that has begun by then ends later."""

    def __init__(
        self, settings: Settings, *, number: int, now_s: float = 0.0, remote: RemoteTier | None = None
    ) -> None:
        self.number = number
        self.now_s = self.ready_s = now_s
        self.num_computed_tokens = 0
        self._settings, self._remote = settings, remote
        self._flights: dict[Sequence, Flight] = {}
        self._batch: list[Scheduled] | None = None
        self._batch_end_s, self._num_decodes = now_s, 1
        self._num_own = 0
        self._unit = settings.block_size / _PARTS  # real tokens per token of the scheduler
        self.cache = PrefixCache(
            num_slots=max(_PARTS, int(settings.pool_tokens / self._unit)), block_size=_PARTS, bytes_per_token=1,
            policy=settings.policy, move_slots=lambda *_: None, clock=lambda: self.now_s,
        )  # fmt: skip
        limits = SchedulerLimits(
            max_batch_size=settings.max_batch_size, max_batch_tokens=max(1, int(settings.max_batch_tokens / self._unit))
        )
        self._scheduler = Scheduler(self.cache, limits, clock=lambda: self.now_s)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def submit(self, request: TraceRequest, *, at_s: float) -> Flight:
        """Queue it. The instance must have been advanced to `at_s`."""
        self.now_s = max(self.now_s, at_s)
        num_new = int(max(request.num_new_tokens, 1) / self._unit) + 2
        sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        asked = Request(request_id="", token_ids=self._tokens(request), sampling=sampling)
        answers = Answers(asked, lambda event: None, lambda: at_s)
        sequence = Sequence.start(answers, 0, tokenizer=_NoTokenizer(), block_size=_PARTS)  # type: ignore[arg-type]
        flight = self._flights[sequence] = Flight(request, sequence)
        self._scheduler.add(sequence)
        return flight

    def _tokens(self, request: TraceRequest) -> tuple[int, ...]:
        """Whole blocks by name; what is left over is the request's own and less than a block."""
        whole = request.blocks[: request.num_prompt_tokens // self._settings.block_size]
        rest = request.num_prompt_tokens - len(whole) * self._settings.block_size
        num_own = min(_PARTS - 1, ceil(rest / self._unit)) if whole else max(1, ceil(rest / self._unit))
        self._num_own += num_own
        own = range(_OWN_TOKEN + self._num_own - num_own, _OWN_TOKEN + self._num_own)
        return (*(block * _PARTS + part for block in whole for part in range(_PARTS)), *own)

    def advance(self, until_s: float) -> None:
        """Run every step that ends by then."""
        while (self._batch is not None or self._begin_step(until_s)) and self._batch_end_s <= until_s:
            self._end_step()

    def _begin_step(self, until_s: float) -> bool:
        if not self._flights or self.now_s > until_s:
            return False
        batch, failed = self._scheduler.schedule()
        for sequence, _ in failed:
            del self._flights[sequence]
        if not batch:
            return bool(failed) and self._begin_step(until_s)
        costs, prefilled, loaded = self._settings.costs, 0, 0
        decoding = [self._flights[item.sequence] for item in batch if self._is_decoding(item)]
        for item in batch:
            num_loaded = self._admit(item)
            loaded += num_loaded
            prefilled += 0 if self._is_decoding(item) else item.num_tokens - num_loaded
        self.num_computed_tokens += round(prefilled * self._unit)
        step_s = costs.step_s + costs.decode_s * len(decoding) + self._unit * (
            costs.prefill_token_s * prefilled + costs.load_token_s * loaded)  # fmt: skip
        # While nothing but decoding happens all steps are alike: take as many at once as change nothing.
        quiet = len(decoding) == len(batch)
        room = min((self._until_full(flight) for flight in decoding), default=1) if quiet else 1
        by_then = room if until_s == inf else int((until_s - self.now_s) / step_s)
        self._num_decodes = max(1, min(room, by_then))
        self._batch, self._batch_end_s = batch, self.now_s + step_s * self._num_decodes
        return True

    def _admit(self, item: Scheduled) -> int:
        """Blocks of this step that come from the remote tier; fixes at the first step of a request what was a hit."""
        flight, begin = self._flights[item.sequence], item.sequence.num_computed_tokens
        if flight.hit_tokens is None:
            limit = (flight.sequence.num_prompt_tokens - 1) // _PARTS
            cached = item.lease.num_cached_tokens // _PARTS
            remote = self._remote.num_leading(flight.request.blocks[cached:limit]) if self._remote is not None else 0
            flight.loaded_until = (cached + remote) * _PARTS
            flight.hit_tokens = (cached + remote) * self._settings.block_size
        return max(0, min(begin + item.num_tokens, flight.loaded_until) - begin)

    def _end_step(self) -> None:
        batch, self._batch, self.now_s = self._batch or [], None, self._batch_end_s
        batch = [item for item in batch if item.sequence in self._flights]
        sampled = [item.sequence for item in batch if item.is_sampled]
        self._scheduler.commit(batch)
        for sequence in sampled:
            self._decoded(self._flights[sequence])

    def _decoded(self, flight: Flight) -> None:
        """So many tokens more, at least the first; when they need room the scheduler gets a token."""
        request, sequence = flight.request, flight.sequence
        if flight.ttft_s is None:
            flight.ttft_s = self.now_s - request.arrival_s
            flight.num_decoded = 1
        else:
            flight.num_decoded += self._num_decodes
        if flight.num_decoded >= request.num_new_tokens:
            flight.end_s = self.now_s
            self._scheduler.remove(sequence)
            del self._flights[sequence]
            if self._remote is not None:
                self._remote.put(request.blocks[: request.num_prompt_tokens // self._settings.block_size])
        elif len(sequence.token_ids) * self._unit < request.num_prompt_tokens + flight.num_decoded:
            self._num_own += 1
            sequence.take(_OWN_TOKEN + self._num_own, None, eos_token_ids=())

    def _until_full(self, flight: Flight) -> int:
        """Tokens to decode until the scheduler has to know, or the answer is done."""
        request = flight.request
        left = len(flight.sequence.token_ids) * self._unit - request.num_prompt_tokens - flight.num_decoded
        return max(1, min(int(left) + 1, request.num_new_tokens - flight.num_decoded))

    def _is_decoding(self, item: Scheduled) -> bool:
        return self._flights[item.sequence].ttft_s is not None
