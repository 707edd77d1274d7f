"""Which queries meet which slots in one step: the plan that every layer of the step follows.

Pure ints. Knows rows of the packed batch, positions and slots. Knows nothing of tensors or models.

A row is one token of the packed batch; the rows of a sequence are neighbours. Drawn for two sequences that share
positions [0, s), the first decoding, the second in prefill with c tokens done:

    A  [0 ...... s)[s .... own token)            shared call, tail call
    B  [0 ...... s)[s .. c)[c .... c + rows)     shared call, context call, causal call
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Call", "StepSlice", "WindowPlan", "plan_window"]

Run = tuple[int, int]  # (first slot, length)

# A shared call pays only when it spares more than its own overhead; below this each sequence reads for itself.
MIN_SHARED_SAVING = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSlice:
    """What one sequence brings to a step.

    rows [first_row, first_row + num_rows) are the tokens at positions [num_context, num_context + num_rows);
    `runs` are the physical runs of positions [0, num_context + num_rows), in order.
    """

    first_row: int
    num_rows: int
    num_context: int
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_context + self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One attention call: `num_rows` rows from `first_row` on over the slots of `runs`, in order.

    causal: the runs are the rows' own slots, row i sees the first i + 1 of them.
    window: with a causal mask shifted by `num_before`: row i sees slots (num_before + i - window, num_before + i] of
    the runs; `window` is None for calls without a mask.
    """

    first_row: int
    num_rows: int
    runs: tuple[Run, ...]
    is_causal: bool = False
    window: int | None = None
    num_before: int = 0

    @property
    def num_slots(self) -> int:
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """All calls for one window: `first` covers every row once, in row order; `more` is merged into it."""

    first: tuple[Call, ...]
    more: tuple[Call, ...]


def cut(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """The physical runs of positions [start, stop)."""
    out: list[Run] = []
    position = 0
    for slot, length in runs:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            out.append((slot + low - position, high - low))
        position += length
        if position >= stop:
            break
    return tuple(out)


def plan_window(slices: Sequence[StepSlice], window: int | None) -> WindowPlan:
    """Calls for the layers that see the last `window` positions (None: all). `slices` are in row order."""
    first: list[Call] = []
    more: list[Call] = []
    whole: list[tuple[StepSlice, int]] = []  # slices without a mask, with the first position they see
    masked: dict[int, Call] = {}
    for piece in slices:
        if window is None or piece.num_tokens <= window:
            whole.append((piece, 0))
        elif piece.num_rows == 1:
            whole.append((piece, piece.num_tokens - window))
        else:
            masked[piece.first_row] = _masked_call(piece, window)
    private_from = _share(whole, more)
    for piece in slices:
        if piece.first_row in masked:
            first.append(masked[piece.first_row])
            continue
        own, context = _private_calls(piece, private_from[piece.first_row])
        first.append(own)
        more.extend(context)
    return WindowPlan(tuple(first), tuple(more))


def _masked_call(piece: StepSlice, window: int) -> Call:
    low = max(0, piece.num_context - window + 1)
    return Call(
        first_row=piece.first_row,
        num_rows=piece.num_rows,
        runs=cut(piece.runs, low, piece.num_tokens),
        window=window,
        num_before=piece.num_context - low,
    )


def _private_calls(piece: StepSlice, start: int) -> tuple[Call, tuple[Call, ...]]:
    """The call that ends with the rows' own slots, and the one for private positions before it, if any."""
    if piece.num_rows == 1:
        return _rows_call(piece, start, piece.num_tokens), ()
    own = _rows_call(piece, piece.num_context, piece.num_tokens, is_causal=True)
    return own, (_rows_call(piece, start, piece.num_context),) if start < piece.num_context else ()


def _rows_call(piece: StepSlice, start: int, stop: int, *, is_causal: bool = False) -> Call:
    runs = cut(piece.runs, start, stop)
    return Call(first_row=piece.first_row, num_rows=piece.num_rows, runs=runs, is_causal=is_causal)


def _share(pieces: Sequence[tuple[StepSlice, int]], calls: list[Call]) -> dict[int, int]:
    """Append a call for every run of positions that neighbours in row order share.

    Returns for each first_row the position from which the sequence reads for itself.
    """
    private_from = {piece.first_row: low for piece, low in pieces}
    stack = [(group, 0) for group in _neighbours([piece for piece, _ in pieces], 0)]
    while stack:
        members, start = stack.pop()
        common = min(_common(members[0], other) for other in members[1:])
        # Who sees [start, common) only in part reads alone; who sees nothing of it may share what follows.
        reading = [m for m in members if private_from[m.first_row] <= start]
        later = [m for m in members if private_from[m.first_row] >= common]
        is_worth_it = (len(reading) - 1) * (common - start) >= MIN_SHARED_SAVING
        if is_worth_it:
            calls.extend(_shared_calls(reading, start, common))
            private_from.update((m.first_row, common) for m in reading)
        going_on = sorted((*reading, *later), key=lambda m: m.first_row)
        stack.extend((group, common if is_worth_it else start) for group in _neighbours(going_on, common))
    return private_from


def _neighbours(members: Sequence[StepSlice], depth: int) -> Iterator[list[StepSlice]]:
    """Groups of two or more neighbours that have the same slot at position `depth` of their context."""
    group: list[StepSlice] = []
    here: int | None = None
    for member in members:
        slot = cut(member.runs, depth, depth + 1)[0][0] if member.num_context > depth else None
        if slot is None or slot != here:
            if len(group) > 1:
                yield group
            group = []
        here = slot
        if slot is not None:
            group.append(member)
    if len(group) > 1:
        yield group


def _common(a: StepSlice, b: StepSlice) -> int:
    """Number of leading context positions that lie in the same slots for both."""
    limit = min(a.num_context, b.num_context)
    common = 0
    for (slot_a, length_a), (slot_b, length_b) in zip(a.runs, b.runs, strict=False):
        if slot_a != slot_b:
            break
        common += min(length_a, length_b)
        if length_a != length_b:
            break
    return min(common, limit)


def _shared_calls(members: Sequence[StepSlice], start: int, stop: int) -> Iterator[Call]:
    """One call for each stretch of adjacent rows among the members."""
    runs = cut(members[0].runs, start, stop)
    first = end = members[0].first_row
    for member in members:
        if member.first_row != end:
            yield Call(first_row=first, num_rows=end - first, runs=runs)
            first = member.first_row
        end = member.first_row + member.num_rows
    yield Call(first_row=first, num_rows=end - first, runs=runs)
