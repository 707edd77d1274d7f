"""Copies of a Transformers cache: cut into blocks and joined again, or whole.

Knows how each kind of cache layer keeps its tokens. Knows nothing of token ids, keys, eviction or locks. Imports
nothing of Transformers: every copy is made of the caller's own objects, so no constructor has to be known.

A cache can be cut when every layer still holds every token: `DynamicLayer`, and `DynamicSlidingWindowLayer` while
the sequence is shorter than its window. What is cut off at any token is then what the model would have computed for
that prefix alone. Any other state (recurrent, convolutional, a window that has dropped tokens) is true of exactly
one length and is copied whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvreuse.errors import ConfigError, RequestError

__all__ = [
    "Cache",
    "Parts",
    "can_cut",
    "copy_whole",
    "cut",
    "join",
    "layout_of",
    "needs_single_steps",
    "num_bytes_of",
    "num_bytes_per_token",
    "num_tokens_in",
    "shell_of",
]

Parts = tuple[Tensor, ...]  # K and V of every layer that holds any, in layer order, (1, kv_heads, num_tokens, head_dim)

_CACHE_TYPE = "transformers.cache_utils.DynamicCache"
_FULL_LAYER = "transformers.cache_utils.DynamicLayer"
_WINDOW_LAYER = "transformers.cache_utils.DynamicSlidingWindowLayer"
_EMPTY_LAYER = "transformers.cache_utils.DummyLayer"
_SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Cache(Protocol):
    """What is used of a Transformers `DynamicCache`."""

    layers: list[Any]


def num_tokens_in(cache: Cache) -> int | None:
    """How many tokens the cache has seen; None when no layer counts them (purely recurrent models).

    Raises ConfigError for a kind of cache that cannot be stored, RequestError for one with more than one sequence.
    """
    name = _type_name(cache)
    if name != _CACHE_TYPE or getattr(cache, "offloading", False):
        what = f"an offloaded {name}" if name == _CACHE_TYPE else name
        raise ConfigError(f"PrefixStore keeps {_CACHE_TYPE} only, not {what}")
    if any(size != 1 for size in _batch_sizes(cache)):
        raise RequestError("the cache holds a batch; put one sequence at a time", param="past_key_values")
    lengths = {layer.get_seq_length() for layer in cache.layers if getattr(layer, "keys", None) is not None}
    if len(lengths) > 1:
        raise RequestError(f"layers hold different numbers of tokens: {sorted(lengths)}", param="past_key_values")
    return lengths.pop() if lengths else None


def can_cut(cache: Cache, length: int) -> bool:
    """True when all `length` tokens are still there in every layer, so that any prefix can be cut off."""
    return all(_holds_all(layer, length) for layer in cache.layers)


def cut(cache: Cache, start: int, stop: int) -> Parts:
    """A contiguous copy of tokens [start, stop) of every layer. Only after `can_cut`."""
    return tuple(_clone(tensor[..., start:stop, :]) for tensor in _sequences(cache))


def shell_of(cache: Cache) -> Cache:
    """The cache without its tensors: what `join` fills. Only after `can_cut`."""
    shell = copy.copy(cache)
    shell.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in shell.layers:
        layer.keys = layer.values = None
        if hasattr(layer, "record_past"):
            layer.record_past = False
    return shell


def join(shell: Cache, pieces: Sequence[Parts], length: int) -> Cache:
    """A new cache of `length` tokens: the pieces one behind the other. Shares no memory with them."""
    columns = iter([torch.cat(column, dim=-2) for column in zip(*pieces, strict=True)])
    cache = copy.copy(shell)
    cache.layers = [copy.copy(layer) for layer in shell.layers]
    for layer in cache.layers:
        if _type_name(layer) == _EMPTY_LAYER or not layer.is_initialized:
            continue
        layer.keys, layer.values = next(columns), next(columns)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    return cache


def copy_whole(cache: Cache) -> Cache:
    """A new cache in the same state; shares no tensor. Raises ConfigError when a layer holds what cannot be copied."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        layer.__dict__.update({name: _copy_value(value, layer) for name, value in vars(layer).items()})
    return twin


def num_bytes_of(cache: Cache) -> int:
    """Bytes of all tensors in it, which is the memory that a whole copy takes."""
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors([vars(layer) for layer in cache.layers]))


def num_bytes_per_token(cache: Cache) -> int:
    """K and V of one token in all layers."""
    return sum(tensor[..., :1, :].numel() * tensor.itemsize for tensor in _sequences(cache))


def layout_of(cache: Cache) -> tuple[object, ...]:
    """What must be equal before pieces of two caches may be joined: layer kinds, shapes but for length, dtypes."""
    kinds = tuple((_type_name(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)
    return kinds, tuple((t.shape[1], t.shape[3], t.dtype, t.device) for t in _sequences(cache))


def needs_single_steps(cache: Cache) -> bool:
    """True for Mamba-1 states, (1, channels, state): Transformers' code forgets them when given several new tokens.

    Mamba-2 and delta-rule states have a head axis more and go on from any number of tokens.
    """
    states = (state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values())
    return any(state is not None and state.dim() <= 3 for state in states)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _sequences(cache: Cache) -> Iterator[Tensor]:
    for layer in cache.layers:
        if layer.keys is not None:
            yield from (layer.keys, layer.values)


def _holds_all(layer: Any, length: int) -> bool:
    kind = _type_name(layer)
    if kind == _EMPTY_LAYER or (kind == _FULL_LAYER and not layer.is_initialized):
        return True
    if kind == _WINDOW_LAYER and length >= layer.sliding_window:
        return False
    return kind in (_FULL_LAYER, _WINDOW_LAYER) and layer.keys is not None and layer.keys.shape[-2] == length


def _batch_sizes(cache: Cache) -> Iterator[int]:
    for layer in cache.layers:
        states = [getattr(layer, "keys", None)]
        for name in ("conv_states", "recurrent_states"):
            states += getattr(layer, name, {}).values()
        yield from (state.shape[0] for state in states if state is not None)


def _clone(tensor: Tensor) -> Tensor:
    # Contiguous, because the clone of a view would otherwise keep the strides, and a deep copy the whole storage.
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _copy_value(value: Any, layer: object) -> Any:
    if isinstance(value, Tensor):
        return _clone(value)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        return {key: _copy_value(item, layer) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_value(item, layer) for item in value)
    raise ConfigError(f"PrefixStore cannot copy {_type_name(layer)}: it holds a {_type_name(value)}")


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
