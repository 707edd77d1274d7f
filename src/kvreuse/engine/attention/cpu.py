"""The CPU backend: torch's CPU flash attention on views of the slabs, partial results merged by log-sum-exp.

`aten::_scaled_dot_product_flash_attention_for_cpu` returns the log-sum-exp of each row beside the output; with it the
attention over disjoint keys is the weighted mean of the partial attentions. The query heads that share a KV head are
stacked on the query axis, so a run that n rows see is one call with n x group queries. Short tails of decoding
sequences are gathered into one padded call: its copy costs less than a call for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvreuse.engine.attention.plan import Call
from kvreuse.engine.attention.step import Step
from kvreuse.kv.layout import KVLayout

__all__ = ["CPUBackend"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Tails up to so many tokens are read in one call, from so many tails on.
MAX_TAIL, MIN_TAILS = 192, 4
# A run of at least so many slots is read where it is, by a call of its own; to copy it would cost more.
MIN_RUN = 256


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call with what does not depend on the layer's values: where its keys are and its mask.

    is_first: no call before it has any of its rows.
    """

    rows: slice
    is_first: bool
    keys: tuple[int, int] | Tensor  # a view when the run is one piece, else the slots to gather
    is_causal: bool
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Tails:
    """n rows, each the last of its sequence, that see up to `longest` slots each.

    slots: (n x longest,), padded. mask: (n, 1, 1, longest), additive.
    """

    rows: slice | Tensor
    slots: Tensor
    mask: Tensor


_Plan = tuple[tuple[_Prepared, ...], _Tails | None]


