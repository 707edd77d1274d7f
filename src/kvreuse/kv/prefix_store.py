"""PrefixStore: prefix reuse for users who call `model.generate` themselves.

Maps token ids to a plain Transformers cache and back, in this process. Knows keys, scopes and time. How a cache is
copied is `cache_copy`'s business, who is evicted `prefix_room`'s; the engine and its pool are not involved.

`put` copies only the blocks that are not stored yet, `match` copies what it returns: the caller extends his own copy
and the stored tensors never change. Tensors are copied outside every lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreuse.cache.hashing import block_hashes
from kvreuse.cache.policy import make_policy, touch
from kvreuse.errors import ConfigError, RequestError
from kvreuse.kv import cache_copy
from kvreuse.kv.cache_copy import Cache
from kvreuse.kv.prefix_index import Bucket, Entry
from kvreuse.kv.prefix_room import Room, memory_cap
from kvreuse.types import Scope

__all__ = ["PrefixStore", "PrefixStoreStats"]

_NUM_BUCKETS = 64
_COUNTED = ("hits", "misses", "prompt_tokens", "cached_tokens", "num_unstorable")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixStoreStats:
    """Counters since the start, and what is held now. hits + misses = calls of `match`.

    num_collisions: stored under the same hash but other tokens; a miss.
    num_unstorable: calls of `put` whose cache was past the prompt and could not be cut back to it.
    """

    hits: int
    misses: int
    prompt_tokens: int
    cached_tokens: int
    num_evicted: int
    num_expired: int
    num_collisions: int
    num_unstorable: int
    num_entries: int
    used_bytes: int
    max_bytes: int

    @property
    def hit_rate(self) -> float:
        """Cached tokens / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixStore:
    """Keeps the caches of prompts of ONE model and gives copies of them to prompts that begin alike. Thread-safe.

    max_bytes: cap of the stored tensors, never exceeded; or memory_ratio: share of the memory now free on `device`
        (0.4 when neither is given). Stored tensors stay on the devices where the model put them.
    block_size: tokens per block, the unit of matching.
    policy, lru_weights: who is evicted first: `size_weighted_lru` with weights (frequency, recency), `lru` or `lfu`.
    ttl_s: seconds after its last use that an entry can still be matched; None = no limit.
    Raises ConfigError for anything out of range.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        memory_ratio: float | None = None,
        device: str | torch.device = "cpu",
        block_size: int = 32,
        policy: str = "size_weighted_lru",
        lru_weights: tuple[float, float] = (0.3, 0.7),
        ttl_s: float | None = 4 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {block_size}")
        if ttl_s is not None and ttl_s <= 0:
            raise ConfigError(f"ttl_s must be positive or None, not {ttl_s}")
        self.block_size = block_size
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._clock = clock
        self._buckets = [Bucket() for _ in range(_NUM_BUCKETS)]
        self._room = Room(
            self._buckets,
            max_bytes=memory_cap(max_bytes, memory_ratio, torch.device(device)),
            sort_key=make_policy(policy, lru_weights=lru_weights),
            oldest_s=self._oldest_s,
        )
        self._lock = threading.Lock()  # of the three below; nothing else is locked while it is held
        self._counts: Counter[str] = Counter()
        self._shells: list[Cache] = []  # one, once the first block was put: what all matched blocks are joined into
        self._layout: tuple[object, ...] = ()

    def match(
        self, token_ids: Sequence[int] | Tensor, *, tenant: str = "", adapter: str = ""
    ) -> tuple[Cache | None, int]:
        """A new `DynamicCache` that holds the first n tokens, and n; (None, 0) when nothing is stored.

        n < len(token_ids), so that `generate` still has a token to run. The cache is the caller's own to extend.
        token_ids: one prompt without padding, (length,) or (1, length).
        """
        ids = _as_ids(token_ids)
        found = self._find(ids, self._hashes(ids[:-1], tenant, adapter))
        num_tokens = found[-1].num_tokens if found else 0
        self._count(hits=bool(found), misses=not found, prompt_tokens=len(ids), cached_tokens=num_tokens)
        if not found:
            return None, 0
        if found[0].is_snapshot:
            return cache_copy.copy_whole(found[0].data), num_tokens
        return cache_copy.join(self._shells[0], [entry.data for entry in found], num_tokens), num_tokens

    def put(
        self,
        token_ids: Sequence[int] | Tensor,
        past_key_values: Cache,
        *,
        tenant: str = "",
        adapter: str = "",
        length: int | None = None,
    ) -> int:
        """Store what the cache holds of token_ids. Returns for how many of them the store now has an entry.

        The cache may hold fewer tokens (the last of a generated sequence was never run) or more (what `generate`
        appended to the prompt): only tokens that both have are stored. A cache that cannot be cut (recurrent, or a
        sliding window that has dropped tokens) is stored whole when it holds no more than token_ids; else 0.
        length: how many tokens the cache has seen. Only needed for purely recurrent models, whose cache cannot tell.
        Raises ConfigError for a kind of cache that cannot be stored, RequestError for a batch or another model's.
        """
        held = cache_copy.num_tokens_in(past_key_values)
        held = length if held is None else held
        if held is None:
            raise RequestError("this cache does not know how many tokens it has seen; say so", param="length")
        ids = _as_ids(token_ids)[:held]
        hashes = self._hashes(ids, tenant, adapter)
        if not hashes:
            return 0
        can_cut = cache_copy.can_cut(past_key_values, held)
        if held > len(ids) and not can_cut:
            self._count(num_unstorable=1)
            return 0
        bucket, oldest_s = self._bucket(hashes), self._oldest_s()
        self._room.drop(bucket, lambda entry: entry.last_used_s < oldest_s, expired=True)
        store = self._put_blocks if can_cut else self._put_whole
        return store(ids, hashes, past_key_values, tenant=tenant)

    def clear(self, *, tenant: str | None = None) -> None:
        """Forget everything, or everything of one tenant."""
        for bucket in self._buckets:
            self._room.drop(bucket, lambda entry: tenant is None or entry.tenant == tenant, expired=False)

    def stats(self) -> PrefixStoreStats:
        """The counters and sizes of this moment."""
        num_entries = num_collisions = 0
        for bucket in self._buckets:
            with bucket.lock:
                num_entries += sum(1 for _ in bucket.entries())
                num_collisions += bucket.num_collisions
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
        return PrefixStoreStats(
            **counts,
            num_evicted=self._room.num_evicted,
            num_expired=self._room.num_expired,
            num_collisions=num_collisions,
            num_entries=num_entries,
            used_bytes=self._room.used_bytes,
            max_bytes=self._room.max_bytes,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance. Only while no other thread uses the store."""
        total = 0
        for bucket in self._buckets:
            with bucket.lock:
                bucket.check_integrity()
                total += sum(entry.num_bytes for entry in bucket.entries())
        used_bytes, max_bytes = self._room.used_bytes, self._room.max_bytes
        if not total == used_bytes <= max_bytes:
            raise AssertionError(f"{total} bytes stored, {used_bytes} booked, {max_bytes} allowed")

    def _find(self, ids: tuple[int, ...], hashes: list[bytes]) -> list[Entry]:
        """The blocks, or the one snapshot, that cover most of ids[:-1]; the use is recorded."""
        if not hashes:
            return []
        bucket, usable = self._bucket(hashes), len(ids) - 1
        with bucket.lock:
            oldest_s = self._oldest_s()
            found = bucket.chain(ids, hashes, oldest_s=oldest_s)
            for snapshot in bucket.snapshots(ids[:-1], hashes, oldest_s=oldest_s):
                # A match must leave what the model can go on from: see `needs_single_steps`.
                if snapshot.num_tokens == usable or not snapshot.needs_single_steps:
                    found = [snapshot] if not found or found[-1].num_tokens < snapshot.num_tokens else found
                    break
            self._touch(found, uses=1)
        return found

    def _put_blocks(self, ids: tuple[int, ...], hashes: list[bytes], cache: Cache, *, tenant: str) -> int:
        self._check_layout(cache)
        bucket, size = self._bucket(hashes), self.block_size
        with bucket.lock:
            chain = bucket.chain(ids, hashes, oldest_s=-math.inf)
            self._touch(chain, uses=0)
        unit = cache_copy.num_bytes_per_token(cache) * size
        with self._room.reserved(len(hashes) - len(chain), unit, keep=chain) as grant:
            new = [
                Entry(
                    block_hash=hashes[i],
                    token_ids=ids[i * size : (i + 1) * size],
                    num_tokens=(i + 1) * size,
                    num_bytes=unit,
                    data=cache_copy.cut(cache, i * size, (i + 1) * size),
                    tenant=tenant,
                )
                for i in range(len(chain), len(chain) + grant.count)
            ]
            with bucket.lock:
                self._touch(new, uses=1)
                grant.num_used = len(bucket.extend(chain, new))
                return len(bucket.chain(ids, hashes, oldest_s=-math.inf)) * size

    def _put_whole(self, ids: tuple[int, ...], hashes: list[bytes], cache: Cache, *, tenant: str) -> int:
        bucket, unit = self._bucket(hashes), cache_copy.num_bytes_of(cache)
        with bucket.lock:
            if self._has_snapshot(bucket, ids, hashes):
                return len(ids)
        with self._room.reserved(1, unit) as grant:
            if not grant.count:
                return 0
            new = Entry(
                block_hash=hashes[-1],
                token_ids=ids,
                num_tokens=len(ids),
                num_bytes=unit,
                data=cache_copy.copy_whole(cache),
                tenant=tenant,
                num_blocks=len(hashes),
                is_snapshot=True,
                needs_single_steps=cache_copy.needs_single_steps(cache),
            )
            with bucket.lock:
                if not self._has_snapshot(bucket, ids, hashes):
                    self._touch([new], uses=1)
                    bucket.add_snapshot(new)
                    grant.num_used = 1
        return len(ids)

    def _has_snapshot(self, bucket: Bucket, ids: tuple[int, ...], hashes: list[bytes]) -> bool:
        same = [entry for entry in bucket.snapshots(ids, hashes[-1:], oldest_s=-math.inf) if entry.token_ids == ids]
        self._touch(same, uses=0)
        return bool(same)

    def _touch(self, entries: Sequence[Entry], *, uses: int) -> None:
        now, turnover = self._clock(), self._room.turnover
        for entry in entries:
            touch(entry, now=now, turnover=turnover, uses=uses)

    def _check_layout(self, cache: Cache) -> None:
        """The pieces of all caches must fit together, which the first one stored decides."""
        layout = cache_copy.layout_of(cache)
        with self._lock:
            if not self._shells:
                self._layout = layout
                self._shells.append(cache_copy.shell_of(cache))
        if layout != self._layout:
            raise RequestError(
                "the cache has other layers, shapes, dtype or device than those stored before; use one store per model",
                param="past_key_values",
            )

    def _hashes(self, ids: tuple[int, ...], tenant: str, adapter: str) -> list[bytes]:
        return block_hashes(ids, scope=Scope(tenant=tenant, adapter=adapter), block_size=self.block_size)

    def _bucket(self, hashes: Sequence[bytes]) -> Bucket:
        return self._buckets[hashes[0][0] % _NUM_BUCKETS]

    def _oldest_s(self) -> float:
        return self._clock() - self._ttl_s

    def _count(self, **increments: int) -> None:
        with self._lock:
            self._counts.update(increments)


def _as_ids(token_ids: Sequence[int] | Tensor) -> tuple[int, ...]:
    if not isinstance(token_ids, Tensor):
        return tuple(token_ids)
    if token_ids.dim() > 2 or (token_ids.dim() == 2 and token_ids.shape[0] != 1):
        raise RequestError(f"one prompt at a time, not a tensor of shape {tuple(token_ids.shape)}", param="token_ids")
    return tuple(token_ids.flatten().tolist())
