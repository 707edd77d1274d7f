"""What loading and computing cost here, measured as it happens: the break-even between the two.

Knows milliseconds. Knows nothing of what is loaded or computed.
"""

from __future__ import annotations

from collections.abc import Callable

from kvreuse.types import Tier

__all__ = ["Costs"]

_WEIGHT = 0.2  # of the newest measurement
# Until something was measured: a local disk and a local network, taken optimistically so that a first try measures.
_FIRST_LOAD_MS = {Tier.HOST: 0.5, Tier.DISK: 1.0, Tier.REMOTE: 2.0}
_FIRST_PREFILL_MS = 1.0


class Costs:
    """Exponentially weighted means of milliseconds per block loaded and per token computed.

    on_load: is told of every fetch that brought something, from where and how long it took in seconds.
    """

    def __init__(self) -> None:
        self.on_load: Callable[[Tier, float], None] | None = None
        self._load_ms: dict[Tier, float] = dict(_FIRST_LOAD_MS)
        self._prefill_ms = _FIRST_PREFILL_MS
        self._has_prefill = False

    def loaded(self, tier: Tier, *, num_blocks: int, took_ms: float) -> None:
        """A fetch from `tier` brought so many blocks; one that brought none says nothing."""
        if num_blocks:
            self._load_ms[tier] += _WEIGHT * (took_ms / num_blocks - self._load_ms[tier])
            if self.on_load is not None:
                self.on_load(tier, took_ms / 1e3)

    def computed(self, *, num_tokens: int, took_ms: float) -> None:
        """A step of prefill computed so many tokens."""
        if num_tokens:
            weight = _WEIGHT if self._has_prefill else 1.0
            self._prefill_ms += weight * (took_ms / num_tokens - self._prefill_ms)
            self._has_prefill = True

    def load_ms(self, tier: Tier, *, num_blocks: int) -> float:
        """Expected time to load so many blocks."""
        return self._load_ms[tier] * num_blocks

    def prefill_ms(self, *, num_tokens: int) -> float:
        """Expected time to compute so many tokens."""
        return self._prefill_ms * num_tokens
