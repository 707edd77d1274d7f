"""The CPU backend without a compiler: torch's CPU flash attention on the slabs, results merged by log-sum-exp.

`aten::_scaled_dot_product_flash_attention_for_cpu` returns the log-sum-exp of each row beside the output; with it the
attention over disjoint keys is the weighted mean of the partial attentions. The query heads that share a KV head are
stacked on the query axis, so a run that n rows see is one call with n x group queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreuse.engine.attention.plan import Call
from kvreuse.engine.attention.step import Step
from kvreuse.kv.layout import KVLayout

__all__ = ["CPUBackend"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call with what does not depend on the layer's values: where its keys are and its mask."""

    rows: slice
    keys: tuple[int, int] | Tensor  # a view when the run is one piece, else the slots to gather
    is_causal: bool
    mask: Tensor | None


class CPUBackend:
    """Shared runs once, private tails per sequence. K and V of one layer must have the same head size."""

    name = "cpu-torch"

    @classmethod
    def for_layout(cls, layout: KVLayout) -> CPUBackend | str:
        """The backend, or in a sentence why the kernel cannot do these layers."""
        is_possible = all(spec.key_head_dim == spec.value_head_dim for spec in layout.layers)
        return cls() if is_possible else "its kernel takes keys and values of one head size"

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, head_dim)."""
        spec = step.pool.layout.layers[layer]
        _, num_heads, num_rows, head_dim = query.shape
        grouped = query.to(spec.dtype).view(spec.num_kv_heads, num_heads // spec.num_kv_heads, num_rows, head_dim)
        out, lse = torch.zeros_like(grouped, dtype=torch.float32), torch.full(grouped.shape[:3], float("-inf"))
        for call in _prepare(step, spec.window, spec.dtype):
            part, part_lse = _call(grouped, step.pool.heads[layer], call, scaling)
            # With w the share of the new part: out + w (part - out), and the lse is that of both.
            so_far, so_far_lse = out[:, :, call.rows], lse[:, :, call.rows]
            so_far.lerp_(part.float(), torch.sigmoid(part_lse - so_far_lse).unsqueeze(-1))
            torch.logaddexp(so_far_lse, part_lse, out=so_far_lse)
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


def _prepare(step: Step, window: int | None, dtype: torch.dtype) -> tuple[_Prepared, ...]:
    """The calls of these layers."""
    key = (window, dtype)
    if key not in step.prepared:
        plan = step.plan(window)
        step.prepared[key] = tuple(_prepared(call, dtype) for call in (*plan.first, *plan.more))
    calls: tuple[_Prepared, ...] = step.prepared[key]
    return calls


def _prepared(call: Call, dtype: torch.dtype) -> _Prepared:
    rows = slice(call.first_row, call.first_row + call.num_rows)
    keys: tuple[int, int] | Tensor = call.runs[0]
    if len(call.runs) > 1:
        keys = torch.cat([torch.arange(slot, slot + length) for slot, length in call.runs])
    return _Prepared(rows, keys, call.is_causal, None if call.window is None else _mask(call, dtype))


def _mask(call: Call, dtype: torch.dtype) -> Tensor:
    """(num_rows, keys) additive: row i sees the keys (num_before + i - window, num_before + i]."""
    assert call.window is not None
    rows = call.num_before + torch.arange(call.num_rows)[:, None]
    keys = torch.arange(call.num_before + call.num_rows)[None, :]
    seen = (keys <= rows) & (keys > rows - call.window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
