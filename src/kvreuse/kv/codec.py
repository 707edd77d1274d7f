"""Slots of the pool to one flat payload and back, as they are or quantised.

A payload holds, for every run of layers that look alike, all K (layers, block, heads, head_dim), then all V. Quantised
forms follow KIVI (Liu et al. 2024, arXiv:2402.02750): keys per channel, in groups of tokens; values per token, in
groups of channels. Knows tensors and bytes. Knows nothing of tiers or requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import NamedTuple

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


class _Section(NamedTuple):
    """K or V of neighbouring layers that look alike."""

    layers: range
    is_key: bool
    shape: tuple[int, ...]  # layers, block, heads, head_dim
    grouped: tuple[int, ...]  # layers, groups, group, heads, dim of keys; layers, block, heads, groups, group of values
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BlockCodec:
    """Payloads of blocks of `block_size` tokens. group_size: values that share a scale, at most."""

    def __init__(self, layout: KVLayout, *, block_size: int, group_size: int = 64) -> None:
        self.block_size = block_size
        self._sections = list(_sections(layout, block_size, group_size))
        self.raw_bytes = sum(section.num_bytes for section in self._sections)

    def read(self, pool: KVPool, slot: int) -> Tensor:
        """A copy of slots [slot, slot + block_size) as a raw payload, uint8 (raw_bytes,) on the CPU."""
        gpus = [device for device in pool.layout.devices if device.type == "cuda"]
        try:
            payload = torch.empty(self.raw_bytes, dtype=torch.uint8, pin_memory=bool(gpus))
        except RuntimeError:  # no more memory can be pinned: slower, but nothing is lost
            payload = torch.empty(self.raw_bytes, dtype=torch.uint8)
        for slots, values in self._pairs(pool, slot, payload):
            values.copy_(slots, non_blocking=True)
        for gpu in gpus:  # once for all layers
            torch.cuda.current_stream(gpu).synchronize()
        return payload

    def write(self, pool: KVPool, slot: int, payload: Tensor) -> None:
        """Put a raw payload into slots [slot, slot + block_size)."""
        for slots, values in self._pairs(pool, slot, payload):
            slots.copy_(values, non_blocking=True)

    def pack(self, payload: Tensor, encoding: str) -> tuple[Tensor, str]:
        """(payload, encoding): packed, or as it came ("raw") when that would break the error bound of `encoding`."""
        if encoding == "raw":
            return payload, encoding
        parts: list[Tensor] = []
        for section, values in self._views(payload):
            exact = values.float()
            packed = _pack(section, exact, encoding)
            error = _norm(_unpack(section, packed, encoding) - exact)
            if not error <= _MAX_ERROR[encoding] * _norm(exact) < math.inf:  # also when one is not a number
                return payload, "raw"
            parts += [part.contiguous().view(torch.uint8).flatten() for part in packed]
        return torch.cat(parts), encoding

    def unpack(self, packed: Tensor, encoding: str) -> Tensor:
        """The raw payload of what `pack` gave. Raises ValueError when the size does not fit."""
        forms = [] if encoding == "raw" else [_form(section, encoding) for section in self._sections]
        num_bytes = sum(like.nbytes for form in forms for like in form) or self.raw_bytes
        if packed.numel() != num_bytes:
            raise ValueError(f"a payload of {packed.numel()} bytes, {num_bytes} expected")
        if encoding == "raw":
            return packed
        payload, offset = torch.empty(self.raw_bytes, dtype=torch.uint8), 0
        for (section, values), form in zip(self._views(payload), forms, strict=True):
            parts = []
            for like in form:
                part = packed[offset : offset + like.nbytes].clone()  # aligned
                parts.append(part.view(like.dtype).view(like.shape))
                offset += like.nbytes
            values.copy_(_unpack(section, parts, encoding))
        return payload

    def _views(self, payload: Tensor) -> Iterator[tuple[_Section, Tensor]]:
        parts = torch.split(payload, [section.num_bytes for section in self._sections])
        for section, part in zip(self._sections, parts, strict=True):
            yield section, part.view(section.dtype).view(section.shape)

    def _pairs(self, pool: KVPool, slot: int, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer's K and V the slots and the part of the payload, (block_size, heads, head_dim)."""
        for section, values in self._views(payload):
            slabs = pool.keys if section.is_key else pool.values
            for layer, part in zip(section.layers, values, strict=True):
                yield slabs[layer][slot : slot + self.block_size], part


def _sections(layout: KVLayout, block_size: int, group_size: int) -> Iterator[_Section]:
    def kind(layer: int) -> tuple[int, int, int, torch.dtype]:
        spec = layout.layers[layer]
        return spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim, spec.dtype

    tokens = _divisor(block_size, group_size)
    for (heads, key_dim, value_dim, dtype), members in groupby(range(len(layout.layers)), kind):
        layers = list(members)
        run, num, channels = range(layers[0], layers[-1] + 1), len(layers), _divisor(value_dim, group_size)
        by_token = (num, block_size // tokens, tokens, heads, key_dim)
        by_channel = (num, block_size, heads, value_dim // channels, channels)
        yield _Section(run, True, (num, block_size, heads, key_dim), by_token, dtype)
        yield _Section(run, False, (num, block_size, heads, value_dim), by_channel, dtype)


def _pack(section: _Section, values: Tensor, encoding: str) -> list[Tensor]:
    if encoding in _CASTS:
        return [values.to(_CASTS[encoding])]
    groups, axis = values.reshape(section.grouped), 2 if section.is_key else 4
    if encoding == "int4":
        low, high = groups.amin(axis, keepdim=True).half(), groups.amax(axis, keepdim=True)
        scale = ((high - low.float()) / 15).half()
        codes = ((groups - low.float()) / _safe(scale)).round().clamp(0, 15).to(torch.uint8).flatten()
        return [low, scale, codes[0::2] | codes[1::2] << 4]
    top = 127.0 if encoding == "int8" else 448.0
    scale = (groups.abs().amax(axis, keepdim=True) / top).half()
    scaled = (groups / _safe(scale)).clamp(-top, top)
    codes = scaled.round().to(torch.int8) if encoding == "int8" else scaled.to(torch.float8_e4m3fn)
    return [scale, codes]


def _unpack(section: _Section, parts: list[Tensor], encoding: str) -> Tensor:
    if encoding in _CASTS:
        return parts[0].float()
    if encoding == "int4":
        low, scale, pairs = parts
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten().float().view(section.grouped)
        groups = codes * scale.float() + low.float()
    else:
        scale, codes = parts
        groups = codes.float() * scale.float()
    return groups.reshape(section.shape)


@cache
def _form(section: _Section, encoding: str) -> list[Tensor]:
    """What `_pack` gives, without content."""
    return _pack(section, torch.empty(section.shape, device="meta"), encoding)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _divisor(length: int, largest: int) -> int:
    """The largest divisor of `length` that is not above `largest`."""
    return next(size for size in range(min(length, largest), 0, -1) if length % size == 0)


def _safe(scale: Tensor) -> Tensor:
    """A scale to divide by: groups of equal values have none."""
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)
