"""Slots of the pool to one flat payload and back, as they are or quantised.

A payload holds, for every run of layers that look alike, all K (layers, block, heads, head_dim), then all V. Quantised
forms follow KIVI (Liu et al. 2024, arXiv:2402.02750): keys per channel, in groups of tokens; values per token, in
groups of channels. Knows tensors and bytes. Knows nothing of tiers or requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvreuse.kv.layout import KVLayout
from kvreuse.kv.pool import KVPool

__all__ = ["ENCODINGS", "QUANTISED", "BlockCodec"]

QUANTISED = ("fp8", "int8", "int4")
ENCODINGS = ("raw", "bf16", "fp16", *QUANTISED)
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Root mean square of the error over that of the values, in one section: a block with worse outliers stays as it is.
_MAX_ERROR = {"bf16": 0.01, "fp16": 0.005, "fp8": 0.06, "int8": 0.02, "int4": 0.2}


@dataclass(frozen=True, slots=True)
class _Section:
    """K or V of neighbouring layers that look alike."""

    layers: range
    is_key: bool
    shape: tuple[int, int, int, int]  # layers, block, heads, head_dim
    dtype: torch.dtype

    @property
    def num_values(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


class BlockCodec:
    """Payloads of blocks of `block_size` tokens. group_size: values that share a scale, at most."""

    def __init__(self, layout: KVLayout, *, block_size: int, group_size: int = 64) -> None:
        self.block_size = block_size
        self._group_size = group_size
        self._sections = list(_sections(layout, block_size))
        self.raw_bytes = sum(section.num_bytes for section in self._sections)

    def read(self, pool: KVPool, slot: int) -> Tensor:
        """A copy of slots [slot, slot + block_size) as a raw payload, uint8 (raw_bytes,) on the CPU."""
        payload = torch.empty(self.raw_bytes, dtype=torch.uint8)
        for section, values in self._views(payload):
            slabs = pool.keys if section.is_key else pool.values
            for row, layer in enumerate(section.layers):
                values[row].copy_(slabs[layer][slot : slot + self.block_size])
        return payload

    def write(self, pool: KVPool, slot: int, payload: Tensor) -> None:
        """Put a raw payload into slots [slot, slot + block_size)."""
        for section, values in self._views(payload):
            slabs = pool.keys if section.is_key else pool.values
            for row, layer in enumerate(section.layers):
                slabs[layer][slot : slot + self.block_size].copy_(values[row])

    def pack(self, payload: Tensor, encoding: str) -> tuple[Tensor, str]:
        """(payload, encoding): packed, or as it came ("raw") when that would break the error bound of `encoding`."""
        if encoding == "raw":
            return payload, encoding
        parts: list[Tensor] = []
        for section, values in self._views(payload):
            exact = values.float()
            packed = self._pack(section, exact, encoding)
            error = _norm(self._unpack(section, packed, encoding) - exact)
            if not error <= _MAX_ERROR[encoding] * _norm(exact) < math.inf:  # also when one is not a number
                return payload, "raw"
            parts += [part.contiguous().view(torch.uint8).flatten() for part in packed]
        return torch.cat(parts), encoding

    def unpack(self, packed: Tensor, encoding: str) -> Tensor:
        """The raw payload of what `pack` gave. Raises ValueError when the size does not fit."""
        if encoding == "raw":
            if packed.numel() != self.raw_bytes:
                raise ValueError(f"a payload of {packed.numel()} bytes, {self.raw_bytes} expected")
            return packed
        payload = torch.empty(self.raw_bytes, dtype=torch.uint8)
        offset = 0
        for section, values in self._views(payload):
            parts = []
            for shape, dtype in self._packed_shapes(section, encoding):
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                part = packed[offset : offset + num_bytes]
                if part.numel() != num_bytes:
                    raise ValueError(f"a packed payload of {packed.numel()} bytes is too short")
                parts.append(part.clone().view(dtype).view(shape))
                offset += num_bytes
            values.copy_(self._unpack(section, tuple(parts), encoding))
        if offset != packed.numel():
            raise ValueError(f"a packed payload of {packed.numel()} bytes is too long")
        return payload

    def _views(self, payload: Tensor) -> Iterator[tuple[_Section, Tensor]]:
        offset = 0
        for section in self._sections:
            part = payload[offset : offset + section.num_bytes]
            yield section, part.view(section.dtype).view(section.shape)
            offset += section.num_bytes

    # Groups are the second axis from the end for keys (tokens) and the last for values (channels).

    def _grouped(self, section: _Section, values: Tensor) -> Tensor:
        """(layers, groups, group, heads, dim) for keys, (layers, block, heads, groups, group) for values."""
        num_layers, block, heads, dim = section.shape
        if section.is_key:
            return values.reshape(num_layers, -1, _divisor(block, self._group_size), heads, dim)
        return values.reshape(num_layers, block, heads, -1, _divisor(dim, self._group_size))

    def _packed_shapes(self, section: _Section, encoding: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        if encoding in _CASTS:
            return [(section.shape, _CASTS[encoding])]
        num_layers, block, heads, dim = section.shape
        if section.is_key:
            scales: tuple[int, ...] = (num_layers, block // _divisor(block, self._group_size), 1, heads, dim)
        else:
            scales = (num_layers, block, heads, dim // _divisor(dim, self._group_size), 1)
        if encoding == "int4":
            return [(scales, torch.float16)] * 2 + [((section.num_values // 2,), torch.uint8)]
        codes = torch.int8 if encoding == "int8" else torch.float8_e4m3fn
        return [(scales, torch.float16), (section.shape, codes)]

    def _pack(self, section: _Section, values: Tensor, encoding: str) -> tuple[Tensor, ...]:
        if encoding in _CASTS:
            return (values.to(_CASTS[encoding]),)
        groups, axis = self._grouped(section, values), 2 if section.is_key else 4
        if encoding == "int4":
            low, high = groups.amin(axis, keepdim=True).half(), groups.amax(axis, keepdim=True)
            scale = ((high - low.float()) / 15).half()
            codes = ((groups - low.float()) / _safe(scale)).round().clamp(0, 15).to(torch.uint8).flatten()
            return low, scale, codes[0::2] | codes[1::2] << 4
        top = 127.0 if encoding == "int8" else 448.0
        scale = (groups.abs().amax(axis, keepdim=True) / top).half()
        scaled = (groups / _safe(scale)).clamp(-top, top)
        codes = scaled.round().to(torch.int8) if encoding == "int8" else scaled.to(torch.float8_e4m3fn)
        return scale, codes.reshape(section.shape)

    def _unpack(self, section: _Section, parts: tuple[Tensor, ...], encoding: str) -> Tensor:
        if encoding in _CASTS:
            return parts[0].float()
        if encoding == "int4":
            low, scale, pairs = parts
            codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten().float().view(section.shape)
            groups = self._grouped(section, codes) * scale.float() + low.float()
        else:
            scale, codes = parts
            groups = self._grouped(section, codes.float()) * scale.float()
        return groups.reshape(section.shape)


def _sections(layout: KVLayout, block_size: int) -> Iterator[_Section]:
    def kind(layer: int) -> tuple[int, int, int, torch.dtype]:
        spec = layout.layers[layer]
        return spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim, spec.dtype

    for (heads, key_dim, value_dim, dtype), members in groupby(range(len(layout.layers)), kind):
        run = list(members)
        layers = range(run[0], run[-1] + 1)
        for is_key, dim in ((True, key_dim), (False, value_dim)):
            yield _Section(layers, is_key, (len(run), block_size, heads, dim), dtype)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _divisor(length: int, largest: int) -> int:
    """The largest divisor of `length` that is not above `largest`."""
    return next(size for size in range(min(length, largest), 0, -1) if length % size == 0)


def _safe(scale: Tensor) -> Tensor:
    """A scale to divide by: groups of equal values have none."""
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)
