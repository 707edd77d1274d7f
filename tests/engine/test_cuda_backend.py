"""The CUDA backend on a kernel written out in plain torch, which does what varlen_attn says of itself and no more."""

import logging
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.engine.attention.cuda import MAX_PIECES, CUDABackend
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.self_test import choose_cuda, refusal
from kvreuse.engine.attention.step import Step
from kvreuse.engine.parts import assemble
from kvreuse.engine.runner import Runner
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout
from kvreuse.kv.pool import KVPool
from tests.engine import test_attention_backends as oracle
from tests.engine.harness import BLOCK, Config, Engine, check_at_rest, generate, one_layer, plain_tiny, send, tiny
from tests.engine.test_attention_plan import steps

SM80 = {"capability": lambda device: (8, 0)}


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, seqused_k=None):
    """Entry by entry, in float32. Refuses what the real kernel refuses or would read wrongly."""
    for ints in (cu_seq_q, cu_seq_k, *([] if seqused_k is None else [seqused_k])):
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    assert {query.stride(-1), key.stride(-1), value.stride(-1)} == {1}
    assert query.dtype == key.dtype == value.dtype
    bounds = list(pairwise(cu_seq_q.tolist()))
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(query)
    assert max_q == max(stop - start for start, stop in bounds)
    # With one row at most the real kernel does not look at cu_seq_q.
    assert max_q > 1 or len(bounds) == len(query)
    starts = cu_seq_k.tolist()
    lengths = [b - a for a, b in pairwise(starts)] if seqused_k is None else seqused_k.tolist()
    assert max_k == max(lengths)
    assert min(lengths) > 0
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for (first, stop), start, length in zip(bounds, starts, lengths, strict=False):
        keys, values = (s[start : start + length].float().transpose(0, 1) for s in (key, value))
        keys, values = (s.repeat_interleave(query.shape[1] // len(s), dim=0) for s in (keys, values))
        scores = query[first:stop].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        # Aligned to the bottom right: the last row's own key is the last.
        before = torch.arange(length - (stop - first), length)[:, None] - torch.arange(length)[None, :]
        left, right = (length + stop if bound < 0 else bound for bound in window_size)
        scores = scores.masked_fill((before > left) | (before < -right), -torch.inf)
        lse[:, first:stop] = scores.logsumexp(-1)
        out[first:stop] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    return out, lse


def without_offsets(*args, seqused_k=None, **kwargs):
    """A kernel that takes the keys of an entry to end where those of the next begin, whatever is used of them."""
    query, key, value, cu_seq_q, cu_seq_k, *_ = args
    cu_seq_k = torch.arange(len(cu_seq_k), dtype=torch.int32) if seqused_k is not None else cu_seq_k
    max_k = max(b - a for a, b in pairwise(cu_seq_k.tolist()))
    return varlen(query, key, value, cu_seq_q, cu_seq_k, args[5], max_k, **kwargs)


def refusing_offsets(*args, seqused_k=None, **kwargs):
    if seqused_k is not None:
        raise RuntimeError("seqused_k is not supported\nException raised from somewhere")
    return varlen(*args, **kwargs)


def refusing(*args, **kwargs):
    raise RuntimeError("no kernel in this build")


_layout = partial(one_layer, head_dim=16, dtype=torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["in place", "gathering"])
def backend(request):
    return CUDABackend(varlen, is_gathering=request.param)


@pytest.mark.parametrize("window", [None, 1, 16, 40, 155, 1000])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 4), (2, 3), (3, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_equals_the_written_out_softmax(backend, window, kv_heads, group, has_sinks):
    torch.manual_seed(0)
    pool = oracle._pool(kv_heads=kv_heads, group=group, window=window)
    query = torch.randn(1, kv_heads * group, 59, 16)
    sinks = torch.randn(kv_heads * group) if has_sinks else None
    out = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.3, sinks=sinks)
    torch.testing.assert_close(out, oracle._plain(pool, query, window, sinks))


def _agrees(backend, slices, *, window=None):
    """Whether it equals the reference on these slices, in a pool where other slots are NaN."""
    torch.manual_seed(0)
    num_slots = max(start + length for piece in slices for start, length in piece.runs)
    pool = KVPool(_layout(dtype=torch.float32, window=window), num_slots=num_slots)
    for slab in (pool.keys[0], pool.values[0]):
        slab.fill_(float("nan"))
        for start, length in {run for piece in slices for run in piece.runs}:
            slab[start : start + length] = torch.randn(length, 2, 16)
    query = torch.randn(1, 6, sum(piece.num_rows for piece in slices), 16)
    got, expected = (
        one.attend(Step(pool, slices, one), 0, query, scaling=0.2, sinks=None) for one in (backend, ReferenceBackend())
    )
    return torch.allclose(got, expected, atol=1e-5)


@given(slices=steps(), window=st.sampled_from([None, 1, 7, 33]), is_gathering=st.booleans())
def test_it_equals_the_reference_however_sequences_share(slices, window, is_gathering):
    assert _agrees(CUDABackend(varlen, is_gathering=is_gathering), slices, window=window)


@pytest.mark.parametrize(("num_pieces", "num_entries"), [(MAX_PIECES, MAX_PIECES), (MAX_PIECES + 1, 1)])
def test_a_run_in_few_pieces_is_merged_and_one_in_many_is_copied_together(num_pieces, num_entries):
    entries = []

    def watching(query, *rest, **kwargs):
        entries.append(len(query))
        return varlen(query, *rest, **kwargs)

    runs = tuple((20 * i, 9) for i in reversed(range(num_pieces)))
    alone = StepSlice(first_row=0, num_rows=1, num_context=9 * num_pieces - 1, runs=runs)
    assert _agrees(CUDABackend(watching), [alone])
    assert entries == [num_entries]


def test_own_slots_in_pieces_keep_their_mask(backend):
    chunk = StepSlice(first_row=0, num_rows=12, num_context=3, runs=((40, 7), (10, 8)))
    assert _agrees(backend, [chunk])
    assert _agrees(backend, [chunk], window=5)


def test_a_long_chunk_with_context_is_exact(backend):
    chunk = StepSlice(first_row=0, num_rows=300, num_context=70, runs=((50, 370),))
    assert _agrees(backend, [chunk])
    assert _agrees(backend, [chunk], window=130)


def test_copies_of_many_keys_are_made_in_turn(monkeypatch):
    copied = []

    def watching(query, key, *rest, **kwargs):
        copied.append(len(key))
        return varlen(query, key, *rest, **kwargs)

    monkeypatch.setattr("kvreuse.engine.attention.cuda.MAX_COPIED", 100)
    slices = [StepSlice(first_row=i, num_rows=1, num_context=59, runs=((60 * i, 60),)) for i in range(6)]
    assert _agrees(CUDABackend(watching, is_gathering=True), slices)
    assert sum(copied) == 360
    assert max(copied) <= 160


def test_decoding_on_a_shared_run_is_two_launches_per_layer():
    launches = []

    def watching(query, *rest, **kwargs):
        launches.append(len(query))
        return varlen(query, *rest, **kwargs)

    slices = [StepSlice(first_row=i, num_rows=1, num_context=99, runs=((0, 90), (100 + 10 * i, 10))) for i in range(8)]
    assert _agrees(CUDABackend(watching), slices)
    assert launches == [8, 8]


def test_a_step_is_prepared_once_for_all_layers_with_one_window():
    pool = KVPool(KVLayout(_layout(dtype=torch.float32).layers * 3), num_slots=64)
    for slab in (*pool.keys, *pool.values):
        slab.normal_()
    step = Step(pool, [StepSlice(first_row=0, num_rows=1, num_context=9, runs=((20, 10),))], CUDABackend(varlen))
    for layer in range(3):
        step.backend.attend(step, layer, torch.randn(1, 6, 1, 16), scaling=0.2, sinks=None)
    assert len(step.prepared) == 1


@pytest.mark.parametrize("window", [None, 20])
def test_nothing_of_a_step_depends_on_values_on_the_device(window):
    """On the meta device there are no values: reading one back, as a synchronisation would, fails."""
    device = torch.device("meta")

    def shapes_only(query, *rest, **kwargs):
        return torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)

    pool = KVPool(_layout(device=device, window=window), num_slots=oracle.NUM_SLOTS)
    query, sinks = torch.empty(1, 6, 59, 16, device=device), torch.empty(6, device=device)
    for is_gathering in (False, True):
        backend = CUDABackend(shapes_only, is_gathering=is_gathering)
        out = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.2, sinks=sinks)
        assert out.shape == (1, 59, 6, 16)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_a_whole_model_on_it_answers_as_plain_generate(backend, family):
    prompts = [[2 + (7 * i * i + seed * (i > 2 * BLOCK)) % 90 for i in range(3 * BLOCK + 5)] for seed in range(4)]
    options = {"max_batch_size": 8, "max_batch_tokens": 13, "audit_rate": 0.0}
    config = Config(kv_cache_memory_bytes=2**24, kv_cache_block_size=BLOCK, **options)
    parts = assemble(tiny(family), config)
    engine = Engine(replace(parts, runner=Runner(tiny(family).model, parts.pool, backend)))
    try:
        for _ in range(2):
            answers = [send(engine, prompt, num_new=12) for prompt in prompts]
            expected = [generate(plain_tiny(family), prompt, 12) for prompt in prompts]
            assert [answer.tokens() for answer in answers] == expected
        check_at_rest(engine)
    finally:
        engine.stop(drain_s=0)


