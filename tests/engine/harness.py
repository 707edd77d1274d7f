"""Engines for tests: around a tiny random model or the demo model, driven without HTTP."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvreuse.config import Config
from kvreuse.engine.attention.step import NAME, register
from kvreuse.engine.demo_model import demo_model_path
from kvreuse.engine.engine import Engine
from kvreuse.engine.loader import LoadedModel, load_model
from kvreuse.engine.parts import assemble
from kvreuse.kv.layout import KVLayout, LayerSpec
from kvreuse.types import Done, Event, Failed, Request, SamplingParams
from tests.engine.families import VOCAB, tiny_model

BLOCK = 8


class IdTokenizer:
    """A vocabulary whose token n reads ` n`."""

    vocab_size = VOCAB
    has_byte_fallback = False

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def is_visible(self, token_id: int) -> bool:
        return True

    def is_byte(self, token_id: int) -> bool:
        return False


@contextmanager
def running_engine(loaded: LoadedModel, **options: Any) -> Iterator[Engine]:
    """An engine with small blocks; on leaving, everything it lent must have come back."""
    # No audits by chance: they compute what a test counts.
    options = {"kv_cache_memory_bytes": 2**24, "kv_cache_block_size": BLOCK, "audit_rate": 0.0, **options}
    engine = Engine(assemble(loaded, Config(**options)))
    try:
        yield engine
        check_at_rest(engine)
    finally:
        engine.stop(drain_s=0)


def check_at_rest(engine: Engine) -> None:
    """No sequence left, no slot outside nodes, no pin; the store agrees with itself."""
    store = engine._parts.cache
    store.check_integrity()
    usage, gauges = store.usage(), engine.snapshot()
    assert gauges["running"] == gauges["waiting"] == 0
    assert not engine._requests
    assert usage.private_slots == 0
    assert usage.pinned_slots == 0


class Answer:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def result(self) -> Done | Failed:
        """Waits for the last event."""
        while not isinstance(event := self.events.get(timeout=120), Done | Failed):
            pass
        return event

    def tokens(self) -> list[int]:
        done = self.result()
        assert isinstance(done, Done), done
        return list(done.completions[0].token_ids)


_count = iter(range(10**9))


def send(engine: Engine, prompt: Sequence[int], *, num_new: int = 8, reuse: bool = True, **sampling: Any) -> Answer:
    """Submit a greedy request that ignores EOS unless told otherwise."""
    answer = Answer()
    params = SamplingParams(**{"max_new_tokens": num_new, "ignore_eos": True, **sampling})
    request = Request(request_id=f"r{next(_count)}", token_ids=tuple(prompt), sampling=params, reuse=reuse)
    answer.request_id = request.request_id  # type: ignore[attr-defined]
    engine.submit(request, answer.events.put)
    return answer


@cache
def tiny(family: str) -> LoadedModel:
    """The family's model, loaded for the engine."""
    register()
    model = tiny_model(family, attn_implementation=NAME)
    return LoadedModel(
        model=model,
        tokenizer=IdTokenizer(),
        eos_token_ids=(0,),
        max_model_len=512,
        name=family,
        source="",  # type: ignore[arg-type]
    )


@cache
def demo() -> LoadedModel:
    """The demo model in float32."""
    register()
    return load_model(Config(model_id="demo"), device=torch.device("cpu"), attn_implementation=NAME)


@cache
def plain_demo() -> PreTrainedModel:
    """The same weights as Transformers serves them."""
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def one_layer(*, head_dim: int = 64, **changes: Any) -> KVLayout:
    """A layout of one float32 layer on the CPU, two KV heads for six query heads, but for the changes."""
    spec = LayerSpec(
        num_kv_heads=2,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        num_query_heads=6,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return KVLayout((replace(spec, **changes),))


@cache
def plain_tiny(family: str) -> PreTrainedModel:
    return tiny_model(family, attn_implementation="eager")


def generate(model: PreTrainedModel, prompt: Sequence[int], num_new: int) -> list[int]:
    """Greedy tokens of plain `model.generate`, EOS ignored."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
