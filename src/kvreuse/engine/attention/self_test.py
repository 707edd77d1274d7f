"""A trial of a backend against the reference, and which CUDA backend passes it.

Knows layouts and a made-up step. Knows nothing of models or options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvreuse.engine.attention.cuda import CUDABackend, Kernel, varlen_kernel
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.step import Backend, Step
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout, LayerSpec
from kvreuse.kv.pool import KVPool

__all__ = ["choose_cuda", "fault", "refusal"]

log = logging.getLogger("kvreuse.engine")

_NUM_SLOTS, _WINDOW, _SCALING = 1856, 40, 0.2
# Who shares a run and who does not, runs in pieces, chunks with and without context, and a run that is long enough for
# the kernel to split it. Later rows lie in earlier slots, as they may.
_SLICES = (
    StepSlice(first_row=0, num_rows=1, num_context=150, runs=((900, 128), (300, 23))),
    StepSlice(first_row=1, num_rows=1, num_context=128, runs=((900, 128), (200, 1))),
    StepSlice(first_row=2, num_rows=17, num_context=140, runs=((900, 128), (400, 29))),
    StepSlice(first_row=19, num_rows=1, num_context=99, runs=((160, 30), (240, 40), (350, 30))),
    StepSlice(first_row=20, num_rows=33, num_context=0, runs=((450, 33),)),
    StepSlice(first_row=53, num_rows=5, num_context=40, runs=((500, 20), (540, 25))),
    StepSlice(first_row=58, num_rows=1, num_context=700, runs=((1100, 701),)),
)
_NUM_ROWS = 59

Capability = Callable[[torch.device], tuple[int, int]]


def refusal(layout: KVLayout, *, capability: Capability = torch.cuda.get_device_capability) -> str | None:
    """Why the kernel cannot do some layer, or None."""
    for spec in layout.layers:
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernel takes bfloat16 and float16, not {str(spec.dtype).removeprefix('torch.')}"
        if spec.key_head_dim != spec.value_head_dim or spec.key_head_dim % 8 or spec.key_head_dim > 256:
            return "its kernel takes heads of one size up to 256 that is a multiple of 8"
    for device in layout.devices:
        if capability(device) < (8, 0):
            return f"its kernel needs compute capability 8.0, {device} has {'.'.join(map(str, capability(device)))}"
    return None


def choose_cuda(
    layout: KVLayout,
    *,
    is_gathering: bool = False,
    kernel: Kernel | None = None,
    capability: Capability = torch.cuda.get_device_capability,
) -> CUDABackend | str:
    """The first backend that agrees with the reference, or why there is none. is_gathering: try only that one.

    Raises ConfigError when a trial leaves the device unusable.
    """
    reason = refusal(layout, capability=capability)
    if reason is not None:
        return reason
    kernel = kernel or varlen_kernel()
    for backend in (CUDABackend(kernel), CUDABackend(kernel, is_gathering=True))[is_gathering:]:
        reason = fault(backend, layout)
        if reason is None:
            return backend
        log.warning("attention %s failed its trial and is not used: %s", backend.name, reason)
    return f"the trial failed: {reason}"


def fault(backend: Backend, layout: KVLayout) -> str | None:
    """What the first layer that goes wrong does, each kind of layer once with and once without a short window."""
    specs = [replace(spec, window=window) for spec in layout.layers for window in {None, spec.window and _WINDOW}]
    try:
        for spec in dict.fromkeys(specs):
            difference = _difference(backend, spec)
            # In float32 the order of sums alone makes up to 1e-5. Not `>`: it may be NaN.
            if not difference <= max(8 * torch.finfo(spec.dtype).eps, 1e-4):
                return f"window {spec.window} on {spec.device} differs from the reference by {difference:.2g}"
    except torch.AcceleratorError as error:
        raise ConfigError(
            f"the trial of attention {backend.name} broke the device: {_sentence(error)}\n"
            "hint: option.attention_backend=reference starts without it"
        ) from error
    except (RuntimeError, TypeError, ValueError) as error:
        return _sentence(error)
    return None


def _sentence(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@torch.inference_mode()
def _difference(backend: Backend, spec: LayerSpec) -> float:
    """The largest difference from the reference, relative for values above 1. NaN when unwritten slots are read."""
    random = torch.Generator(spec.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=spec.dtype, device=spec.device)

    pool = KVPool(KVLayout((spec,)), num_slots=_NUM_SLOTS)
    for slab, head_dim in ((pool.keys[0], spec.key_head_dim), (pool.values[0], spec.value_head_dim)):
        slab.fill_(float("nan"))
        for start, length in {run for piece in _SLICES for run in piece.runs}:
            slab[start : start + length] = normal(length, spec.num_kv_heads, head_dim)
    query = normal(1, spec.num_query_heads, _NUM_ROWS, spec.key_head_dim)
    sinks = normal(spec.num_query_heads) if spec.has_sinks else None

    def attention(of: Backend) -> Tensor:
        return of.attend(Step(pool, _SLICES, of), 0, query, scaling=_SCALING, sinks=sinks).float()

    expected = attention(ReferenceBackend())
    return float(((attention(backend) - expected).abs() / expected.abs().clamp(min=1)).max())
