"""One step on the model: pack the scheduled tokens into [1, T], run the forward, give the logits to sample from.

Knows tensors and slots. Knows nothing of queues, text or the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.step import Backend, Step, running
from kvreuse.engine.scheduler import Scheduled
from kvreuse.kv.pool import KVPool

__all__ = ["Runner"]


class Runner:
    """Owns the model's forward. padded(n): so many rows does a batch of n get; those beyond n belong to nobody."""

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, backend: Backend, *, padded: Callable[[int], int] = int
    ) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._padded = padded
        self._device = model.get_input_embeddings().weight.device

    @torch.inference_mode()
    def run(self, batch: Sequence[Scheduled]) -> tuple[list[Scheduled], Tensor]:
        """Compute the K and V of every scheduled token.

        Returns the items to sample for and their logits (items, vocabulary), float32, on the model's device.
        """
        items, slices = _pack(batch)
        token_ids: list[int] = []
        positions: list[int] = []
        for item, piece in zip(items, slices, strict=True):
            token_ids += item.sequence.token_ids[piece.num_context : piece.num_tokens]
            positions += range(piece.num_context, piece.num_tokens)
        sampled = [i for i, item in enumerate(items) if item.is_sampled]
        # A step that samples nothing still asks for one row: not every model takes an empty index.
        keep = [slices[i].first_row + slices[i].num_rows - 1 for i in sampled] or [0]
        with running(Step(self._pool, slices, self._backend)):
            output = self._model(
                input_ids=self._rows(token_ids)[None],
                position_ids=self._rows(positions)[None],
                use_cache=False,
                logits_to_keep=self._rows(keep),
            )
        return [items[i] for i in sampled], output.logits[0, : len(sampled)].float()

    def _rows(self, values: list[int]) -> Tensor:
        values = values + [0] * (self._padded(len(values)) - len(values))
        return torch.tensor(values, pin_memory=self._device.type == "cuda").to(self._device, non_blocking=True)


def _pack(batch: Sequence[Scheduled]) -> tuple[list[Scheduled], list[StepSlice]]:
    """Rows in an order that makes neighbours of sequences with the same first slots."""
    runs = [item.lease.runs(item.sequence.num_computed_tokens + item.num_tokens) for item in batch]
    order = sorted(range(len(batch)), key=lambda i: runs[i])
    slices = []
    first_row = 0
    for i in order:
        item = batch[i]
        slices.append(
            StepSlice(
                first_row=first_row,
                num_rows=item.num_tokens,
                num_context=item.sequence.num_computed_tokens,
                runs=tuple(runs[i]),
            )
        )
        first_row += item.num_tokens
    return [batch[i] for i in order], slices
