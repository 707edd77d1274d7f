"""The same promises on a CUDA device: parity with plain generate, sharing, reuse across requests."""

import pytest
import torch

from kvreuse.config import Config
from kvreuse.engine.attention.step import NAME, register
from kvreuse.engine.loader import load_model
from tests.engine.harness import generate, plain_demo, running_engine, send

pytestmark = pytest.mark.gpu

B = 32
LENGTHS = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 7)


def _loaded(dtype):
    register()
    config = Config(model_id="demo", device="cuda", dtype=dtype)
    return load_model(config, device=torch.device("cuda"), attn_implementation=NAME)


@pytest.fixture
def exact_matmul(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.usefixtures("exact_matmul")
def test_float32_tokens_equal_plain_generate_cold_warm_and_off():
    ids = [7 + i * 7919 % 40000 for i in range(max(LENGTHS))]
    expected = [generate(plain_demo(), ids[:length], 8) for length in LENGTHS]
    with running_engine(_loaded("float32"), kv_cache_block_size=B, kv_cache_memory_bytes=2**28) as engine:
        for reuse in (False, True, True):
            assert [send(engine, ids[:length], reuse=reuse).tokens() for length in LENGTHS] == expected
        batch = [send(engine, ids[:length]) for length in LENGTHS]
        assert [answer.tokens() for answer in batch] == expected


def test_a_hit_in_bfloat16_predicts_what_the_cold_request_did():
    ids = [7 + i * 7919 % 40000 for i in range(5 * B + 3)]
    with running_engine(_loaded("bfloat16"), kv_cache_block_size=B, kv_cache_memory_bytes=2**28) as engine:
        cold, hit = (send(engine, ids, num_new=1, logprobs=0).result() for _ in range(2))
        assert hit.facts.cached_tokens == 5 * B
        first = [done.completions[0].logprobs[0].logprob for done in (cold, hit)]
        assert first[0] == pytest.approx(first[1], abs=0.1)
