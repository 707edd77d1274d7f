"""The plan lets every row meet every slot that it sees exactly once, however the sequences share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvreuse.engine.attention.plan import Call, StepSlice, plan_window


def _slots(runs):
    return [slot for start, length in runs for slot in range(start, start + length)]


def _coalesced(slots):
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)


@st.composite
def steps(draw):
    """Slices over a random tree of shared nodes: each sequence takes a path, then private slots."""
    next_slot = 0
    paths = [()]  # a path is the slots of a prefix
    for _ in range(draw(st.integers(0, 5))):
        parent = draw(st.sampled_from(paths))
        next_slot += draw(st.integers(0, 2))
        length = draw(st.integers(1, 40))
        paths.append((*parent, *range(next_slot, next_slot + length)))
        next_slot += length
    sequences = []
    for _ in range(draw(st.integers(1, 7))):
        shared = draw(st.sampled_from(paths))
        num_private = draw(st.integers(0, 10))
        num_rows = draw(st.sampled_from([1, 1, 1, 3, 9]))
        next_slot += draw(st.integers(0, 1))
        own = range(next_slot, next_slot + num_private + num_rows)
        next_slot += len(own)
        sequences.append((_coalesced((*shared, *own)), num_rows))
    slices, first_row = [], 0
    for runs, num_rows in sorted(sequences):
        num_tokens = sum(length for _, length in runs)
        slices.append(StepSlice(first_row=first_row, num_rows=num_rows, num_context=num_tokens - num_rows, runs=runs))
        first_row += num_rows
    return slices


def _seen(call: Call):
    """(row, slot) pairs of a call, by its documented meaning."""
    slots = _slots(call.runs)
    for i in range(call.num_rows):
        if call.is_causal:
            seen = slots[: i + 1]
        elif call.window is not None:
            last = call.num_before + i
            seen = slots[max(0, last - call.window + 1) : last + 1]
        else:
            seen = slots
        for slot in seen:
            yield call.first_row + i, slot


@given(steps(), st.sampled_from([None, 1, 2, 7, 16, 33, 1000]))
def test_every_row_meets_every_visible_slot_exactly_once(slices, window):
    plan = plan_window(slices, window)
    met = Counter(pair for call in (*plan.first, *plan.more) for pair in _seen(call))
    expected = set()
    for piece in slices:
        slots = _slots(piece.runs)
        for i in range(piece.num_rows):
            position = piece.num_context + i
            low = 0 if window is None else max(0, position - window + 1)
            expected |= {(piece.first_row + i, slot) for slot in slots[low : position + 1]}
    assert set(met) == expected
    assert set(met.values()) == {1}


@given(steps(), st.sampled_from([None, 5, 20]))
def test_the_first_calls_cover_the_rows_in_order(slices, window):
    plan = plan_window(slices, window)
    rows = [row for call in plan.first for row in range(call.first_row, call.first_row + call.num_rows)]
    assert rows == list(range(sum(piece.num_rows for piece in slices)))


def test_a_long_shared_run_is_one_call_for_all():
    slices = [
        StepSlice(first_row=i, num_rows=1, num_context=1024 + i, runs=((0, 1024), (2000 + 64 * i, i + 1)))
        for i in range(8)
    ]
    plan = plan_window(slices, None)
    assert plan.more == (Call(first_row=0, num_rows=8, runs=((0, 1024),)),)
    assert [call.runs for call in plan.first] == [((2000 + 64 * i, i + 1),) for i in range(8)]


def test_nested_prefixes_are_read_once_at_each_depth():
    def piece(row, runs):
        return StepSlice(first_row=row, num_rows=1, num_context=sum(n for _, n in runs) - 1, runs=runs)

    slices = [
        piece(0, ((0, 100), (500, 100), (700, 5))),
        piece(1, ((0, 100), (500, 100), (800, 5))),
        piece(2, ((0, 100), (900, 5))),
    ]
    plan = plan_window(slices, None)
    assert set(plan.more) == {
        Call(first_row=0, num_rows=3, runs=((0, 100),)),
        Call(first_row=0, num_rows=2, runs=((500, 100),)),
    }


def test_a_saving_too_small_at_the_root_does_not_stop_sharing_below_it():
    def piece(row, tail):
        return StepSlice(first_row=row, num_rows=1, num_context=8 + 200 + 3, runs=((0, 8), *tail))

    slices = [piece(0, ((100, 200), (700, 4))), piece(1, ((100, 200), (800, 4)))]
    slices += [piece(2, ((400, 200), (900, 4))), piece(3, ((400, 200), (950, 4)))]
    calls = plan_window(slices, None).more
    assert {(call.first_row, call.num_rows, call.runs) for call in calls} == {
        (0, 2, ((0, 8), (100, 200))),
        (2, 2, ((0, 8), (400, 200))),
    }
