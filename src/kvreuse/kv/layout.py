"""What one token's KV looks like in every layer, and how many tokens the memory holds.

Knows shapes, dtypes and bytes. Knows nothing of which tokens are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvreuse.errors import ConfigError

__all__ = ["KVLayout", "LayerSpec", "free_bytes", "num_slots_for"]

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One attention layer as the model calls it.

    window: a query at position p sees keys in (p - window, p]; None sees all of [0, p].
    """

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    num_query_heads: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    has_sinks: bool = False

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in this layer."""
        return self.num_kv_heads * (self.key_head_dim + self.value_head_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers of a model, in layer order."""

    layers: tuple[LayerSpec, ...]

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def bytes_on(self, device: torch.device) -> int:
        """K and V of one token in the layers that live on `device`."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.device == device)

    def stored_as(self, dtype: torch.dtype | None) -> KVLayout:
        """The same layers with K and V kept in another dtype; None keeps the model's."""
        return self if dtype is None else KVLayout(tuple(replace(layer, dtype=dtype) for layer in self.layers))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices that hold layers, each once, in layer order."""
        return tuple(dict.fromkeys(layer.device for layer in self.layers))


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on `device`; on the CPU what the system and its cgroup leave us."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = limit_file.read_text().strip(), int(used_file.read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            available = min(available, max(int(limit) - used, 0))
    return available


def num_slots_for(layout: KVLayout, *, memory_ratio: float, memory_bytes: int | None, block_size: int) -> int:
    """Slots of the pool, a whole number of blocks.

    memory_ratio: share of the free memory of every device that holds layers; the scarcest device decides.
    memory_bytes: when given, the size of the whole pool over all devices instead.
    Raises ConfigError when not even two blocks fit.
    """
    if memory_bytes is not None:
        num_slots = memory_bytes // layout.bytes_per_token
    else:
        num_slots = min(int(free_bytes(d) * memory_ratio) // layout.bytes_on(d) for d in layout.devices)
    num_slots -= num_slots % block_size
    if num_slots < 2 * block_size:
        raise ConfigError(
            f"the KV pool would hold {num_slots} tokens, fewer than two blocks of {block_size}\n"
            f"hint: one token takes {layout.bytes_per_token} bytes; give it more memory"
        )
    return num_slots
