"""Whole-prompt snapshots: deep copies of caches that cannot be cut at a token, the least recently used out first.

Knows how a Transformers cache is copied, and bytes. Knows nothing of blocks and slots.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch

from kvreuse.cache.hashing import TOKEN_BYTES, pack_tokens
from kvreuse.types import Scope

__all__ = ["Snapshots", "tensors_in"]


_Entry = tuple[Any, int, float]  # cache (never changed, so copied without the lock), num_bytes, last_used_s


class Snapshots:
    """Found by scope and token bytes: equal bytes are equal prompts. Never holds more than max_bytes. Thread-safe."""

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self.max_bytes = 0
        self._ttl_s, self._clock, self._lock = ttl_s, clock, Lock()
        self._counts = Counter(num_evicted=0, num_expired=0)
        self._entries: dict[tuple[Scope, bytes], _Entry] = {}  # least recently used first

    def match(self, token_ids: Sequence[int], scope: Scope, *, other: tuple[Any, int]) -> tuple[Any, int]:
        """A copy of the longest prompt that token_ids begin with, or are, and its length. Else `other`, if as long."""
        tokens = pack_tokens(token_ids)
        with self._lock:
            self._drop(keep_bytes=self.max_bytes)
            known = (t for owner, t in self._entries if owner == scope and tokens.startswith(t))
            fit = (t for t in known if t == tokens or not _needs_single_steps(self._entries[scope, t][0]))
            found = max(fit, key=len, default=b"")
            if len(found) <= other[1] * TOKEN_BYTES:
                return other
            cache, num_bytes, _ = self._entries.pop((scope, found))
            self._entries[scope, found] = cache, num_bytes, self._clock()
        return _copy_whole(cache), len(found) // TOKEN_BYTES

    def put(self, token_ids: Sequence[int], scope: Scope, cache: Any) -> bool:
        """Keep a copy unless there is one. False when it is larger than all the room."""
        key, num_bytes = (scope, pack_tokens(token_ids)), sum(t.numel() * t.itemsize for t in tensors_in(cache))
        if num_bytes > self.max_bytes:
            return False
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                self._drop(keep_bytes=self.max_bytes - num_bytes)
            cache, num_bytes, _ = entry or (_copy_whole(cache), num_bytes, 0.0)
            self._entries[key] = cache, num_bytes, self._clock()
        return True

    def purge(self, *, tenant: str | None) -> None:
        """Forget everything (None), or everything of one tenant."""
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if tenant not in (None, key[0].tenant)}

    def stats(self) -> Counter[str]:
        """num_entries and used_bytes now, num_evicted and num_expired since the start."""
        with self._lock:
            return self._counts + Counter(num_entries=len(self._entries), used_bytes=self._used_bytes())

    def _used_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._entries.values())

    def _drop(self, *, keep_bytes: int) -> None:
        """Forget what has expired, and more until only so many bytes are left."""
        oldest_s = self._clock() - self._ttl_s
        for key, (_, _, last_used_s) in list(self._entries.items()):
            if last_used_s >= oldest_s and self._used_bytes() <= keep_bytes:
                break
            self._counts["num_expired" if last_used_s < oldest_s else "num_evicted"] += 1
            del self._entries[key]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in the layers of a cache, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = [vars(layer) for layer in value.layers] if hasattr(value, "layers") else value
    items = items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _copy_whole(cache: Any) -> Any:
    # A deep copy of a view would copy all that the view is cut from, so the tensors are copied before the rest.
    clones = {id(t): t.detach().clone(memory_format=torch.contiguous_format) for t in tensors_in(cache)}
    return copy.deepcopy(cache, clones)


def _needs_single_steps(cache: Any) -> bool:
    """True for Mamba-1 states, (1, channels, state): Transformers forgets them when given several new tokens."""
    return any(s is not None and s.dim() < 4 for x in cache.layers for s in getattr(x, "recurrent_states", {}).values())
