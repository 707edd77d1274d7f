"""Decoder layers of the Llama family whose small operations are one kernel each.

A stock layer is some fifty operations, and with few rows what they cost is being called. Knows the parts of such a
layer and the kernels. Which rows there are and what they see is the step's business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.step import current_step
from kvreuse.engine.native.kernels import Kernels, load_kernels

__all__ = ["FusedLayer", "fuse_layers"]

# Their layers differ in no more than biases and windows.
_FAMILY = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}


class FusedLayer(nn.Module):
    """Same values as the layer whose weights it takes over, up to rounding. Takes the rows of a step."""

    def __init__(self, stock: Any, kernels: Kernels) -> None:
        super().__init__()
        attention, mlp = stock.self_attn, stock.mlp
        self._kernels, self._index, self._scaling = kernels, attention.layer_idx, attention.scaling
        self._head_dim = attention.head_dim
        self._widths = attention.q_proj.out_features, attention.k_proj.out_features
        norms = stock.input_layernorm, stock.post_attention_layernorm
        self._norms = [(norm.weight.detach(), norm.variance_epsilon) for norm in norms]
        self.qkv = _joined(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = attention.o_proj
        self.gate_up = _joined(mlp, "gate_proj", "up_proj")
        self.down_proj = mlp.down_proj

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """hidden_states (1, T, size), changed in place, cos and sin (1, T, head_dim) -> (1, T, size)."""
        (norm, eps), (next_norm, next_eps) = self._norms
        x = hidden_states[0]
        qkv = self.qkv(self._kernels.add_norm(x, None, norm, eps=eps))
        attended = self._attend(qkv, position_embeddings)
        rows = self._kernels.add_norm(x, self.o_proj(attended), next_norm, eps=next_eps)
        x += self.down_proj(self._kernels.silu_mul(self.gate_up(rows)))
        return hidden_states

    def _attend(self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """qkv (T, width of queries, keys and values) -> (T, width of queries)."""
        step = current_step()
        slabs, width = step.pool.heads[self._index], self._widths[0]
        if isinstance(step.backend, NativeBackend) and slabs[0].dtype is qkv.dtype:
            slots = step.slots_on(qkv.device)
            self._kernels.rope_write(qkv, cos_sin, slots, slabs)
            out = qkv.new_empty(len(qkv), width)
            out[len(slots) :] = 0  # these rows are nobody's
            step.backend.attend_rows(step, self._index, qkv, out=out[: len(slots)], scaling=self._scaling)
            return out
        heads = qkv.view(1, len(qkv), -1, self._head_dim).transpose(1, 2)
        num_heads, num_kv_heads = (width // self._head_dim for width in self._widths)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        query, key = apply_rotary_pos_emb(query, key, *cos_sin)
        attended: Tensor = step.layer(self._index, (query, key, value), {"scaling": self._scaling})
        return attended.reshape(len(qkv), width)


@torch.no_grad()
def fuse_layers(model: nn.Module) -> int:
    """Replace every decoder layer on a CPU that can be, in place; how many are fused now. 0 without kernels."""
    num_fused = 0
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for i, layer in enumerate(layers):
            if _is_as_known(layer):
                kernels = load_kernels()
                if isinstance(kernels, Kernels) and _can_fuse(layer, kernels):
                    layers[i] = FusedLayer(layer, kernels)
            num_fused += isinstance(layers[i], FusedLayer)
    return num_fused


def _is_as_known(layer: Any) -> bool:
    """Whether the layer is what the family's code makes: not quantised, no adapters, no other activation."""
    kind = type(layer)
    if kind.__name__ not in _FAMILY or not kind.__module__.startswith("transformers.models."):
        return False  # code that comes with a checkpoint may use the same names
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    places = {(parameter.device.type, parameter.dtype) for parameter in layer.parameters()}
    return (
        [type(linear) for linear in linears] == [nn.Linear] * 7
        and places in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)})
        and type(layer.mlp.act_fn).__name__ in {"SiLU", "SiLUActivation"}
    )


def _can_fuse(layer: Any, kernels: Kernels) -> bool:
    """Whether the kernels take its sizes."""
    sizes = layer.self_attn.q_proj.in_features, layer.mlp.down_proj.in_features
    return all(kernels.can_fuse(size, layer.self_attn.head_dim) for size in sizes)


def _joined(parent: Any, *names: str) -> nn.Linear:
    """One layer for several that read the same rows. They are taken from `parent`, so that no weight is there twice."""
    parts = [getattr(parent, name) for name in names]
    joined = nn.Linear(parts[0].in_features, 1, bias=False, device="meta")
    joined.out_features = sum(part.out_features for part in parts)
    joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    for name in names:
        delattr(parent, name)
    return joined
