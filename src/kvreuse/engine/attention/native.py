"""The CPU backend on the engine's own kernels: every row of a step in one call for a layer.

Knows the plan's calls and how the kernel wants them. Knows nothing of how it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvreuse.engine.attention.plan import Call
from kvreuse.engine.attention.step import Step
from kvreuse.engine.native.kernels import Kernels, load_kernels
from kvreuse.kv.layout import KVLayout

__all__ = ["NativeBackend"]

_ALL = 1 << 40  # more than there are positions


class NativeBackend:
    """Shared runs once, private tails per sequence, in float32 or bfloat16."""

    name = "cpu"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @classmethod
    def for_layout(cls, layout: KVLayout) -> NativeBackend | str:
        """The backend, or in a sentence why it cannot do these layers on this machine."""
        kernels = load_kernels()
        if isinstance(kernels, str):
            return f"its kernels are missing: {kernels}"
        for spec in layout.layers:
            if spec.key_head_dim != spec.value_head_dim or not kernels.can_attend(spec.key_head_dim, spec.dtype):
                return "its kernels take float32 and bfloat16, heads of one size from 16 (bfloat16: 32) to 256 in 16s"
        return cls(kernels)

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, head_dim)."""
        _, num_heads, num_rows, head_dim = query.shape
        rows = query.to(step.pool.layout.layers[layer].dtype).transpose(1, 2).reshape(num_rows, -1).contiguous()
        out = torch.empty_like(rows)
        self.attend_rows(step, layer, rows, out=out, scaling=scaling, sinks=sinks)
        return out.to(query.dtype).view(1, num_rows, num_heads, head_dim)

    def attend_rows(
        self, step: Step, layer: int, query: Tensor, *, out: Tensor, scaling: float, sinks: Tensor | None = None
    ) -> None:
        """As `Kernels.attend`, for the rows of the step."""
        sinks = None if sinks is None else sinks.float().contiguous()
        plan = _plan(step, step.pool.layout.layers[layer].window)
        self.kernels.attend(query, step.pool.heads[layer], plan, out=out, scaling=scaling, sinks=sinks)


def _plan(step: Step, window: int | None) -> tuple[Tensor, Tensor]:
    """The calls and runs of these layers, one list after the other."""
    if window not in step.prepared:
        plan = step.plan(window)
        calls: list[tuple[int, ...]] = []
        runs: list[tuple[int, int]] = []
        for call in (*plan.first, *plan.more):
            calls.append((call.first_row, call.num_rows, len(runs), len(call.runs), *_mask(call)))
            runs += call.runs
        step.prepared[window] = torch.tensor(calls), torch.tensor(runs)
    found: tuple[Tensor, Tensor] = step.prepared[window]
    return found


def _mask(call: Call) -> tuple[int, int]:
    """The last position that the first row sees, and how many before it count too."""
    if call.window is not None:
        return call.num_before, call.window
    return (0, _ALL) if call.is_causal else (_ALL, 2 * _ALL)
