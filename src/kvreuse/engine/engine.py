"""The engine: one thread that owns the model and the pool, and the thread-safe door to it.

A step = schedule, run, commit, sample, emit. A step that fails fails the requests in it and nothing else. When the
thread ends for any other reason than `stop`, the engine is dead and says so.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvreuse.cache.outline import Outline
from kvreuse.config import Config
from kvreuse.engine.audit import Auditor, tolerance_for
from kvreuse.engine.parts import EngineParts, build
from kvreuse.engine.pins import Pins
from kvreuse.engine.sampler import sample
from kvreuse.engine.scheduler import Scheduled
from kvreuse.engine.sequence import Answers, Sequence, check_request
from kvreuse.errors import EngineDeadError, InternalError, KVReuseError, OverloadedError, RequestError
from kvreuse.telemetry.stats import Stats
from kvreuse.types import Delta, Done, Event, Failed, FinishReason, OnEvent, Request, Scope, TokenLogprob

__all__ = ["Engine"]

log = logging.getLogger("kvreuse.engine")

# So many steps failing one after another, with none that went well between, is a broken engine.
MAX_FAILED_STEPS = 16
IDLE_WAIT_S = 0.5


class Engine:
    """Requests in, events out. `submit` and `abort` may be called from any thread; events come on the engine's."""

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self.tokenizer = parts.tokenizer
        self.grammars = parts.grammars
        self.pins = Pins(parts.cache, max_tokens=parts.pool.num_slots // 2)
        self.max_model_len = parts.max_model_len
        self.model_name = parts.model_name
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._requests: dict[str, Answers] = {}
        self._is_stopping = False
        self._num_failed_steps = 0
        self._num_steps = 0
        # What was run since sampled ids were last read: only reading them waits for a GPU, so only then is time known.
        self._unread: list[Scheduled] = []
        self._unread_since_s = 0.0
        self._next_upkeep_s = clock() + parts.defrag_interval_s
        self._auditor = Auditor(
            rate=parts.audit_rate,
            tolerance=tolerance_for(parts.pool.layout.layers[0].dtype),
            start=self._queue,
            on_mismatch=self._quarantine,
        )
        if parts.lower is not None:
            parts.lower.post = self._inbox.put
        self._thread = threading.Thread(target=self._main, name="kvreuse-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, config: Config, *, stats: Stats | None = None) -> Engine:
        """Load the model and start. Raises ConfigError when the model or the configuration is refused."""
        parts = build(config)
        if stats is not None and parts.lower is not None:
            parts.lower.stack.costs.on_load = stats.record_transfer
        return cls(parts)

    # -- the door: any thread ---------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive() and not self._is_stopping

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Returns at once; its events end with Done or Failed.

        Raises RequestError (too long, unknown token, id in use), OverloadedError, EngineDeadError.
        """
        check_request(request, max_model_len=self.max_model_len, vocab_size=self._parts.vocab_size)
        if not self._parts.is_reuse_on:
            request = replace(request, reuse=False)
        answers = Answers(request, on_event, self._clock)
        with self._lock:
            if not self.is_alive:
                raise EngineDeadError("the engine is not running")
            if request.request_id in self._requests:
                raise RequestError(f"request id {request.request_id} is in use", param="request_id", status=409)
            if len(self._requests) >= self._parts.max_outstanding:
                raise OverloadedError(f"{len(self._requests)} requests are in flight or queued, no more are taken")
            self._requests[request.request_id] = answers
        self._inbox.put(lambda: self._start(answers))

    def abort(self, request_id: str) -> None:
        """End a request early: it gets Done with what it has. Unknown ids are ignored."""
        self._inbox.put(lambda: self._abort(request_id))

    def num_resident(self, token_ids: tuple[int, ...], *, scope: Scope) -> int:
        """How many leading tokens of these are in the pool now, in whole blocks."""
        return self._parts.cache.peek((*token_ids, 0), scope=scope)

    def purge(self, *, tenant: str | None = None) -> int:
        """Drop the cached blocks of one tenant, or all; those in use leave when they are released. Returns blocks."""
        cache, lower = self._parts.cache, self._parts.lower
        if lower is None:
            return cache.purge(tenant=tenant)
        lower.drop_arriving()
        return cache.purge(tenant=tenant) + lower.stack.purge(tenant)

    def stop(self, *, drain_s: float) -> None:
        """Take no more, give what runs up to `drain_s` to finish, abort the rest, end the thread."""
        self._is_stopping = True
        deadline_s = time.monotonic() + drain_s
        while self._requests and self._thread.is_alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for request_id in list(self._requests):
            self.abort(request_id)
        self._inbox.put(sys.exit)  # it ends only the thread that calls it
        self._thread.join(timeout=10)
        if self._parts.lower is not None:
            self._parts.lower.stack.close()

    def outline(self, max_nodes: int, names: Mapping[str, tuple[int, ...]]) -> Outline:
        """A picture of the store, with `names` for the prefixes of these tokens."""
        return self._parts.cache.outline(max_nodes, names)

    def snapshot(self) -> dict[str, Any]:
        """Gauges and counters of this moment, as plain numbers."""
        scheduler, usage = self._parts.scheduler, self._parts.cache.usage()
        return {
            **scheduler.snapshot(num_slots=self._parts.pool.num_slots),
            "steps": self._num_steps,
            "bytes_per_token": self._parts.pool.layout.bytes_per_token,
            "store": usage,
            "audits": self._auditor.num_audits,
            "audit_mismatches": self._auditor.num_mismatches,
            "tiers": self._parts.lower.snapshot() if self._parts.lower else {},
        }

    # -- the thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while True:
                self._read_inbox()
                self._upkeep()
                self._step()
        except SystemExit:  # `stop` asked for it
            pass
        except Exception:
            log.exception("the engine died")
        finally:
            self._is_stopping = True
            for answers in list(self._requests.values()):
                self._fail(answers, EngineDeadError("the engine stopped before this request was finished"))

    def _read_inbox(self) -> None:
        """Do what was asked; sleep here while there is nothing to compute."""
        idle_s = min(max(self._parts.scheduler.idle_s(), 0.0), IDLE_WAIT_S)
        try:
            self._inbox.get(timeout=idle_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _upkeep(self) -> None:
        if self._clock() >= self._next_upkeep_s:
            self._parts.cache.expire()
            self._parts.cache.compact()
            self._next_upkeep_s = self._clock() + self._parts.defrag_interval_s

    def _start(self, answers: Answers) -> None:
        if answers.request.request_id in self._requests:
            for index in range(answers.request.sampling.n):
                self._queue(answers, index)

    def _queue(self, answers: Answers, index: int = 0) -> Sequence:
        sequence = Sequence.start(answers, index, tokenizer=self.tokenizer, block_size=self._parts.cache.block_size)
        self._parts.scheduler.add(sequence)
        return sequence

    def _quarantine(self, sequence: Sequence) -> None:
        """What is stored of this prompt is wrong: drop it, and in the pool all that the same fault may have met."""
        if self._parts.lower is not None:
            self._parts.lower.drop_arriving()
            self._parts.lower.stack.forget(sequence.hashes())
        self._parts.cache.purge(tenant=sequence.request.scope.tenant)

    def _abort(self, request_id: str) -> None:
        answers = self._requests.get(request_id)
        if answers is not None:
            for sequence in answers.sequences:
                if not sequence.is_finished:
                    self._show(sequence, sequence.abort())
            self._close(answers)

    def _step(self) -> None:
        scheduler = self._parts.scheduler
        batch, failed = scheduler.schedule()
        has_new_room = bool(failed) and self.pins.let_go()
        for sequence, error in failed:
            if has_new_room:
                scheduler.add(sequence)
            else:
                self._fail(sequence.answers, error)
        batch = [item for item in batch if not item.sequence.is_finished]
        if not batch:
            self._unread = []  # idle time is nobody's cost
            return
        try:
            items, token_ids, logprobs = self._run(batch)
        except EngineDeadError:
            raise
        except Exception as error:
            self._step_failed(batch, error)
            return
        self._num_failed_steps = 0
        self._num_steps += 1
        for item, token_id, logprob in zip(items, token_ids, logprobs, strict=True):
            self._got_token(item.sequence, token_id, logprob)

    def _run(self, batch: list[Scheduled]) -> tuple[list[Scheduled], list[int], list[TokenLogprob | None]]:
        if not self._unread:
            self._unread_since_s = time.perf_counter()
        self._unread += batch
        items, logits = self._parts.runner.run(batch)
        for item, row in zip(items, logits, strict=True):
            self._auditor.look(item.sequence, row)
        token_ids, logprobs = sample(logits, [item.sequence.sampling for item in items])
        if items:
            if self._parts.lower is not None:
                self._parts.lower.measured(self._unread, took_ms=(time.perf_counter() - self._unread_since_s) * 1e3)
            self._unread = []
        self._parts.scheduler.commit(batch)
        return items, token_ids, logprobs

    def _step_failed(self, batch: Iterable[Scheduled], error: Exception) -> None:
        log.exception("a step failed")
        self._unread = []
        self._num_failed_steps += 1
        for answers in dict.fromkeys(item.sequence.answers for item in batch):
            self._fail(answers, InternalError("the step that computed this request failed; it can be sent again"))
        if self._num_failed_steps >= MAX_FAILED_STEPS or self._parts.is_fatal(error):
            raise EngineDeadError("steps keep failing") from error

    def _got_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        sequence.answers.got_token()
        self._show(sequence, sequence.take(token_id, logprob, eos_token_ids=self._parts.eos_token_ids))
        if sequence.answers.is_finished:
            self._close(sequence.answers)

    def _show(self, sequence: Sequence, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._parts.scheduler.remove(sequence)
        self._emit(sequence.answers, delta)

    def _close(self, answers: Answers) -> None:
        if self._requests.pop(answers.request.request_id, None) is not None:
            completions = tuple(sequence.completion() for sequence in answers.sequences)
            self._emit(answers, Done(completions=completions, facts=answers.facts()))

    def _fail(self, answers: Answers, error: KVReuseError) -> None:
        for sequence in answers.sequences:
            self._parts.scheduler.remove(sequence)
            sequence.finish_reason = sequence.finish_reason or FinishReason.ABORT
        if self._requests.pop(answers.request.request_id, None) is not None:
            self._emit(answers, Failed(error=error))

    def _emit(self, answers: Answers, event: Event) -> None:
        try:
            answers.on_event(event)
        except Exception:
            # The listener is gone or broken: nobody waits for this request any more.
            log.exception("a listener failed")
            self.abort(answers.request.request_id)