# -- which one runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"window": 11}, {"has_sinks": True}, {"num_query_heads": 2}])
def test_a_kernel_that_takes_offsets_is_used_in_place(dtype, changes):
    assert choose_cuda(_layout(dtype=dtype, **changes), kernel=varlen, **SM80).name == "cuda"


@pytest.mark.parametrize("kernel", [without_offsets, refusing_offsets])
@pytest.mark.parametrize("window", [None, 11])
def test_a_kernel_without_offsets_is_caught_and_gets_copies(kernel, window, caplog):
    caplog.set_level(logging.WARNING)
    assert choose_cuda(_layout(window=window), kernel=kernel, **SM80).name == "cuda-gather"
    assert "attention cuda failed its trial" in caplog.text
    assert "Exception raised from" not in caplog.text


def test_a_kernel_that_reads_beyond_a_run_is_caught():
    def greedy(*args, seqused_k=None, **kwargs):
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k = args
        if seqused_k is not None:
            seqused_k, max_k = seqused_k + 1, max_k + 1
        return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k=seqused_k, **kwargs)

    assert choose_cuda(_layout(), kernel=greedy, **SM80).name == "cuda-gather"


def test_a_kernel_that_never_works_leaves_the_reference():
    assert choose_cuda(_layout(), kernel=refusing, **SM80) == "the trial failed: no kernel in this build"


