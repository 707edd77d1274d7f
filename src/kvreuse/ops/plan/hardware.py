"""What a model needs and what an instance type has.

Knows a model's config.json and a table of instance types. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreuse.errors import ConfigError
from kvreuse.ops.files import read_json

__all__ = ["InstanceType", "Model", "read_instance_types", "read_model"]

_MODEL_FLOPS_SHARE = 0.4  # of the peak that a prefill reaches
_TIER_SHARE = 0.5  # of host memory and disk that may hold KV
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes in bytes; num_parameters: those that compute a token (of experts, the chosen ones)."""

    kv_bytes_per_token: int
    weight_bytes: int
    num_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """Per GPU: gpu_gib, tflops (dense, of the type that is served), gbps (memory bandwidth); the rest per instance."""

    name: str
    gpus: int
    gpu_gib: float
    host_gib: float
    disk_gib: float
    tflops: float
    gbps: float
    usd_per_hour: float

    def tier_tokens(self, model: Model, *, memory_ratio: float) -> dict[str, int]:
        """What each tier holds. Layers are spread over the GPUs of one process; no device: the model does not fit."""
        free = self.gpus * self.gpu_gib * _GIB * 0.95 - model.weight_bytes
        tiers = {"device": free * memory_ratio, "host": self.host_gib * _GIB * _TIER_SHARE,
                 "disk": self.disk_gib * _GIB * _TIER_SHARE}  # fmt: skip
        return {name: max(0, int(size // model.kv_bytes_per_token)) for name, size in tiers.items()}

    def prefill_token_s(self, model: Model) -> float:
        """Layers run one GPU after another, so more GPUs bring memory, not speed."""
        return 2 * model.num_parameters / (self.tflops * 1e12 * _MODEL_FLOPS_SHARE)

    def step_s(self, model: Model) -> float:
        """A step that only decodes reads all weights once."""
        return model.weight_bytes / (self.gbps * 1e9)


def read_instance_types(path: str | None) -> list[InstanceType]:
    """The user's table, else ours. Raises ConfigError naming the entry that is wrong."""
    table = read_json(path or str(Path(__file__).parent / "instances.json"))
    try:
        return [InstanceType(name=name, **fields) for name, fields in table.items()]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"the table of instance types is wrong: {error}") from error


def read_model(path: str, *, bytes_per_value: int) -> Model:
    """From config.json or the folder that has it. Raises ConfigError."""
    place = Path(path)
    config = read_json(str(place / "config.json" if place.is_dir() else place))
    try:
        return _model(config.get("text_config") or config, bytes_per_value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no config of a causal language model: {error}") from error


def _model(config: Mapping[str, Any], bytes_per_value: int) -> Model:
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    chosen = config.get("num_experts_per_tok") or 1
    inner = config.get("moe_intermediate_size") if experts > 1 else None
    expert = 3 * hidden * (inner or config.get("intermediate_size") or 4 * hidden)
    head = config["vocab_size"] * hidden
    total = layers * (attention + experts * expert) + head * (1 if config.get("tie_word_embeddings") else 2)
    return Model(
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * bytes_per_value,
        weight_bytes=total * bytes_per_value,
        num_parameters=layers * (attention + chosen * expert) + head,
    )
