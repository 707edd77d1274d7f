"""The load that all peers get: greedy streams of /v1/completions in a closed loop.

Knows the route and the clock. Knows nothing of peers or of what the figures mean.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.peers.process import PeerError

__all__ = ["Answer", "ask", "ask_all"]

_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """ttft_s: from before connecting to the first text. itl_s: first to last text / further tokens. None: one token.

    started_at, ended_at: seconds of the monotonic clock. cached_tokens: the peer's word, None where it says nothing.
    """

    text: str
    num_tokens: int
    cached_tokens: int | None
    ttft_s: float
    itl_s: float | None
    started_at: float
    ended_at: float


def ask(url: str, prompt: str, *, max_tokens: int, model: str = "m") -> Answer:
    """One answer of exactly `max_tokens` tokens. PeerError when it is anything else."""
    started_at = time.perf_counter()
    parts, times, num_tokens, cached = [], [], max_tokens, None
    for event in _events(url, _body(prompt, max_tokens=max_tokens, model=model)):
        text = "".join(choice.get("text") or "" for choice in event.get("choices") or ())
        if text:
            times.append(time.perf_counter())
            parts.append(text)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
            cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    if num_tokens != max_tokens or not times:
        raise PeerError(f"answered {num_tokens} tokens in {len(times)} parts where {max_tokens} tokens were asked for")
    return Answer(
        text="".join(parts),
        num_tokens=num_tokens,
        cached_tokens=cached,
        ttft_s=times[0] - started_at,
        itl_s=(times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None,
        started_at=started_at,
        ended_at=time.perf_counter(),
    )


def ask_all(url: str, prompts: Sequence[str], *, concurrency: int, max_tokens: int, limit_s: float) -> list[Answer]:
    """`concurrency` clients that each send the next prompt when their answer is complete, until `limit_s` have passed.

    The answers are those of the first prompts, in their order. Raises PeerError once no answer is due any more.
    """
    deadline = time.perf_counter() + limit_s
    waiting = iter(enumerate(prompts))
    taking = threading.Lock()
    answers: dict[int, Answer] = {}

    def client(_: int) -> None:
        is_over = False
        while not is_over:
            with taking:
                number, prompt = next(waiting, (None, ""))
            if number is None:
                return
            answers[number] = ask(url, prompt, max_tokens=max_tokens)
            is_over = time.perf_counter() >= deadline

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        list(pool.map(client, range(concurrency)))
    return [answers[number] for number in sorted(answers)]


def _body(prompt: str, *, max_tokens: int, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _events(url: str, body: dict[str, Any]) -> Iterator[Any]:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise PeerError(f"answered {response.status}: {response.read()[:200].decode(errors='replace')}")
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if event.get("error"):
                        raise PeerError(f"ended a stream with an error: {event['error']}")
                    yield event
            raise PeerError("ended a stream before its end")
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"broke a connection: {error or type(error).__name__}") from error
