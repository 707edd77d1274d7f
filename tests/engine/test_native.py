"""The kernels compute what is written out here in plain torch, in every variant that this processor can run."""

import ctypes
import functools
import platform
import random
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.step import Step
from kvreuse.engine.native import build
from kvreuse.engine.native.kernels import Kernels, _share_openmp
from tests.engine import test_attention_backends as oracle
from tests.engine.test_attention_plan import steps

IS_X86 = platform.machine() in ("x86_64", "AMD64")
RUNNABLE = {
    "plain": True,
    "avx2": torch.cpu._is_avx2_supported(),
    "avx512": torch.cpu._is_avx512_supported(),
    "avx512-bf16": torch.cpu._is_avx512_bf16_supported(),
}
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """What the image's build makes: run with the standard library alone."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    if IS_X86:
        subprocess.run([sys.executable, "-IS", build.__file__, str(folder)], check=True)
    else:
        assert build.compile_variant("plain", folder) is None
    return folder


@pytest.fixture(scope="session", params=[name for name, can_run in RUNNABLE.items() if can_run])
def kernels(request, libraries):
    _share_openmp()
    return Kernels(ctypes.CDLL(str(libraries / build.library_name(request.param))))


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# -- attention --------------------------------------------------------------------------------------------------------


@functools.cache
def _written_out(window, kv_heads, group, has_sinks):
    torch.manual_seed(0)
    pool = oracle._pool(kv_heads=kv_heads, group=group, window=window)
    query = torch.randn(1, kv_heads * group, 59, 16)
    sinks = torch.randn(kv_heads * group) if has_sinks else None
    return pool, query, sinks, oracle._plain(pool, query, window, sinks)


@pytest.mark.parametrize("window", [None, 1, 16, 40, 155, 1000])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 4), (2, 3), (3, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.usefixtures("num_threads")
def test_attention_equals_the_written_out_softmax(kernels, window, kv_heads, group, has_sinks):
    pool, query, sinks, expected = _written_out(window, kv_heads, group, has_sinks)
    backend = NativeBackend(kernels)
    out = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.3, sinks=sinks)
    torch.testing.assert_close(out, expected)


def _compare(kernels, slices, *, dtype=torch.float32, window=None, group=3, head_dim=32, stretch=1.0):
    """Kernels and reference on a pool that ends with the last run; slots that nobody owns hold NaN."""
    num_slots = max(start + length for piece in slices for start, length in piece.runs)
    heads = {"kv_heads": 2, "group": group, "key_dim": head_dim, "value_dim": head_dim}
    pool = oracle._pool(**heads, window=window, dtype=dtype, slices=slices, num_slots=num_slots)
    query = (torch.randn(1, 2 * group, sum(piece.num_rows for piece in slices), head_dim) * stretch).to(dtype)
    got, expected = (
        backend.attend(Step(pool, slices, backend), 0, query, scaling=head_dim**-0.5, sinks=None)
        for backend in (NativeBackend(kernels), ReferenceBackend())
    )
    # Scores are rounded relative to their size.
    limits = {name: limit * max(1.0, stretch / 10) for name, limit in TOLERANCE[dtype].items()}
    torch.testing.assert_close(got, expected, **limits)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size_and_group_fits_the_tiles(kernels, head_dim, group, dtype):
    if dtype is torch.bfloat16 and not kernels.can_attend(head_dim, dtype):
        pytest.skip(f"these kernels do not take {dtype} heads of {head_dim}")
    torch.manual_seed(0)
    _compare(kernels, oracle.SLICES, dtype=dtype, group=group, head_dim=head_dim)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_of_any_length_fill_blocks(kernels, length, dtype):
    torch.manual_seed(0)
    three = tuple((start, length) for start in (3 * length, length, 2 * length))
    slices = (
        StepSlice(first_row=0, num_rows=1, num_context=length - 1, runs=((0, length),)),
        StepSlice(first_row=1, num_rows=1, num_context=3 * length - 1, runs=three),
        StepSlice(first_row=2, num_rows=length, num_context=0, runs=((4 * length, length),)),
    )
    _compare(kernels, slices, dtype=dtype)


@settings(deadline=None, max_examples=30)
@given(slices=steps(), window=st.sampled_from([None, 1, 7, 33]), dtype=st.sampled_from(DTYPES))
def test_attention_equals_the_reference_however_sequences_share(kernels, slices, window, dtype):
    torch.manual_seed(0)
    _compare(kernels, slices, window=window, dtype=dtype)


def _crowd(seed):
    """Some decode, some prefill, behind a long prefix or behind none; the own slots in up to three runs."""
    rng = random.Random(seed)
    next_slot = num_shared = rng.choice([0, 60, 130, 300])
    slices, first_row = [], 0
    for _ in range(rng.randint(1, 8)):
        num_rows = rng.choice([1, 1, 1, 2, 6, 7, 64, 90])
        runs = ((0, num_shared),) if num_shared and rng.random() < 0.7 else ()
        lengths = [rng.randint(1, 70) for _ in range(rng.randint(0, 2))] + [num_rows]
        for length in lengths:
            next_slot += rng.randint(0, 1)
            runs += ((next_slot, length),)
            next_slot += length
        num_context = sum(length for _, length in runs) - num_rows
        slices.append(StepSlice(first_row=first_row, num_rows=num_rows, num_context=num_context, runs=runs))
        first_row += num_rows
    return slices


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, 9, 100])
@pytest.mark.usefixtures("num_threads")
def test_a_crowd_equals_the_reference(kernels, seed, window):
    torch.manual_seed(seed)
    _compare(kernels, _crowd(seed), window=window, dtype=DTYPES[seed % 2], group=1 + seed % 5)


@pytest.mark.parametrize("window", [5, 20, 64, 90])
@pytest.mark.parametrize("group", [1, 4])
def test_a_long_chunk_with_a_short_window_skips_what_no_row_of_it_sees(kernels, window, group):
    torch.manual_seed(0)
    chunk = StepSlice(first_row=0, num_rows=200, num_context=70, runs=((30, 100), (131, 170)))
    _compare(kernels, [chunk], window=window, group=group)


def test_very_large_scores_neither_overflow_nor_vanish(kernels):
    torch.manual_seed(0)
    _compare(kernels, oracle.SLICES, stretch=100.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_one_key_gets_its_value(kernels, dtype):
    torch.manual_seed(0)
    pool = oracle._pool(kv_heads=2, group=3, window=1, key_dim=32, value_dim=32, dtype=dtype)
    step = Step(pool, oracle.SLICES, NativeBackend(kernels))
    out = step.backend.attend(step, 0, torch.randn(1, 6, 59, 32, dtype=dtype), scaling=0.3, sinks=None)
    assert torch.equal(out[0], pool.values[0][step.slots_on(torch.device("cpu"))].repeat_interleave(3, dim=1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_query_that_is_no_number_spoils_no_other(kernels, bad):
    torch.manual_seed(0)
    pool = oracle._pool(kv_heads=2, group=3, window=None, key_dim=32, value_dim=32)
    query, backend = torch.randn(1, 6, 59, 32), NativeBackend(kernels)
    expected = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.3, sinks=None)
    query[0, 2, 5] = bad
    out = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.3, sinks=None)
    assert not out[0, 5, 2].isfinite().any()
    out[0, 5, 2] = expected[0, 5, 2]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.float32), (272, torch.float32), (64, torch.float16)])
def test_other_heads_are_refused(kernels, head_dim, dtype):
    assert not kernels.can_attend(head_dim, dtype)


# -- the small operations ---------------------------------------------------------------------------------------------


def _normed(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("size", [16, 48, 80, 576])
@pytest.mark.usefixtures("num_threads")
def test_add_norm_adds_in_place_and_norms_the_sum(kernels, dtype, num_rows, size):
    torch.manual_seed(0)
    x, more, weight = (torch.randn(*shape, dtype=dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    total, same = x + more, more.clone()
    out = kernels.add_norm(x, more, weight, eps=1e-5)
    assert torch.equal(x, total)
    assert torch.equal(more, same)
    torch.testing.assert_close(out.float(), _normed(total, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_of_nothing_more_leaves_the_rows(kernels, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(40, 48, dtype=dtype), torch.randn(48, dtype=dtype)
    same = x.clone()
    torch.testing.assert_close(
        kernels.add_norm(x, None, weight, eps=1e-5).float(), _normed(x, weight), **TOLERANCE[dtype]
    )
    assert torch.equal(x, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("size", [16, 48, 80])
@pytest.mark.usefixtures("num_threads")
def test_silu_mul_is_the_product_of_the_halves(kernels, dtype, num_rows, size):
    torch.manual_seed(0)
    both = torch.randn(num_rows, 2 * size, dtype=dtype) * 4
    both[:, :5] = torch.tensor([100.0, -100.0, 0.0, 88.0, -87.4])
    gate, up = both.float().chunk(2, dim=-1)
    torch.testing.assert_close(kernels.silu_mul(both).float(), nn.functional.silu(gate) * up, **TOLERANCE[dtype])


def _rotated(heads, cos, sin):
    """heads (T, n, head_dim), cos and sin (T, head_dim)."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 32), (3, 3, 96), (8, 1, 64)])
