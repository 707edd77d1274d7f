"""kvreuse: a SageMaker inference container that reuses the KV of shared prompt prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.kv.prefix_store import PrefixStore
    from kvreuse.ops.deploy import KVReuseModel

__version__ = "0.1.0"
__all__ = ["KVReuseModel", "PrefixStore", "__version__"]


def __getattr__(name: str) -> object:
    """`PrefixStore` loads torch and `KVReuseModel` boto3, so they are imported when they are first asked for."""
    if name == "PrefixStore":
        from kvreuse.kv.prefix_store import PrefixStore

        return PrefixStore
    if name == "KVReuseModel":
        from kvreuse.ops.deploy import KVReuseModel

        return KVReuseModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
