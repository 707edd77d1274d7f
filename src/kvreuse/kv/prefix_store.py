"""PrefixStore: prefix reuse for users who call `model.generate` themselves.

Maps token ids to a plain Transformers cache and back. Knows which caches can be cut into blocks, and how. Who is found,
kept and evicted is the business of `cache.store`. Imports nothing of Transformers: caches are made of the caller's own.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvreuse.cache.policy import make_policy
from kvreuse.cache.store import PrefixCache
from kvreuse.errors import ConfigError, RequestError
from kvreuse.kv.layout import KVLayout, LayerSpec, free_bytes, num_slots_for
from kvreuse.kv.pool import KVPool
from kvreuse.kv.snapshots import Snapshots, tensors_in
from kvreuse.types import Scope

__all__ = ["PrefixStore"]

Cache = Any  # a Transformers `DynamicCache`
TokenIds = Sequence[int] | Tensor  # one prompt without padding, (length,) or (1, length)

_MODULE = "transformers.cache_utils."
_FULL, _WINDOW, _EMPTY = (f"{_MODULE}{name}Layer" for name in ("Dynamic", "DynamicSlidingWindow", "Dummy"))


class PrefixStore:
    """Keeps the caches of prompts of ONE model and gives copies of them to prompts that begin alike. Thread-safe.

    max_bytes: the memory for it, taken where the first cache that is put lives; or memory_ratio: the share of what is
        then free on the device of its first layer.
    block_size: tokens per block, the unit of matching. policy: which block goes first, see `cache.policy`.
    ttl_s: seconds after its last use that an entry can still be matched; None = no limit.
    Raises ConfigError for anything out of range.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        memory_ratio: float = 0.4,
        block_size: int = 32,
        policy: str = "size_weighted_lru",
        ttl_s: float | None = 4 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ttl_s = math.inf if ttl_s is None else ttl_s
        if block_size < 1 or ttl_s <= 0 or not 0 < memory_ratio < 1 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError("block_size, ttl_s and max_bytes must be positive, memory_ratio between 0 and 1")
        make_policy(policy, lru_weights=(1, 1))  # an unknown name is refused now, not when something is put
        self._max_bytes, self._memory_ratio, self._block_size = max_bytes, memory_ratio, block_size
        self._options: Any = {"block_size": block_size, "policy": policy, "ttl_s": ttl_s, "clock": clock}
        self._lock = threading.Lock()  # of the counts, and of what the first put decides
        self._counts = Counter(hits=0, misses=0, prompt_tokens=0, cached_tokens=0, num_evicted=0, num_expired=0,
                               num_collisions=0, num_entries=0, used_bytes=0, max_bytes=0)  # fmt: skip
        self._snapshots = Snapshots(ttl_s=ttl_s, clock=clock)
        self._layout: KVLayout | None = None
        self._index: PrefixCache | None = None  # of the pool's slots; None while there is no pool

    @torch.inference_mode(False)
    def match(self, token_ids: TokenIds, *, tenant: str = "") -> tuple[Cache, int]:
        """A new `DynamicCache` that holds the first n tokens, and n; (None, 0) when nothing is stored.

        n < len(token_ids), so that `generate` still has a token to run. The cache is the caller's own to extend.
        """
        ids, scope, cache, n = _as_ids(token_ids), Scope(tenant=tenant), None, 0
        if self._index is not None:
            # The slots are read without a lock: what is pinned neither leaves nor moves.
            with self._index.acquire(ids, scope=scope) as lease:
                n = lease.num_cached_tokens
                cache = self._gather(lease.runs(n), n) if n else None
        whole, num_tokens = self._snapshots.match(ids[:-1], scope, longer_than=n)
        if whole is not None:
            cache, n = whole, num_tokens
        with self._lock:
            self._counts.update(hits=n > 0, misses=n == 0, prompt_tokens=len(ids), cached_tokens=n)
        return cache, n

    @torch.inference_mode(False)
    def put(self, token_ids: TokenIds, past_key_values: Cache, *, tenant: str = "", length: int | None = None) -> int:
        """Store what the cache holds of token_ids. Returns for how many of them the store now has an entry.

        The cache may hold fewer tokens (the last of a generated sequence was never run) or more (what `generate`
        appended): whole blocks of what both have are stored. A cache that no longer holds all that the model has seen
        (recurrent, or a window that dropped tokens) is true of one length only: stored whole, or not when it has more.
        length: how many tokens the cache has seen; needed for purely recurrent models, whose cache cannot tell.
        Raises ConfigError for a kind of cache that cannot be stored, RequestError for a batch or another model's.
        """
        cache, held = past_key_values, _num_tokens_in(past_key_values, length)
        ids, scope = _as_ids(token_ids)[:held], Scope(tenant=tenant)
        if len(ids) < self._block_size:
            return 0
        index, layers = self._open_for(cache), _attention_layers(cache)
        has_all = all(layer.keys.shape[-2] == held < getattr(layer, "sliding_window", math.inf) for layer in layers)
        if index is not None and has_all:
            return self._put_blocks(index, ids, scope, layers)
        return len(ids) if held == len(ids) and self._snapshots.put(ids, scope, cache) else 0

    def clear(self, *, tenant: str | None = None) -> None:
        """Forget everything, or everything of one tenant."""
        if self._index is not None:
            self._index.purge(tenant=tenant)
        self._snapshots.purge(tenant=tenant)

    def stats(self) -> dict[str, int]:
        """Since the start: hits and misses (calls of `match`), prompt_tokens, cached_tokens, num_evicted, num_expired,
        num_collisions (right hash, other tokens). Now: num_entries (blocks and snapshots), used_bytes, max_bytes.
        """
        with self._lock:
            total = self._counts.copy()
        total.update(self._snapshots.stats())
        if self._index is not None:
            now = self._index.usage()
            total.update(num_evicted=now.num_evicted_blocks, num_expired=now.num_expired_blocks)
            total.update(num_collisions=now.num_collisions, num_entries=now.num_blocks, used_bytes=now.used_bytes)
        return dict(total)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books of the blocks do not balance. Only while nobody else uses the store."""
        if self._index is not None:
            self._index.check_integrity()

    def _open_for(self, cache: Cache) -> PrefixCache | None:
        """The index of the pool, None when caches of this model are kept whole. The first cache decides."""
        layout = _layout_of(cache)
        with self._lock:
            if self._layout is None:
                max_bytes = self._max_bytes or int(free_bytes(tensors_in(cache)[0].device) * self._memory_ratio)
                # A model with windows needs both: prompts shorter than a window are cut, longer ones are kept whole.
                kinds = {_kind(layer) for layer in cache.layers}
                for_blocks = 0 if kinds - {_FULL, _WINDOW, _EMPTY} else max_bytes // (1 + (_WINDOW in kinds))
                if for_blocks:
                    self._make_pool(layout, max_bytes=for_blocks, like=cache)
                self._counts["max_bytes"], self._snapshots.max_bytes = max_bytes, max_bytes - for_blocks
                self._layout = layout
        if layout != self._layout:
            raise RequestError("not the layers, shapes, dtype or device of before: use one store per model")
        return self._index

    def _make_pool(self, layout: KVLayout, *, max_bytes: int, like: Cache) -> None:
        num_slots = num_slots_for(layout, memory_ratio=0, memory_bytes=max_bytes, block_size=self._block_size)
        unit, self._pool, self._empty = layout.bytes_per_token, KVPool(layout, num_slots=num_slots), _copy_layers(like)
        for layer in _attention_layers(self._empty):
            layer.keys = layer.values = torch.empty(0)
        move = self._pool.move
        self._index = PrefixCache(num_slots=num_slots, bytes_per_token=unit, move_slots=move, **self._options)

    def _put_blocks(self, index: PrefixCache, ids: tuple[int, ...], scope: Scope, layers: list[Any]) -> int:
        end = min(len(ids), self._pool.num_slots) // self._block_size * self._block_size
        # A match leaves the last token out: with one more, it can cover all that is to be stored.
        with index.acquire((*ids[:end], 0), scope=scope) as lease:
            begin = lease.num_cached_tokens
            if begin < end:
                index.expire()
                if index.reserve(lease, end, num_computed_tokens=begin):
                    # Written without a lock: only the lease's own calls move its private span.
                    slots = slice(lease.slot(begin), lease.slot(begin) + end - begin)
                    for layer, keys, values in zip(layers, self._pool.keys, self._pool.values, strict=True):
                        keys[slots] = layer.keys.detach()[0, :, begin:end].transpose(0, 1)
                        values[slots] = layer.values.detach()[0, :, begin:end].transpose(0, 1)
                    index.commit(lease, ids, num_computed_tokens=end)
            return lease.num_committed_tokens

    def _gather(self, runs: Sequence[tuple[int, int]], num_tokens: int) -> Cache:
        cache = _copy_layers(self._empty)
        for layer, *slabs in zip(_attention_layers(cache), self._pool.keys, self._pool.values, strict=True):
            pieces = [[slab[start : start + length].transpose(0, 1) for start, length in runs] for slab in slabs]
            layer.keys, layer.values = (torch.cat(parts, dim=1)[None] for parts in pieces)
            if _kind(layer) == _WINDOW:
                layer.cumulative_length, layer.record_past = num_tokens, False
        return cache


def _copy_layers(cache: Cache) -> Cache:
    """A new cache with new layers that share the tensors."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def _attention_layers(cache: Cache) -> list[Any]:
    """Layers that hold keys and values, (1, kv_heads, num_tokens, head_dim)."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


def _layout_of(cache: Cache) -> KVLayout:
    specs = []
    for layer in _attention_layers(cache):
        (_, heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[3]
        specs.append(LayerSpec(num_kv_heads=heads, key_head_dim=key_dim, value_head_dim=value_dim,
                               num_query_heads=heads, dtype=layer.keys.dtype, device=layer.keys.device,
                               window=getattr(layer, "sliding_window", None)))  # fmt: skip
    return KVLayout(tuple(specs))


def _num_tokens_in(cache: Cache, length: int | None) -> int:
    """How many tokens the cache has seen: what its layers count, else as the caller says."""
    if _kind(cache) != _MODULE + "DynamicCache" or cache.offloading:
        raise ConfigError(f"PrefixStore keeps {_MODULE}DynamicCache only, on its device; this is {_kind(cache)}")
    sizes = [len(tensor) for tensor in tensors_in(cache) if tensor.dim() > 2]
    if min(sizes, default=1) > 1:
        raise RequestError("the cache holds a batch; put one sequence at a time", param="past_key_values")
    held = next((layer.get_seq_length() for layer in _attention_layers(cache)), length if sizes else 0)
    if held is None:
        raise RequestError("this cache does not know how many tokens it has seen; say so", param="length")
    return int(held)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _as_ids(token_ids: TokenIds) -> tuple[int, ...]:
    ids = torch.as_tensor(token_ids)
    if ids.numel() != ids.shape[-1]:
        raise RequestError(f"one prompt at a time, not a tensor of shape {tuple(ids.shape)}", param="token_ids")
    return tuple(ids.flatten().tolist())
