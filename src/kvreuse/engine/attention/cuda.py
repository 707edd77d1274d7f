"""The CUDA backend: variable-length flash attention on the slabs, partial results merged by log-sum-exp.

A call of the plan is an entry of a launch: its rows are one "sequence" of queries and its run of slots one of keys. The
kernel finds the keys of entry i at `cu_seq_k[i]` and takes `seqused_k[i]` of them: given a run's first slot and length
it reads the slabs in place, and entries may lie anywhere and share slots. Entries of a kind are one launch, whichever
sequences they belong to. Knows rows and slots. Knows nothing of which devices can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from kvreuse.engine.attention.plan import Call, Run, WindowPlan
from kvreuse.engine.attention.step import Step

__all__ = ["CUDABackend", "Kernel", "varlen_kernel"]

# A run in pieces is an entry per piece, whose results are merged; beyond so many pieces a copy costs less.
MAX_PIECES = 4
# Slots that one launch copies, about: bounds the memory that it takes for a moment.
MAX_COPIED = 2**16

# `torch.nn.attention.varlen.varlen_attn` for grouped heads: (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
# scale, window_size, seqused_k) -> output (n, query_heads, head_dim) and log-sum-exp (query_heads, n), float32.
_Pair = tuple[Tensor, Tensor]
Kernel = Callable[..., _Pair]
# What the entries of one launch have in common: window_size; whether they have one row each (with such alone the kernel
# stacks the heads of a group and splits long runs); which copy they read, 0 for none, in place.
_Kind = tuple[tuple[int, int], bool, int]


def varlen_kernel() -> Kernel:
    """The kernel of torch, imported late: that takes a second, which only a GPU is worth."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    return cast(Kernel, partial(varlen_attn, return_aux=AuxRequest(lse=True), enable_gqa=True))


@dataclass(frozen=True, slots=True)
class _Launch:
    """One kernel call. Tensors are int32, on the device.

    rows: those of the batch that are its queries, entry by entry. keys: the slots to copy, or the lengths of the runs.
    """

    window_size: tuple[int, int]
    is_copied: bool
    rows: Tensor
    cu_q: Tensor
    cu_k: Tensor
    keys: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What all layers with one window do on one device.

    parts: (m, T), for each row of the batch its partial results, as places in those of all launches one after the
    other. padding: (m, T), -inf where a row has fewer than m, else 0.
    """

    launches: tuple[_Launch, ...]
    parts: Tensor
    padding: Tensor


class CUDABackend:
    """Shared runs once, the private rest per sequence, in a few launches however many sequences there are.

    is_gathering: copy what each launch reads together first, for a kernel that does not take offsets.
    """

    def __init__(self, kernel: Kernel | None = None, *, is_gathering: bool = False) -> None:
        self.name = "cuda-gather" if is_gathering else "cuda"
        self._kernel = kernel or varlen_kernel()
        self._is_gathering = is_gathering

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, head_dim). Never waits for the device."""
        spec = step.pool.layout.layers[layer]
        key = (spec.window, query.device)
        if key not in step.prepared:
            step.prepared[key] = self._prepare(step.plan(spec.window), query.shape[2], query.device)
        prepared: _Prepared = step.prepared[key]
        rows = query[0].transpose(0, 1).to(spec.dtype)
        slabs = step.pool.keys[layer], step.pool.values[layer]
        parts = [self._run(launch, rows, slabs, scaling=scaling) for launch in prepared.launches]
        return _merged(parts, prepared, sinks).to(query.dtype).unsqueeze(0)

    def _run(self, launch: _Launch, rows: Tensor, slabs: _Pair, *, scaling: float) -> _Pair:
        keys, values = (slab.index_select(0, launch.keys) if launch.is_copied else slab for slab in slabs)
        return self._kernel(
            *(rows.index_select(0, launch.rows), keys, values, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k),
            scale=scaling,
            window_size=launch.window_size,
            seqused_k=None if launch.is_copied else launch.keys,
        )

    def _prepare(self, plan: WindowPlan, num_rows: int, device: torch.device) -> _Prepared:
        kinds: dict[_Kind, list[Call]] = {}
        num_copied = MAX_COPIED
        for entry in self._entries((*plan.first, *plan.more)):
            is_copied = self._is_gathering or len(entry.runs) > 1
            num_copied += entry.num_slots if is_copied else 0
            copy = num_copied // MAX_COPIED if is_copied else 0
            kinds.setdefault((_window_size(entry), entry.num_rows == 1, copy), []).append(entry)
        launches = tuple(_launch(kind, entries, device) for kind, entries in kinds.items())
        parts = _parts([entry for entries in kinds.values() for entry in entries], num_rows, device)
        padding = torch.zeros(parts.shape, device=device).masked_fill_(parts < 0, float("-inf"))
        return _Prepared(launches, parts.clamp(min=0), padding)

    def _entries(self, calls: Iterable[Call]) -> Iterator[Call]:
        """The calls; where the run is in pieces and it needs no mask, one for each piece."""
        for call in calls:
            is_whole = self._is_gathering or call.is_causal or call.window is not None or len(call.runs) > MAX_PIECES
            yield from [call] if is_whole else (replace(call, runs=(run,)) for run in call.runs)


