"""Open the tiers that a configuration names.

Knows options. Knows nothing of blocks.
"""

from __future__ import annotations

from pathlib import Path

from kvreuse.config import Config
from kvreuse.kv.layout import KVLayout
from kvreuse.kv.tiers.base import StorageTier
from kvreuse.kv.tiers.host import HostTier

__all__ = ["open_tiers"]


def open_tiers(config: Config, *, model_folder: Path, layout: KVLayout) -> list[StorageTier]:
    """The tiers below the device, fastest first. Raises ConfigError when one cannot be used at all."""
    tiers: list[StorageTier] = []
    if config.host_cache_bytes:
        tiers.append(HostTier(max_bytes=config.host_cache_bytes))
    return tiers
