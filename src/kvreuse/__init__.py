"""kvreuse: a SageMaker inference container that reuses the KV of shared prompt prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.kv.prefix_store import PrefixStore

__version__ = "0.1.0"
__all__ = ["PrefixStore", "__version__"]


def __getattr__(name: str) -> object:
    """`PrefixStore` loads torch, so it is imported when it is first asked for."""
    if name == "PrefixStore":
        from kvreuse.kv.prefix_store import PrefixStore

        return PrefixStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
