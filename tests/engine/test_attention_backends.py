"""The oracle, and the CPU backend without kernels, equal the written-out softmax for every window, with sinks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.engine.attention.cpu import CPUBackend
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.step import Step
from kvreuse.kv.pool import KVPool
from tests.engine.harness import one_layer
from tests.engine.test_attention_plan import steps

NUM_SLOTS = 700
# Two decode rows and a prefill chunk on one shared run; a fragmented decode; a first chunk; a decode with nothing else.
SLICES = (
    StepSlice(first_row=0, num_rows=1, num_context=199, runs=((0, 150), (300, 50))),
    StepSlice(first_row=1, num_rows=1, num_context=150, runs=((0, 150), (380, 1))),
    StepSlice(first_row=2, num_rows=17, num_context=160, runs=((0, 150), (400, 27))),
    StepSlice(first_row=19, num_rows=1, num_context=99, runs=((160, 30), (200, 40), (260, 30))),
    StepSlice(first_row=20, num_rows=33, num_context=0, runs=((450, 33),)),
    StepSlice(first_row=53, num_rows=1, num_context=0, runs=((500, 1),)),
    StepSlice(first_row=54, num_rows=5, num_context=40, runs=((510, 20), (550, 25))),
)


def _pool(
    *, kv_heads, group, window, key_dim=16, value_dim=16, dtype=torch.float32, slices=SLICES, num_slots=NUM_SLOTS
):
    heads = {"num_kv_heads": kv_heads, "num_query_heads": kv_heads * group}
    layout = one_layer(**heads, key_head_dim=key_dim, value_head_dim=value_dim, dtype=dtype, window=window)
    pool = KVPool(layout, num_slots=num_slots)
    # Slots that nobody owns hold NaN: touching one shows.
    pool.keys[0].fill_(float("nan"))
    pool.values[0].fill_(float("nan"))
    for piece in slices:
        for start, length in piece.runs:
            pool.keys[0][start : start + length].normal_()
            pool.values[0][start : start + length].normal_()
    return pool


def _plain(pool, query, window, sinks):
    """Softmax written out for one row at a time, as an independent check of the oracle."""
    group = query.shape[1] // pool.keys[0].shape[1]
    out = torch.empty(1, query.shape[2], query.shape[1], pool.values[0].shape[2])
    for piece in SLICES:
        slots = [s for start, n in piece.runs for s in range(start, start + n)]
        for i in range(piece.num_rows):
            position = piece.num_context + i
            low = 0 if window is None else max(0, position - window + 1)
            seen = torch.tensor(slots[low : position + 1])
            for head in range(query.shape[1]):
                keys, values = (slab[seen, head // group] for slab in (pool.keys[0], pool.values[0]))
                weights = (keys @ query[0, head, piece.first_row + i] * 0.3).exp()
                total = weights.sum() + (sinks[head].exp() if sinks is not None else 0)
                out[0, piece.first_row + i, head] = weights @ values / total
    return out


@pytest.mark.parametrize("window", [None, 1, 16, 40, 155, 1000])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 4), (2, 3), (3, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_backends_equal_the_written_out_softmax(window, kv_heads, group, has_sinks):
    torch.manual_seed(0)
    pool = _pool(kv_heads=kv_heads, group=group, window=window)
    query = torch.randn(1, kv_heads * group, 59, 16)
    sinks = torch.randn(kv_heads * group) if has_sinks else None
    expected = _plain(pool, query, window, sinks)
    for backend in (ReferenceBackend(), CPUBackend()):
        step = Step(pool, SLICES, backend)
        torch.testing.assert_close(backend.attend(step, 0, query, scaling=0.3, sinks=sinks), expected)


@given(slices=steps(), window=st.sampled_from([None, 1, 7, 33]))
def test_they_agree_however_sequences_share(slices, window):
    torch.manual_seed(0)
    num_slots = max(start + length for piece in slices for start, length in piece.runs)
    pool = _pool(kv_heads=2, group=3, window=window, slices=slices, num_slots=num_slots)
    query = torch.randn(1, 6, sum(piece.num_rows for piece in slices), 16)
    results = [
        backend.attend(Step(pool, slices, backend), 0, query, scaling=0.3, sinks=None)
        for backend in (CPUBackend(), ReferenceBackend())
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_long_chunk_behind_a_long_context_is_exact():
    torch.manual_seed(0)
    chunk = StepSlice(first_row=0, num_rows=300, num_context=170, runs=((0, 100), (110, 370)))
    for window in (None, 130):
        pool = _pool(kv_heads=2, group=3, window=window, slices=[chunk])
        query = torch.randn(1, 6, 300, 16)
        results = [
            backend.attend(Step(pool, [chunk], backend), 0, query, scaling=0.3, sinks=None)
            for backend in (CPUBackend(), ReferenceBackend())
        ]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_different_head_sizes_need_the_reference():
    torch.manual_seed(0)
    pool = _pool(kv_heads=2, group=2, window=None, key_dim=16, value_dim=8)
    query = torch.randn(1, 4, 59, 16)
    assert CPUBackend.for_layout(pool.layout) == "its kernel takes keys and values of one head size"
    backend = ReferenceBackend()
    out = backend.attend(Step(pool, SLICES, backend), 0, query, scaling=0.3, sinks=None)
    torch.testing.assert_close(out, _plain(pool, query, None, None))


def test_a_bfloat16_merge_stays_close_to_float32():
    torch.manual_seed(0)
    pool = _pool(kv_heads=2, group=2, window=None)
    query = torch.randn(1, 4, 59, 16)
    expected = _plain(pool, query, None, None)
    small = KVPool(pool.layout.stored_as(torch.bfloat16), num_slots=NUM_SLOTS)
    small.keys[0].copy_(pool.keys[0])
    small.values[0].copy_(pool.values[0])
    out = CPUBackend().attend(Step(small, SLICES, CPUBackend()), 0, query.bfloat16(), scaling=0.3, sinks=None)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_overlapping_moves_keep_the_content():
    pool = KVPool(one_layer(head_dim=2, num_kv_heads=1, num_query_heads=1), num_slots=32)
    for source, target in ((0, 3), (5, 1), (0, 16)):
        pool.keys[0][:] = torch.arange(32.0)[:, None, None]
        pool.move(source, target, 10)
        assert pool.keys[0][target : target + 10, 0, 0].tolist() == list(range(source, source + 10))
