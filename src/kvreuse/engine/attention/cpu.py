"""The CPU backend: torch's CPU flash attention on views of the slabs, partial results merged by log-sum-exp.

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
    keys: slice | Tensor  # a view when the run is one piece, else the slots to gather
    is_causal: bool
    mask: Tensor | None


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
        first, more = _prepare(step, spec.window, spec.dtype)
        _, num_heads, num_rows, head_dim = query.shape
        grouped = query.to(spec.dtype).view(spec.num_kv_heads, num_heads // spec.num_kv_heads, num_rows, head_dim)
        slabs = step.pool.keys[layer], step.pool.values[layer]
        parts = [_call(grouped, slabs, call, scaling) for call in first]
        if len(parts) == 1:
            out, lse = parts[0]
        else:
            out = torch.cat([part for part, _ in parts], dim=2)
            lse = torch.cat([part for _, part in parts], dim=2)
        if more or sinks is not None:
            out = out.float()
        for call in more:
            _merge(out[:, :, call.rows], lse[:, :, call.rows], *_call(grouped, slabs, call, scaling))
        if sinks is not None:
            # A sink is one more key whose value is zero.
            out *= torch.sigmoid(lse - sinks.float().view(spec.num_kv_heads, -1, 1)).unsqueeze(-1)
        return out.to(query.dtype).view(1, num_heads, num_rows, head_dim).transpose(1, 2)


def _call(grouped: Tensor, slabs: tuple[Tensor, Tensor], call: _Prepared, scaling: float) -> tuple[Tensor, Tensor]:
    """grouped (kv_heads, group, T, head_dim) -> output (kv_heads, group, rows, head_dim) and lse without head_dim."""
    rows = grouped[:, :, call.rows]
    num_kv_heads, group, num_rows, head_dim = rows.shape
    keys, values = (slab[call.keys].transpose(0, 1).unsqueeze(0) for slab in slabs)
    if call.is_causal or call.mask is not None:
        rows = rows.reshape(1, num_kv_heads * group, num_rows, head_dim)
    else:
        rows = rows.reshape(1, num_kv_heads, group * num_rows, head_dim)
    out, lse = _flash(rows, keys, values, 0.0, call.is_causal, attn_mask=call.mask, scale=scaling)
    return out.view(num_kv_heads, group, num_rows, head_dim), lse.view(num_kv_heads, group, num_rows)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Fold a second partial attention of the same rows into `out` (float32) and `lse`, in place."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_(torch.exp(lse - both).unsqueeze(-1)).addcmul_(other, torch.exp(other_lse - both).unsqueeze(-1))
    lse.copy_(both)


def _prepare(step: Step, window: int | None, dtype: torch.dtype) -> tuple[list[_Prepared], list[_Prepared]]:
    key = (window, dtype)
    if key not in step.prepared:
        plan = step.plan(window)
        step.prepared[key] = [_prepared(c, dtype) for c in plan.first], [_prepared(c, dtype) for c in plan.more]
    prepared: tuple[list[_Prepared], list[_Prepared]] = step.prepared[key]
    return prepared


def _prepared(call: Call, dtype: torch.dtype) -> _Prepared:
    rows = slice(call.first_row, call.first_row + call.num_rows)
    if len(call.runs) == 1:
        slot, length = call.runs[0]
        keys: slice | Tensor = slice(slot, slot + length)
    else:
        keys = torch.cat([torch.arange(slot, slot + length) for slot, length in call.runs])
    return _Prepared(rows, keys, call.is_causal, None if call.window is None else _mask(call, dtype))


def _mask(call: Call, dtype: torch.dtype) -> Tensor:
    """(num_rows, keys) additive: row i sees the keys (num_before + i - window, num_before + i]."""
    assert call.window is not None
    rows = call.num_before + torch.arange(call.num_rows)[:, None]
    keys = torch.arange(call.num_before + call.num_rows)[None, :]
    seen = (keys <= rows) & (keys > rows - call.window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