def _window_size(call: Call) -> tuple[int, int]:
    """How many keys before and behind its own a row sees, where the last row's own is the last; -1 is no bound."""
    if call.window is not None:
        return call.window - 1, 0
    return (-1, 0) if call.is_causal else (-1, -1)


def _launch(kind: _Kind, entries: Sequence[Call], device: torch.device) -> _Launch:
    window_size, _, copy = kind
    lengths = [entry.num_slots for entry in entries]
    if copy:
        cu_k, keys = [0, *accumulate(lengths)], _slots([run for entry in entries for run in entry.runs])
    else:
        starts = [entry.runs[0][0] for entry in entries]
        # The last number only ends the last run; where the others end is not looked at.
        cu_k, keys = [*starts, starts[-1] + lengths[-1]], _ints(lengths)
    return _Launch(
        window_size=window_size,
        is_copied=copy > 0,
        rows=_on(device, _slots([(entry.first_row, entry.num_rows) for entry in entries])),
        cu_q=_on(device, _ints([0, *accumulate(entry.num_rows for entry in entries)])),
        cu_k=_on(device, _ints(cu_k)),
        keys=_on(device, keys),
        max_q=max(entry.num_rows for entry in entries),
        max_k=max(lengths),
    )


def _parts(entries: Sequence[Call], num_rows: int, device: torch.device) -> Tensor:
    """(m, T): for each row the places of its partial results, -1 where it has fewer than m."""
    parts: list[list[int]] = []
    num_seen = [0] * num_rows
    place = 0
    for entry in entries:
        rows = slice(entry.first_row, entry.first_row + entry.num_rows)
        rank = max(num_seen[rows])
        if rank == len(parts):
            parts.append([-1] * num_rows)
        parts[rank][rows] = range(place, place + entry.num_rows)
        num_seen[rows] = [rank + 1] * entry.num_rows
        place += entry.num_rows
    return _on(device, torch.tensor(parts, dtype=torch.int32))


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _slots(runs: Sequence[Run]) -> Tensor:
    return torch.cat([torch.arange(start, start + length, dtype=torch.int32) for start, length in runs])


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    # Nobody waits for the transfer.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _merged(parts: Sequence[_Pair], prepared: _Prepared, sinks: Tensor | None) -> Tensor:
    """The weighted mean of each row's partial results: (T, query_heads, head_dim)."""
    if len(parts) == len(prepared.parts) == 1 and sinks is None:
        return parts[0][0]
    out = torch.cat([out for out, _ in parts])
    lse = torch.cat([lse for _, lse in parts], dim=1).index_select(1, prepared.parts.flatten())
    lse = lse.view(-1, *prepared.parts.shape) + prepared.padding
    total = lse.logsumexp(1)
    if sinks is not None:  # one more key whose value is zero
        total = torch.logaddexp(total, sinks.float().unsqueeze(1))
    shares = (lse - total.unsqueeze(1)).exp_().permute(1, 2, 0).unsqueeze(3)
    merged = out.index_select(0, prepared.parts[0]) * shares[0]
    for places, share in zip(prepared.parts[1:], shares[1:], strict=True):
        merged += out.index_select(0, places) * share
    return merged