class CPUBackend:
    """Shared runs once, private tails per sequence. K and V of one layer must have the same head size."""

    name = "cpu"

    @staticmethod
    def can_do(layout: KVLayout) -> bool:
        """Whether every layer's shapes suit the kernel."""
        return all(spec.key_head_dim == spec.value_head_dim for spec in layout.layers)

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, head_dim)."""
        spec = step.pool.layout.layers[layer]
        calls, tails = _prepare(step, spec.window, spec.dtype)
        _, num_heads, num_rows, head_dim = query.shape
        grouped = query.to(spec.dtype).view(spec.num_kv_heads, num_heads // spec.num_kv_heads, num_rows, head_dim)
        slabs = step.pool.heads[layer]
        if calls and calls[0].rows == slice(0, num_rows):
            out, lse = _call(grouped, slabs, calls[0], scaling)
            out, calls = out.float(), calls[1:]
        else:
            out, lse = torch.zeros_like(grouped, dtype=torch.float32), torch.full(grouped.shape[:3], float("-inf"))
        for call in calls:
            _merge(out, lse, call.rows, _call(grouped, slabs, call, scaling), is_first=call.is_first)
        if tails is not None:
            _merge(out, lse, tails.rows, _tails(grouped, slabs, tails, scaling))
        if sinks is not None:
            # A sink is one more key whose value is zero.
            out *= torch.sigmoid(lse - sinks.float().view(spec.num_kv_heads, -1, 1)).unsqueeze(-1)
        return out.to(query.dtype).view(1, num_heads, num_rows, head_dim).transpose(1, 2)


def _call(grouped: Tensor, slabs: tuple[Tensor, Tensor], call: _Prepared, scaling: float) -> tuple[Tensor, Tensor]:
    """grouped (kv_heads, group, T, head_dim) -> output (kv_heads, group, rows, head_dim) and lse without head_dim."""
    rows = grouped[:, :, call.rows]
    num_kv_heads, group, num_rows, head_dim = rows.shape
    where = call.keys
    keys, values = (s.index_select(2, where) if isinstance(where, Tensor) else s.narrow(2, *where) for s in slabs)
    if call.is_causal or call.mask is not None:
        rows = rows.reshape(1, num_kv_heads * group, num_rows, head_dim)
    else:
        rows = rows.reshape(1, num_kv_heads, group * num_rows, head_dim)
    out, lse = _flash(rows, keys, values, 0.0, call.is_causal, attn_mask=call.mask, scale=scaling)
    return out.view(num_kv_heads, group, num_rows, head_dim), lse.view(num_kv_heads, group, num_rows)


def _tails(grouped: Tensor, slabs: tuple[Tensor, Tensor], tails: _Tails, scaling: float) -> tuple[Tensor, Tensor]:
    """As `_call`, for the rows of `tails`."""
    rows = grouped[:, :, tails.rows].permute(2, 0, 1, 3)
    num_tails, num_kv_heads, _, head_dim = rows.shape
    keys, values = (
        slab.index_select(2, tails.slots).view(num_kv_heads, num_tails, -1, head_dim).transpose(0, 1) for slab in slabs
    )
    out, lse = _flash(rows, keys, values, 0.0, False, attn_mask=tails.mask, scale=scaling)
    return out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


def _merge(
    out: Tensor, lse: Tensor, rows: slice | Tensor, part: tuple[Tensor, Tensor], *, is_first: bool = False
) -> None:
    """Fold a partial attention (output, lse) of some rows into `out` (float32) and `lse`, in place."""
    part_out, part_lse = part
    if is_first:
        out[:, :, rows], lse[:, :, rows] = part_out.float(), part_lse
        return
    # With w the share of the new part: out + w (part - out), and the lse is that of both.
    so_far, so_far_lse = out[:, :, rows], lse[:, :, rows]
    share = torch.sigmoid(part_lse - so_far_lse).unsqueeze(-1)
    so_far.lerp_(part_out.float(), share)
    torch.logaddexp(so_far_lse, part_lse, out=so_far_lse)
    if isinstance(rows, Tensor):  # then these are no views
        out[:, :, rows], lse[:, :, rows] = so_far, so_far_lse


def _prepare(step: Step, window: int | None, dtype: torch.dtype) -> _Plan:
    """The calls of these layers, all but the short tails; and the short tails."""
    key = (window, dtype)
    if key not in step.prepared:
        plan = step.plan(window)
        calls = [piece for call in plan.more for piece in _pieces(call)]
        own = [piece for call in plan.first for piece in _pieces(call)]
        tail_of = {piece.first_row: piece for piece in own if _is_tail(piece)}  # one for a row
        tails = list(tail_of.values()) if len(tail_of) >= MIN_TAILS else []
        calls += [piece for piece in own if not tails or tail_of.get(piece.first_row) is not piece]
        covered: set[int] = set()
        prepared = []
        for call in calls:
            rows = range(call.first_row, call.first_row + call.num_rows)
            prepared.append(_prepared(call, dtype, is_first=covered.isdisjoint(rows)))
            covered.update(rows)
        step.prepared[key] = tuple(prepared), _gathered(tails, dtype) if tails else None
    plan_of_layer: _Plan = step.prepared[key]
    return plan_of_layer


def _pieces(call: Call) -> Iterator[Call]:
    """The long runs of a call without a mask, each by itself, and the short ones together."""
    if call.is_causal or call.window is not None:
        yield call
        return
    short = tuple(run for run in call.runs if run[1] < MIN_RUN)
    for run in call.runs:
        if run[1] >= MIN_RUN:
            yield replace(call, runs=(run,))
    if short:
        yield replace(call, runs=short)


def _is_tail(call: Call) -> bool:
    return call.num_rows == 1 and call.window is None and call.num_slots <= MAX_TAIL


def _gathered(calls: Sequence[Call], dtype: torch.dtype) -> _Tails:
    longest = max(call.num_slots for call in calls)
    slots = []
    for call in calls:
        own = [slot for start, length in call.runs for slot in range(start, start + length)]
        slots += own + own[-1:] * (longest - len(own))  # any slot that was written will do, the mask hides it
    lengths = torch.tensor([call.num_slots for call in calls])
    mask = torch.zeros(len(calls), longest, dtype=dtype)
    mask.masked_fill_(torch.arange(longest) >= lengths[:, None], float("-inf"))
    rows = [call.first_row for call in calls]
    is_one_piece = rows[-1] - rows[0] + 1 == len(rows)
    return _Tails(
        slice(rows[0], rows[-1] + 1) if is_one_piece else torch.tensor(rows),
        torch.tensor(slots),
        mask[:, None, None, :],
    )


def _prepared(call: Call, dtype: torch.dtype, *, is_first: bool) -> _Prepared:
    rows = slice(call.first_row, call.first_row + call.num_rows)
    keys: tuple[int, int] | Tensor = call.runs[0]
    if len(call.runs) > 1:
        keys = torch.cat([torch.arange(slot, slot + length) for slot, length in call.runs])
    return _Prepared(rows, is_first, keys, call.is_causal, None if call.window is None else _mask(call, dtype))


def _mask(call: Call, dtype: torch.dtype) -> Tensor:
    """(num_rows, keys) additive: row i sees the keys (num_before + i - window, num_before + i]."""
    assert call.window is not None
    rows = call.num_before + torch.arange(call.num_rows)[:, None]
    keys = torch.arange(call.num_before + call.num_rows)[None, :]
    seen = (keys <= rows) & (keys > rows - call.window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
