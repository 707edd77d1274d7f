"""Linear layers whose weights lie in the order that the CPU's matrix kernels read them in.

A stock linear layer has its weights rearranged on every call; here it is done once, at load. Knows torch's oneDNN
operators. Knows nothing of the model around the layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["pack_linears", "padded_rows"]

# The kernels lay weights out for a number of rows; that for a decode batch is good for prefill too.
ROWS = 32
# They read the weights more slowly for one or two rows than for four: 35 and 42 against 28 ms a step.
MIN_ROWS = 4


def padded_rows(num_rows: int) -> int:
    """The next number of rows that packed layers are used with.

    For each one they meet, the kernels keep some 100 KB to 1 MB of code and take a millisecond to write it: with all of
    1 to 512 a process would grow by gigabytes.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return max(MIN_ROWS, -(-num_rows // step) * step)


class PackedLinear(nn.Module):
    """Same values as the layer it replaces, up to rounding. The stock weights are let go unless they are tied."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty_like(linear.weight, device="meta")  # models ask for its dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """rows (..., in_features) -> (..., out_features)."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replace every plain linear layer on the CPU, in place; how many are packed now. 0 where torch cannot.

    Subclasses of nn.Linear (quantised layers, adapters) stay as they are.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))
            num_packed += isinstance(getattr(parent, name), PackedLinear)
    return num_packed


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
