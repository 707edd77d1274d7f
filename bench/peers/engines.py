"""The peers that are libraries: each a function that answers prompts from a pipe until the pipe is closed.

Run by the peer's own Python, so that its library is imported only where it is used.
Knows Transformers and OpenVINO GenAI. Knows nothing of HTTP.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ENGINES", "Chunk", "Engine", "EngineSettings", "Prompt", "TextStream"]

KV_BYTES = 2 * 2**30
_PAGE_TOKENS = 16
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """model: folder in the peer's own format. dtype: of weights and KV, float32 or bfloat16."""

    model: str
    dtype: str
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One greedy request of exactly `max_tokens` tokens, whatever they are."""

    number: int
    text: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The next part of the answer to prompt `number`."""

    number: int
    text: str
    num_tokens: int
    is_last: bool


Engine = Callable[[Connection, EngineSettings], None]


class TextStream:
    """Turns token ids into text as they come; a character of several tokens waits for its last one."""

    def __init__(self, prompt: Prompt, decode: Callable[[Sequence[int]], str]) -> None:
        self._prompt = prompt
        self._decode = decode
        self._token_ids: list[int] = []
        self._num_sent = 0

    def add(self, token_ids: Sequence[int]) -> Chunk:
        """The chunk that these new ids make."""
        self._token_ids += token_ids
        is_last = len(self._token_ids) >= self._prompt.max_tokens
        text = self._decode(self._token_ids)
        if text.endswith(_REPLACEMENT) and not is_last:
            text = text[: self._num_sent]
        new, self._num_sent = text[self._num_sent :], len(text)
        return Chunk(number=self._prompt.number, text=new, num_tokens=len(token_ids), is_last=is_last)


def transformers(pipe: Connection, settings: EngineSettings) -> None:
    """Plain `generate`, one prompt after the other, nothing reused."""
    from transformers.generation.streamers import BaseStreamer

    model, tokenizer, version = _load(settings)

    class Sender(BaseStreamer):  # type: ignore[misc]
        def __init__(self, prompt: Prompt) -> None:
            self.stream = TextStream(prompt, tokenizer.decode)
            self.has_seen_prompt = False

        def put(self, value: Any) -> None:
            if self.has_seen_prompt:
                pipe.send(self.stream.add(value.tolist()))
            self.has_seen_prompt = True

        def end(self) -> None:
            pass

    pipe.send(version)
    while True:
        prompt: Prompt = pipe.recv()
        inputs = tokenizer(prompt.text, return_tensors="pt")
        model.generate(**inputs, max_new_tokens=prompt.max_tokens, do_sample=False, streamer=Sender(prompt))


def transformers_cb(pipe: Connection, settings: EngineSettings) -> None:
    """Transformers' own continuous batching: paged attention, blocks of equal prefixes shared."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model, tokenizer, version = _load(settings)
    batching = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=KV_BYTES // (_PAGE_TOKENS * _kv_bytes_per_token(model)),
        max_batch_tokens=1024,
        allow_block_sharing=True,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
    streams: dict[str, TextStream] = {}
    num_seen: dict[str, int] = {}

    def take_all() -> None:
        while True:
            prompt: Prompt = pipe.recv()
            name = str(prompt.number)
            streams[name], num_seen[name] = TextStream(prompt, tokenizer.decode), 0
            ids = tokenizer(prompt.text).input_ids
            manager.add_request(ids, request_id=name, max_new_tokens=prompt.max_tokens, streaming=True, eos_token_id=-1)

    manager.start()
    pipe.send(version)
    threading.Thread(target=take_all, daemon=True).start()
    while True:
        output = manager.get_result(timeout=1.0)
        if output is None:
            continue
        if output.error:
            raise RuntimeError(output.error)
        new = output.generated_tokens[num_seen[output.request_id] :]
        num_seen[output.request_id] += len(new)
        if new:
            pipe.send(streams[output.request_id].add(new))


def openvino(pipe: Connection, settings: EngineSettings) -> None:
    """OpenVINO GenAI's continuous batching with prefix caching; KV in the dtype of the weights, not in its u8."""
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_BYTES // 2**30
    scheduler.enable_prefix_caching = True
    precision = {"float32": "f32", "bfloat16": "bf16"}[settings.dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings.num_threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
    decode = pipeline.get_tokenizer().decode
    running: deque[tuple[Any, TextStream]] = deque()
    pipe.send(f"OpenVINO GenAI {genai.__version__.split('-')[0]}")
    while True:
        while not running or pipe.poll():
            prompt: Prompt = pipe.recv()
            greedy = genai.GenerationConfig(max_new_tokens=prompt.max_tokens, ignore_eos=True, do_sample=False)
            greedy.apply_chat_template = False
            handle = pipeline.add_request(prompt.number, prompt.text, greedy)
            running.append((handle, TextStream(prompt, decode)))
        pipeline.step()
        for _ in range(len(running)):
            handle, stream = running.popleft()
            if not _send_new(pipe, handle, stream):
                running.append((handle, stream))


def _send_new(pipe: Connection, handle: Any, stream: TextStream) -> bool:
    """Whether the answer is complete."""
    is_complete = False
    while handle.can_read():
        for output in handle.read().values():
            chunk = stream.add(output.generated_ids)
            pipe.send(chunk)
            is_complete = chunk.is_last
    return is_complete


def _load(settings: EngineSettings) -> tuple[Any, Any, str]:
    """The model, which never ends an answer by itself, the tokenizer, and what they are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    torch.set_num_threads(settings.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype)).eval()
    model.generation_config.eos_token_id = None
    return model, tokenizer, f"Transformers {__version__}, torch {torch.__version__}"


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


ENGINES: dict[str, Engine] = {"transformers": transformers, "transformers_cb": transformers_cb, "openvino": openvino}