@pytest.mark.usefixtures("num_threads")
def test_rope_write_turns_queries_in_place_and_fills_the_slots(
    kernels, dtype, num_rows, num_heads, num_kv_heads, head_dim
):
    torch.manual_seed(0)
    qkv = torch.randn(num_rows + 3, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    cos, sin = torch.randn(2, num_rows + 3, head_dim, dtype=dtype)
    slots = torch.randperm(50)[:num_rows]
    slabs = tuple(torch.full((1, num_kv_heads, 50, head_dim), 7.0, dtype=dtype) for _ in range(2))
    before, turned = qkv.clone(), _rotated(qkv.float(), cos.float(), sin.float())
    kernels.rope_write(qkv.view(num_rows + 3, -1), (cos, sin), slots, slabs)
    torch.testing.assert_close(qkv[:num_rows, :num_heads].float(), turned[:num_rows, :num_heads], **TOLERANCE[dtype])
    assert torch.equal(qkv[num_rows:], before[num_rows:])
    keys, values = (slab[0].transpose(0, 1) for slab in slabs)
    key_heads = slice(num_heads, num_heads + num_kv_heads)
    torch.testing.assert_close(keys[slots].float(), turned[:num_rows, key_heads], **TOLERANCE[dtype])
    assert torch.equal(values[slots], before[:num_rows, num_heads + num_kv_heads :])
    others = sorted(set(range(50)) - set(slots.tolist()))
    assert (keys[others] == 7).all()
    assert (values[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_spoils_no_other(kernels, dtype, bad):
    torch.manual_seed(0)
    rows, weight, more = (torch.randn(*shape, dtype=dtype) for shape in ((5, 128), (128,), (5, 128)))
    cos, sin = torch.randn(2, 5, 32, dtype=dtype)

    def results(x):
        slabs = torch.zeros(2, 1, 1, 5, 32, dtype=dtype)
        qkv = x.clone()
        kernels.rope_write(qkv, (cos, sin), torch.tensor([4, 0, 3, 1, 2]), tuple(slabs))
        normed = kernels.add_norm(x.clone(), more, weight, eps=1e-5)
        return [normed, kernels.silu_mul(x), qkv, *slabs[:, 0, 0][:, [4, 0, 3, 1, 2]]]

    spoiled = rows.clone()
    spoiled[2, ::7] = bad
    for expected, got in zip(results(rows), results(spoiled), strict=True):
        assert not got[2].isfinite().all()
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_rows_and_heads_that_do_not_fill_vectors_are_not_fused(kernels):
    assert kernels.can_fuse(576, 64)
    assert not kernels.can_fuse(580, 64)
    assert not kernels.can_fuse(576, 24)
