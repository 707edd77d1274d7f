"""The same promises on a CUDA device: parity with plain generate, sharing, reuse across requests, and the kernel."""

import pytest
import torch

from kvreuse.config import Config
from kvreuse.engine.attention.self_test import choose_cuda
from kvreuse.engine.attention.step import NAME, register
from kvreuse.engine.loader import load_model
from tests.engine.harness import generate, one_layer, plain_demo, running_engine, send

pytestmark = pytest.mark.gpu

B = 32
LENGTHS = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 7)


def _loaded(dtype):
    register()
    config = Config(model_id="demo", device="cuda", dtype=dtype)
    return load_model(config, device=torch.device("cuda"), attn_implementation=NAME)


@pytest.fixture
def exact_matmul():
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (8, 4, 128), (2, 1, 256), (1, 8, 96)])
def test_torch_has_a_kernel_that_reads_the_slabs_in_place(dtype, kv_heads, group, head_dim):
    heads = {"num_kv_heads": kv_heads, "num_query_heads": kv_heads * group}
    device = torch.device("cuda", 0)
    layout = one_layer(head_dim=head_dim, **heads, dtype=dtype, device=device, window=100, has_sinks=True)
    assert choose_cuda(layout).name == "cuda"
    assert choose_cuda(layout, is_gathering=True).name == "cuda-gather"


def _first_logprobs(backend):
    """Of prompts of many lengths that share what they can, first computed all at once, then on what is stored."""
    ids = [7 + i * 7919 % 40000 for i in range(max(LENGTHS))]
    options = {"kv_cache_block_size": B, "kv_cache_memory_bytes": 2**28, "attention_backend": backend}
    with running_engine(_loaded("bfloat16"), **options) as engine:
        logprobs = []
        for _ in range(2):
            answers = [send(engine, ids[:length], num_new=1, logprobs=0) for length in LENGTHS]
            logprobs += [answer.result().completions[0].logprobs[0].logprob for answer in answers]
        return logprobs


@pytest.mark.parametrize("backend", ["cuda", "cuda-gather"])
def test_a_whole_model_predicts_what_it_does_on_the_reference(backend):
    assert _first_logprobs(backend) == pytest.approx(_first_logprobs("reference"), abs=0.3)
