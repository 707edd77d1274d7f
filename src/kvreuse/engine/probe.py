"""Learn a model's KV layout by watching it run once, instead of guessing it from config fields.

A two-token forward records what every attention layer passes to the attention interface. What the engine
cannot do is refused here, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvreuse.engine.attention.step import running
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout, LayerSpec

__all__ = ["probe_layout"]


_Call = tuple[int, Tensor, Tensor, Tensor, dict[str, Any]]


class _Recorder:
    """Stands in for a step: writes nothing, remembers the call, answers zeros."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def layer(self, index: int, qkv: tuple[Tensor, Tensor, Tensor], kwargs: dict[str, Any]) -> Tensor:
        query, key, value = qkv
        self.calls.append((index, query, key, value, kwargs))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def probe_layout(model: PreTrainedModel) -> KVLayout:
    """Run two tokens through `model` (loaded with the engine's attention) and read its layers.

    Raises ConfigError when the model does not reach the attention interface exactly once per layer, in order,
    or asks for something that the backends do not compute.
    """
    name = type(model).__name__
    recorder = _Recorder()
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with torch.inference_mode(), running(recorder):
        model(input_ids=ids, position_ids=torch.arange(2, device=ids.device)[None], use_cache=False)
    num_layers = model.config.get_text_config().num_hidden_layers
    if [layer for layer, *_ in recorder.calls] != list(range(num_layers)):
        raise ConfigError(
            f"{name} is not supported: its {num_layers} layers do not each call Transformers' attention interface once"
        )
    return KVLayout(tuple(_spec(name, call) for call in recorder.calls))


def _spec(name: str, call: _Call) -> LayerSpec:
    layer, query, key, value, kwargs = call
    if kwargs.get("softcap") is not None:
        raise ConfigError(f"{name} is not supported: layer {layer} caps its attention logits (softcap)")
    if kwargs["mask"] is not None:
        raise ConfigError(f"{name} is not supported: layer {layer} is told what to see by a mask of its own")
    if kwargs.get("position_bias") is not None:
        raise ConfigError(f"{name} is not supported: layer {layer} adds a position bias to its attention")
    if key.shape[2] != query.shape[2]:
        raise ConfigError(f"{name} is not supported: layer {layer} attends to something else than its own tokens")
    return LayerSpec(
        num_kv_heads=key.shape[1],
        key_head_dim=key.shape[3],
        value_head_dim=value.shape[3],
        num_query_heads=query.shape[1],
        dtype=key.dtype,
        device=key.device,
        window=kwargs.get("sliding_window"),
        has_sinks=kwargs.get("s_aux") is not None,
    )