def test_a_kernel_that_breaks_the_device_stops_the_start():
    def breaking(*args, **kwargs):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(ConfigError, match="illegal memory access") as caught:
        choose_cuda(_layout(), kernel=breaking, **SM80)
    assert "hint: option.attention_backend=reference" in str(caught.value)


def test_copies_can_be_asked_for():
    assert choose_cuda(_layout(), is_gathering=True, kernel=varlen, **SM80).name == "cuda-gather"


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({"dtype": torch.float32}, (9, 0), "its kernel takes bfloat16 and float16, not float32"),
        ({"key_head_dim": 264, "value_head_dim": 264}, (9, 0), "heads of one size up to 256"),
        ({"key_head_dim": 20, "value_head_dim": 20}, (9, 0), "a multiple of 8"),
        ({"key_head_dim": 24}, (9, 0), "heads of one size"),
        ({}, (7, 5), "its kernel needs compute capability 8.0, cpu has 7.5"),
    ],
)
def test_what_the_kernel_cannot_do_is_said_before_it_is_tried(changes, capability, reason):
    layout = _layout(**changes)
    assert reason in str(refusal(layout, capability=lambda device: capability))
    assert reason in str(choose_cuda(layout, kernel=refusing, capability=lambda device: capability))


@pytest.mark.parametrize("name", ["cuda", "cuda-gather"])
def test_asking_for_it_on_a_cpu_is_refused(name):
    with pytest.raises(ConfigError, match=f"option.attention_backend is {name}, but the model is on cpu"):
        assemble(tiny("llama"), Config(attention_backend=name, kv_cache_memory_bytes=2**24))
