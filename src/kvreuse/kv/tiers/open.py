"""Open the tiers that a configuration names.

Knows options. Knows nothing of blocks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import urlsplit

from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.kv.identity import checkpoint_folder, kv_namespace
from kvreuse.kv.layout import KVLayout
from kvreuse.kv.tiers.base import StorageTier
from kvreuse.kv.tiers.disk import DiskTier
from kvreuse.kv.tiers.host import HostTier

__all__ = ["open_tiers"]

log = logging.getLogger("kvreuse.tiers")


def open_tiers(config: Config, *, model_folder: Path, layout: KVLayout) -> list[StorageTier]:
    """The tiers below the device, fastest first; model_folder may be a hub id. Storage that fails now is tried again
    later. Raises ConfigError when one cannot be used at all."""
    tiers: list[StorageTier] = []
    if config.host_cache_bytes:
        is_cuda = any(device.type == "cuda" for device in layout.devices)
        tiers.append(HostTier(max_bytes=config.host_cache_bytes, is_pinned=is_cuda))
    if config.disk_cache_dir is None and config.remote_cache_url is None:
        return tiers
    namespace = kv_namespace(config, folder=checkpoint_folder(model_folder), layout=layout)
    if config.disk_cache_dir is not None:
        log.info("disk tier: %s %d bytes", config.disk_cache_dir, config.disk_cache_bytes)
        tiers.append(DiskTier(Path(config.disk_cache_dir), namespace=namespace, max_bytes=config.disk_cache_bytes))
    if config.remote_cache_url is not None:
        tiers.append(_remote(config, config.remote_cache_url, namespace))
        log.info("remote tier: %s %d bytes", _masked(config.remote_cache_url), config.remote_cache_bytes)
    if config.cross_model_sharing:
        log.info(
            "stored KV %s is shared with models that have the same weights up to the last layer's keys and values; "
            "others do not share: their keys and values are different numbers, not merely different shapes",
            namespace,
        )
    return tiers


def _masked(url: str) -> str:
    """A URL without its password and options, for logs."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{parts.path}"


def _remote(config: Config, url: str, namespace: str) -> StorageTier:
    scheme, _, rest = url.partition("://")
    max_bytes, timeout_s = config.remote_cache_bytes, config.remote_timeout_ms / 1e3
    bucket, _, prefix = rest.partition("/")
    if scheme == "s3" and bucket:
        from kvreuse.kv.tiers.s3 import S3Tier

        return S3Tier(bucket, prefix=prefix, namespace=namespace, max_bytes=max_bytes, timeout_s=timeout_s)
    try:
        from kvreuse.kv.tiers.remote import SCHEMES, RedisTier

        if scheme in SCHEMES and rest:
            return RedisTier(url, namespace=namespace, max_bytes=max_bytes, timeout_s=timeout_s)
    except ImportError:
        raise ConfigError("option.remote_cache_url needs Valkey's client\nhint: pip install kvreuse[remote]") from None
    except ValueError:
        pass  # its text may hold the password
    raise ConfigError(
        "option.remote_cache_url cannot be used, allowed is a valkey://, redis://, rediss:// or s3:// URL with a host "
        "or bucket"
    )
