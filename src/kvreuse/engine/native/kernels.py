"""The kernels as Python sees them: tensors in, tensors out.

Knows the compiled functions and their arguments. Knows nothing of models, sequences or the store. The sources beside
this file say what each function computes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from kvreuse.config import user_cache_dir
from kvreuse.engine.native.build import compile_variant, library_name
from kvreuse.errors import ConfigError

__all__ = ["Kernels", "load_kernels"]

_MAX_HEAD_DIM = 256
_POINTERS = ("query", "keys", "values", "out", "calls", "runs", "sinks")
_NUMBERS = ("num_calls", "num_runs", "query_stride", "out_stride", "head_stride", "num_kv_heads", "group", "head_dim")
_pointer, _number = ctypes.c_void_p, ctypes.c_int64


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in _POINTERS),
        *((name, _number) for name in _NUMBERS),
        ("scaling", ctypes.c_float),
    ]


class Kernels:
    """Functions on float32 and bfloat16 tensors in CPU memory; a call takes tensors of one dtype, contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.kvreuse_attend
        self._attend.argtypes = [ctypes.POINTER(_Job), _number, _number, ctypes.c_int]
        self._add_norm = library.kvreuse_add_norm
        self._add_norm.argtypes = [_pointer] * 4 + [_number] * 2 + [ctypes.c_float, ctypes.c_int]
        self._silu_mul = library.kvreuse_silu_mul
        self._silu_mul.argtypes = [_pointer] * 2 + [_number] * 2 + [ctypes.c_int]
        self._rope_write = library.kvreuse_rope_write
        self._rope_write.argtypes = [_pointer] * 6 + [_number] * 5 + [ctypes.c_int]
        self._width: int = library.kvreuse_width()

    def can_attend(self, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether `attend` takes heads of this size."""
        fills_vectors = head_dim % self._width == 0 and head_dim * dtype.itemsize >= 4 * self._width
        return dtype in (torch.float32, torch.bfloat16) and fills_vectors and head_dim <= _MAX_HEAD_DIM

    def can_fuse(self, size: int, head_dim: int) -> bool:
        """Whether the other functions take rows of this size and heads of that."""
        return size % self._width == 0 and head_dim % (2 * self._width) == 0

    def attend(
        self,
        query: Tensor,
        slabs: tuple[Tensor, Tensor],
        plan: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        scaling: float,
        sinks: Tensor | None,
    ) -> None:
        """Attention of the first rows of `query` into those of `out`.

        query (T, at least query_heads x head_dim) and out (T, query_heads x head_dim), their rows contiguous; slabs
        (1, kv_heads, slots, head_dim); plan: calls (n, 6) and runs (m, 2), int64, as in attention.h; every row is in
        some call. sinks (query_heads,) float32.
        """
        keys, values = slabs
        calls, runs = plan
        _, num_kv_heads, _, head_dim = keys.shape
        num_rows = out.shape[0]
        job = _Job(
            *(tensor.data_ptr() for tensor in (query, keys, values, out, calls, runs)),
            None if sinks is None else sinks.data_ptr(),
            *(len(calls), len(runs), query.stride(0), out.stride(0), keys.stride(1), num_kv_heads),
            *(out.shape[1] // (num_kv_heads * head_dim), head_dim, scaling),
        )
        num_threads = torch.get_num_threads()
        # Rows are cut only where the KV heads are too few for the threads: parts of a shared run's rows read it again.
        parts = 1 if num_threads == 1 else min(num_rows, -(-2 * num_threads // num_kv_heads))
        self._attend(job, num_rows, parts, query.dtype is torch.bfloat16)

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, *, eps: float) -> Tensor:
        """x += more, in place, then the RMS norm of x's rows times `weight`: x and more (T, size), weight (size,)."""
        out = torch.empty_like(x)
        pointers = x.data_ptr(), None if more is None else more.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._add_norm(*pointers, *x.shape, eps, x.dtype is torch.bfloat16)
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        """SiLU of the first half of each row times the second half: (T, 2 x size) -> (T, size)."""
        num_rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(num_rows, size)
        self._silu_mul(both.data_ptr(), out.data_ptr(), num_rows, size, both.dtype is torch.bfloat16)
        return out

    def rope_write(
        self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], slots: Tensor, slabs: tuple[Tensor, Tensor]
    ) -> None:
        """Rotate the queries of the first len(slots) rows in place, write their rotated keys and values to the slabs.

        qkv (T, (query_heads + 2 kv_heads) x head_dim); cos and sin (T, head_dim); slots int64; slabs as for `attend`.
        """
        keys, values = slabs
        _, num_kv_heads, _, head_dim = keys.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        tensors = (qkv, *cos_sin, slots, keys, values)
        numbers = (len(slots), num_heads, num_kv_heads, head_dim, keys.stride(1))
        self._rope_write(*(tensor.data_ptr() for tensor in tensors), *numbers, qkv.dtype is torch.bfloat16)


@functools.cache
def load_kernels() -> Kernels | str:
    """The kernels for this processor, compiled if nobody did it before, or in a sentence why there are none."""
    try:
        variant = _variant()
        library = Path(__file__).parent / library_name(variant)
        if not library.exists():
            library = user_cache_dir() / library.name
            fault = None if library.exists() else compile_variant(variant, library.parent)
            if fault is not None:
                return fault
            if not (_is_ours(library.parent) and _is_ours(library)):
                return f"{library} could have been written by another user"
        _share_openmp()
        return Kernels(ctypes.CDLL(str(library)))
    except (AttributeError, ConfigError, OSError) as error:
        return f"they cannot be loaded: {error}"


def _variant() -> str:
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512-bf16"
    if torch.cpu._is_avx512_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else "plain"


def _is_ours(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _share_openmp() -> None:
    """Let the library find the OpenMP that torch has loaded, so that both have the same threads."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    ctypes.CDLL(min(mapped, default="libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
