"""An engine without a model: the next token is a known function of the prompt, so every answer can be foretold."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreuse.cache.outline import NodeView, Outline
from kvreuse.errors import EngineDeadError, InternalError, OverloadedError, RequestError
from kvreuse.types import (
    CacheFacts,
    Completion,
    Delta,
    Done,
    Failed,
    FinishReason,
    MissReason,
    OnEvent,
    Request,
    Scope,
    Tier,
    TokenLogprob,
)

BLOCK = 4


class FakeTokenizer:
    """One token per character; its id is the code point."""

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "inputs") -> tuple[int, ...]:
        return tuple(ord(c) for c in text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        names = [f"tool:{tool['function']['name']}\n" for tool in tools or ()]
        named = [f"{name}={value}\n" for name, value in (variables or {}).items()]
        said = [f"{message['role']}:{message.get('content')}\n" for message in messages]
        return self.encode("".join([*names, *named, *said]))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) for t in token_ids)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


def expected_text(prompt: str, num_tokens: int, *, index: int = 0) -> str:
    """What the fake model answers: letters that depend on the whole prompt."""
    start = sum(ord(c) for c in prompt) + index
    return "".join(chr(ord("a") + (start + i) % 26) for i in range(num_tokens))


@dataclass
class _Running:
    request: Request
    on_event: OnEvent
    cached: int
    texts: list[str]
    produced: int = 0
    is_aborted: bool = False
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)


class FakePins:
    """Remembers what is pinned."""

    def __init__(self) -> None:
        self.held: list[tuple[tuple[int, ...], Scope]] = []

    def pin(self, token_ids: Sequence[int], *, scope: Scope) -> tuple[tuple[int, ...], Scope]:
        lease = (tuple(token_ids), scope)
        self.held.append(lease)
        return lease

    def unpin(self, lease: tuple[tuple[int, ...], Scope]) -> None:
        self.held.remove(lease)


class FakeEngine:
    """Keeps the contract of Engine: thread-safe submit and abort, events on the engine's thread."""

    model_name = "fake"
    max_model_len = 20_000

    def __init__(self, *, max_outstanding: int = 1_000, step_s: float = 0.0) -> None:
        self.tokenizer = FakeTokenizer()
        self.pins = FakePins()
        self.max_outstanding = max_outstanding
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.aborted: list[str] = []
        self.submitted: list[Request] = []
        self.peak_running = 0
        self.gauges: dict[str, Any] = {"bytes_per_token": 100}
        self._seen: list[tuple[tuple[int, ...], Scope]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._num_outstanding = 0
        self._is_crashing = False
        self._is_ending = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def submit(self, request: Request, on_event: OnEvent) -> None:
        num = len(request.token_ids) + request.sampling.max_new_tokens
        if num > self.max_model_len:
            raise RequestError(f"{num} tokens are more than {self.max_model_len}", param="inputs", status=422)
        if not self.is_alive:
            raise EngineDeadError("the engine is not running")
        if self._num_outstanding >= self.max_outstanding:
            raise OverloadedError("the queue is full")
        self._num_outstanding += 1
        self.submitted.append(request)
        self._inbox.put(lambda: self._start(request, on_event))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._inbox.put(lambda: self._mark(request_id))

    def num_resident(self, token_ids: tuple[int, ...], *, scope: Scope) -> int:
        best = max((_common(token_ids, ids) for ids, seen_scope in self._seen if seen_scope == scope), default=0)
        return best // BLOCK * BLOCK

    def purge(self, *, tenant: str | None = None) -> int:
        kept = [seen for seen in self._seen if tenant is not None and seen[1].tenant != tenant]
        num_dropped, self._seen = len(self._seen) - len(kept), kept
        return num_dropped

    def stop(self, *, drain_s: float) -> None:
        self._is_stopping = True
        deadline = time.monotonic() + drain_s
        while self._num_outstanding and time.monotonic() < deadline:
            time.sleep(0.005)
        self.gate.set()
        for request_id in list(self._running):
            self.abort(request_id)
        self._inbox.put(self._end)
        self._thread.join(timeout=5)

    def snapshot(self) -> dict[str, Any]:
        return {"running": len(self._running), "waiting": 0, "store": {"used_slots": len(self._seen)}, **self.gauges}

    def outline(self, max_nodes: int, names: Mapping[str, tuple[int, ...]]) -> Outline:
        """A node per prompt, named where a known prefix begins it."""
        nodes = [
            NodeView(
                id=f"n{i}", parent="", name=next((n for n, p in names.items() if p and ids[: len(p)] == p), ""),
                depth=0, num_tokens=len(ids), num_children=0, uses=1.0, idle_s=2.0, is_pinned=False,
            )
            for i, (ids, _) in enumerate(self._seen[:max_nodes])
        ]  # fmt: skip
        return Outline(400, [[1, 1, 0]] * 200, nodes, len(self._seen))

    @property
    def num_outstanding(self) -> int:
        return self._num_outstanding

    def stall(self) -> None:
        """Take requests and answer nothing until `gate` is set."""
        self.gate.clear()

    def crash_step(self) -> None:
        """The next step fails; the engine goes on."""
        self._inbox.put(lambda: setattr(self, "_is_crashing", True))
        self.gate.set()

    def die(self) -> None:
        """The thread ends and everything in flight fails."""
        self.gate.set()
        self._inbox.put(self._end)
        self._thread.join(timeout=5)

    def _end(self) -> None:
        self._is_ending = True

    def _start(self, request: Request, on_event: OnEvent) -> None:
        prompt = self.tokenizer.decode(request.token_ids)
        sampling = request.sampling
        texts = [expected_text(prompt, sampling.max_new_tokens, index=i) for i in range(sampling.n)]
        self._running[request.request_id] = _Running(request, on_event, self._match(request), texts)
        self.peak_running = max(self.peak_running, len(self._running))

    def _match(self, request: Request) -> int:
        if not request.reuse:
            return 0
        ids = request.token_ids
        best = max((_common(ids, other) for other, scope in self._seen if scope == request.scope), default=0)
        self._seen.append((ids, request.scope))
        return min(best, len(ids) - 1) // BLOCK * BLOCK

    def _mark(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].is_aborted = True

    def _main(self) -> None:
        while not self._is_ending:
            try:
                self._inbox.get(timeout=0.0 if self._running and self.gate.is_set() else 0.02)()
                while True:
                    self._inbox.get_nowait()()
            except queue.Empty:
                pass
            self._step()
        for item in list(self._running.values()):
            self._leave(item, Failed(error=EngineDeadError("the engine stopped")))

    def _step(self) -> None:
        if self._is_crashing and self._running:
            self._is_crashing = False
            for item in list(self._running.values()):
                self._leave(item, Failed(error=InternalError("the step failed")))
        if self.step_s and self._running:
            time.sleep(self.step_s)
        for item in list(self._running.values()):
            if item.is_aborted or item.produced >= item.request.sampling.max_new_tokens:
                self._finish(item)
            elif self.gate.is_set():
                self._token(item)

    def _token(self, item: _Running) -> None:
        last = item.produced + 1 == item.request.sampling.max_new_tokens
        num_top = item.request.sampling.logprobs
        for index, text in enumerate(item.texts):
            token_id = ord(text[item.produced])
            logprobs = () if num_top is None else (_logprob(token_id, num_top),)
            item.on_event(
                Delta(
                    index=index,
                    text=text[item.produced],
                    token_ids=(token_id,),
                    logprobs=logprobs,
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
        item.produced += 1

    def _finish(self, item: _Running) -> None:
        reason = FinishReason.ABORT if item.is_aborted else FinishReason.LENGTH
        num_top = item.request.sampling.logprobs
        completions = []
        for index, text in enumerate(item.texts):
            ids = tuple(ord(c) for c in text[: item.produced])
            logprobs = () if num_top is None else tuple(_logprob(t, num_top) for t in ids)
            completions.append(
                Completion(
                    index=index,
                    text=text[: item.produced],
                    token_ids=ids,
                    finish_reason=reason,
                    logprobs=logprobs,
                )
            )
        facts = CacheFacts(
            prompt_tokens=len(item.request.token_ids),
            cached_tokens=item.cached,
            tier=Tier.DEVICE if item.cached else Tier.NONE,
            miss_reason=None if item.cached else MissReason.COLD,
            ttft_ms=1.5,
        )
        self._leave(item, Done(completions=tuple(completions), facts=facts))

    def _leave(self, item: _Running, event: Done | Failed) -> None:
        del self._running[item.request.request_id]
        self._num_outstanding -= 1
        item.on_event(event)


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=tuple((token_id + i, -0.5 - i) for i in range(num_top)))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
