"""The oracle: gather what a sequence sees, mask it, softmax in float32. Any device, any head sizes, slow."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.step import Step

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """Attention sequence by sequence, as the eager code of Transformers computes it, in float32."""

    name = "reference"

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, value_head_dim)."""
        return torch.cat(
            [self._one(step, piece, layer, query, scaling=scaling, sinks=sinks) for piece in step.slices], dim=1
        )

    def _one(
        self, step: Step, piece: StepSlice, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        spec = step.pool.layout.layers[layer]
        slots = torch.cat([torch.arange(slot, slot + length) for slot, length in piece.runs]).to(query.device)
        keys, values = (
            slab[slots].transpose(0, 1).float().repeat_interleave(spec.num_query_heads // spec.num_kv_heads, dim=0)
            for slab in (step.pool.keys[layer], step.pool.values[layer])
        )
        rows = query[0, :, piece.first_row : piece.first_row + piece.num_rows].float()
        scores = rows @ keys.transpose(1, 2) * scaling
        scores = scores.masked_fill(~visible(piece, spec.window, query.device), float("-inf"))
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, piece.num_rows, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : len(slots)]
        return (weights @ values).transpose(0, 1).unsqueeze(0).to(query.dtype)


def visible(piece: StepSlice, window: int | None, device: torch.device) -> Tensor:
    """(num_rows, num_tokens) bool: which positions each row sees."""
    rows = torch.arange(piece.num_context, piece.num_tokens, device=device)[:, None]
    positions = torch.arange(piece.num_tokens, device=device)[None, :]
    seen = positions <= rows
    return seen if window is None else seen & (positions > rows - window)
