"""One step as the attention layers see it, and the function that Transformers calls in every layer.

The model is loaded with `attn_implementation=NAME` and its forward is Transformers' own. Because no mask function is
registered under NAME, Transformers builds no mask. The packed batch is [1, T]; each layer first writes its new K and V
to the slabs, then attends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvreuse.engine.attention.plan import StepSlice, WindowPlan, plan_window
from kvreuse.kv.pool import KVPool

__all__ = ["NAME", "Backend", "Step", "current_step", "register", "running"]

NAME = "kvreuse"


class Step:
    """The rows of one forward: who they belong to, where their K and V go, what they attend to."""

    def __init__(self, pool: KVPool, slices: Sequence[StepSlice], backend: Backend) -> None:
        self.pool = pool
        self.slices = tuple(slices)
        self.backend = backend
        self._slots = torch.tensor([slot for piece in self.slices for slot in _own_slots(piece)])
        self._slots_on: dict[torch.device, Tensor] = {}
        self._plans: dict[int | None, WindowPlan] = {}
        self.prepared: dict[Any, Any] = {}  # what a backend derives from the step once for all layers

    def slots_on(self, device: torch.device) -> Tensor:
        """The slots of the rows, (T,) int64."""
        if device not in self._slots_on:
            self._slots_on[device] = self._slots.to(device, non_blocking=True)
        return self._slots_on[device]

    def plan(self, window: int | None) -> WindowPlan:
        """The calls of every layer with this window."""
        if window not in self._plans:
            self._plans[window] = plan_window(self.slices, window)
        return self._plans[window]

    def layer(self, index: int, qkv: tuple[Tensor, Tensor, Tensor], kwargs: dict[str, Any]) -> Tensor:
        """What a layer does: write its new K and V, then attend.

        qkv: (1, heads, T, head_dim) each; kwargs: what the model passes beside them.
        Returns (1, T, query_heads, value_head_dim). Rows behind those of the slices belong to nobody: they write
        nothing and get zeros.
        """
        num_rows, num_more = len(self._slots), qkv[0].shape[2] - len(self._slots)
        query, key, value = (part[:, :, :num_rows] for part in qkv) if num_more else qkv
        self.pool.write(index, self.slots_on(key.device), key, value)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = self.backend.attend(self, index, query, scaling=scaling, sinks=kwargs.get("s_aux"))
        return nn.functional.pad(out, (0, 0, 0, 0, 0, num_more)) if num_more else out


class Backend(Protocol):
    """Attention of the rows of a step over the slabs, exact for every window and with sinks."""

    name: str

    def attend(self, step: Step, layer: int, query: Tensor, *, scaling: float, sinks: Tensor | None) -> Tensor:
        """query (1, query_heads, T, head_dim) -> output (1, T, query_heads, value_head_dim)."""


def _own_slots(piece: StepSlice) -> Iterator[int]:
    position = 0
    for slot, length in piece.runs:
        low = max(piece.num_context - position, 0)
        yield from range(slot + low, slot + length)
        position += length


_current = threading.local()


@contextmanager
def running(step: Any) -> Iterator[None]:
    """While inside, this thread's forwards of a NAME model belong to `step`."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def current_step() -> Any:
    """The step whose forward runs in this thread."""
    return _current.step


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    index = module.layer_idx
    assert isinstance(index, int)
    return current_step().layer(index, (query, key, value), {**kwargs, "mask": mask[0] if mask else None}), None


def register() -> None:
    """Make NAME known to Transformers. Safe to call again."""
    AttentionInterface.register(NAME, _attention)
