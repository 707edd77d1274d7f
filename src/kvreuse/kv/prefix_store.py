"""PrefixStore: prefix reuse for users who call `model.generate` themselves.

Knows how Transformers caches are cut into blocks, and makes new ones of the caller's own, without its modules. Who is
found, kept and evicted is the business of `cache.store`.
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

from kvreuse.cache.store import PrefixCache
from kvreuse.errors import ConfigError, RequestError
from kvreuse.kv.layout import KVLayout, LayerSpec, free_bytes, num_slots_for
from kvreuse.kv.pool import KVPool
from kvreuse.kv.snapshots import Snapshots, tensors_in
from kvreuse.types import Scope

__all__ = ["PrefixStore"]

Cache = Any  # a Transformers `DynamicCache`
TokenIds = Sequence[int] | torch.Tensor  # one prompt without padding, (length,) or (1, length)

_NAMES = ("DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_CACHE, _FULL, _WINDOW, _EMPTY = (f"transformers.cache_utils.{name}" for name in _NAMES)


class PrefixStore:
    """Keeps the caches of prompts of ONE model and gives copies of them to prompts that begin alike. Thread-safe.

    max_bytes: the memory for it, taken where the first cache that is put lives; or, when it is None, memory_ratio: the
        share of what is then free on the device of its first layer. block_size: tokens per block, the unit of matching.
    policy: which block goes first, see `cache.policy`. ttl_s: an entry expires after so long without use; None = never.
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
        if ttl_s <= 0 or not 0 < memory_ratio < 1 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError("ttl_s and max_bytes must be positive, memory_ratio between 0 and 1")
        self._max_bytes, self._memory_ratio, self._block_size = max_bytes, memory_ratio, block_size
        self._options: Any = {"block_size": block_size, "policy": policy, "ttl_s": ttl_s, "clock": clock}
        self._lock = threading.Lock()  # of the counts, and of what the first put decides
        self._counts = Counter(hits=0, misses=0, prompt_tokens=0, cached_tokens=0, num_evicted=0, num_expired=0,
                               num_collisions=0, num_entries=0, used_bytes=0, max_bytes=0)  # fmt: skip
        self._snapshots = Snapshots(ttl_s=ttl_s, clock=clock)
        self._pool = KVPool(KVLayout(()), num_slots=0)
        self._index = PrefixCache(num_slots=1, bytes_per_token=1, move_slots=self._pool.move, **self._options)
        self._empty: Cache = None  # a cache without tensors, once the first was put

    @torch.inference_mode(False)
    def match(self, token_ids: TokenIds, *, tenant: str = "") -> tuple[Cache, int]:
        """A new `DynamicCache` of the first n < len(token_ids) tokens, the caller's to extend, and n; or (None, 0)."""
        ids, scope = _as_ids(token_ids), Scope(tenant=tenant)
        with self._index.acquire(ids, scope=scope) as lease:
            n = lease.num_cached_tokens
            # Read without a lock: what is pinned neither leaves nor moves.
            cache = self._gather(lease.runs(n), n) if n else None
        cache, n = self._snapshots.match(ids[:-1], scope, other=(cache, n))
        with self._lock:
            self._counts.update(hits=n > 0, misses=n == 0, prompt_tokens=len(ids), cached_tokens=n)
        return cache, n

    @torch.inference_mode(False)
    def put(self, token_ids: TokenIds, past_key_values: Cache, *, tenant: str = "", length: int | None = None) -> int:
        """Store the whole blocks that token_ids and the cache both have. Returns how many tokens are stored now.

        A cache that no longer holds all that the model has seen (recurrent, or a window that dropped tokens) is true of
        one length only: it is stored whole, and not at all when it has seen more than token_ids.
        length: how many tokens the cache has seen; needed for purely recurrent models, whose cache cannot tell.
        Raises ConfigError for a kind of cache that cannot be stored, RequestError for a batch or another model's.
        """
        cache, held = past_key_values, _num_tokens_in(past_key_values, length)
        ids, scope = _as_ids(token_ids)[:held], Scope(tenant=tenant)
        if len(ids) < self._block_size:
            return 0
        has_slots, layers = self._open_for(cache), _attention_layers(cache)
        has_all = all(layer.keys.shape[-2] == held < getattr(layer, "sliding_window", math.inf) for layer in layers)
        if has_slots and has_all:
            return self._put_blocks(ids, scope, layers)
        return len(ids) if held == len(ids) and self._snapshots.put(ids, scope, cache) else 0

    def clear(self, *, tenant: str | None = None) -> None:
        """Forget everything, or everything of one tenant."""
        self._index.purge(tenant=tenant)
        self._snapshots.purge(tenant=tenant)

    def stats(self) -> dict[str, int]:
        """Calls of `match`: hits, misses, and their prompt_tokens, cached_tokens. Blocks and snapshots since the start:
        num_evicted, num_expired, num_collisions (right hash, other tokens); now: num_entries, used_bytes, max_bytes.
        """
        now, total = self._index.usage(), self._snapshots.stats()
        total.update(num_evicted=now.num_evicted_blocks, num_expired=now.num_expired_blocks)
        total.update(num_collisions=now.num_collisions, num_entries=now.num_blocks, used_bytes=now.used_bytes)
        with self._lock:
            return {name: number + total[name] for name, number in self._counts.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError when the books of the blocks do not balance. Only while nobody else uses the store."""
        self._index.check_integrity()

    def _open_for(self, cache: Cache) -> bool:
        """Take the memory if this is the first cache. False: caches of this model are only kept whole."""
        layout, size = _layout_of(cache), self._block_size
        with self._lock:
            if self._empty is None:
                max_bytes = self._max_bytes or int(free_bytes(tensors_in(cache)[0].device) * self._memory_ratio)
                kinds = {_kind(layer) for layer in cache.layers}
                # A model with windows needs both: prompts shorter than a window are cut, longer ones are kept whole.
                room = 0 if kinds - {_FULL, _WINDOW, _EMPTY} else max_bytes // (1 + (_WINDOW in kinds))
                num_slots = room and num_slots_for(layout, memory_ratio=0, memory_bytes=room, block_size=size)
                self._pool = KVPool(layout, num_slots=num_slots)
                if num_slots:
                    self._index = PrefixCache(num_slots=num_slots, bytes_per_token=layout.bytes_per_token,
                                              move_slots=self._pool.move, **self._options)  # fmt: skip
                self._counts["max_bytes"], self._snapshots.max_bytes = max_bytes, max_bytes - room
                self._empty = copy.deepcopy(cache, {id(t): torch.empty(0) for t in tensors_in(cache) if t.dim() > 2})
        if layout != self._pool.layout:
            raise RequestError("not the layers, shapes, dtype or device of before: use one store per model")
        return self._pool.num_slots > 0

    def _put_blocks(self, ids: tuple[int, ...], scope: Scope, layers: list[Any]) -> int:
        end = min(len(ids), self._pool.num_slots) // self._block_size * self._block_size
        self._index.expire()  # what has expired must not stand in the way of what is alive
        # A match leaves the last token out: with one more, it can cover all that is to be stored.
        with self._index.acquire((*ids[:end], 0), scope=scope) as lease:
            begin = lease.num_cached_tokens
            if begin < end and self._index.reserve(lease, end, num_computed_tokens=begin):
                # Written without a lock: only the lease's own calls move its private span.
                slots = slice(start := lease.slot(begin), start + end - begin)
                for layer, keys, values in zip(layers, self._pool.keys, self._pool.values, strict=True):
                    keys[slots] = layer.keys.detach()[0, :, begin:end].transpose(0, 1)
                    values[slots] = layer.values.detach()[0, :, begin:end].transpose(0, 1)
                self._index.commit(lease, ids, num_computed_tokens=end)
            return lease.num_committed_tokens

    def _gather(self, runs: Sequence[tuple[int, int]], num_tokens: int) -> Cache:
        cache = copy.copy(self._empty)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer, *slabs in zip(_attention_layers(cache), self._pool.keys, self._pool.values, strict=True):
            pieces = [[slab[start : start + length].transpose(0, 1) for start, length in runs] for slab in slabs]
            layer.keys, layer.values = (torch.cat(parts, dim=1)[None] for parts in pieces)
            if _kind(layer) == _WINDOW:
                layer.cumulative_length, layer.record_past = num_tokens, False
        return cache


def _attention_layers(cache: Cache) -> list[Any]:
    """Layers that hold keys and values, (1, kv_heads, num_tokens, head_dim)."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


def _layout_of(cache: Cache) -> KVLayout:
    states = [(layer.keys, layer.values, getattr(layer, "sliding_window", None)) for layer in _attention_layers(cache)]
    specs = [LayerSpec(num_kv_heads=k.shape[1], num_query_heads=k.shape[1], key_head_dim=k.shape[3],
                       value_head_dim=v.shape[3], dtype=k.dtype, device=k.device, window=w)
             for k, v, w in states]  # fmt: skip
    return KVLayout(tuple(specs))


def _num_tokens_in(cache: Cache, length: int | None) -> int:
    """How many tokens the cache has seen: what its layers count, else as the caller says."""
    if _kind(cache) != _CACHE or cache.offloading:
        raise ConfigError(f"PrefixStore keeps {_CACHE} only, and not offloaded; this is {_kind(cache)}")
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
