"""Shadow audit: a sampled hit is computed again without the cache, and the next-token logits are compared.

Knows logits and sequences. Knows nothing of why an entry could be wrong.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvreuse.engine.sequence import Answers, Sequence
from kvreuse.types import SamplingParams

__all__ = ["Auditor", "tolerance_for"]

log = logging.getLogger("kvreuse.audit")

# Audits that wait or run at the same time: they are paid for by the requests beside them.
MAX_PENDING = 4


@dataclass(kw_only=True)
class Auditor:
    """`rate`: share of hits to audit. `tolerance`: largest absolute difference of a logit that rounding explains.

    start(answers) queues a request of ours; on_mismatch(sequence) gets the recomputed one when the cache was wrong.
    """

    rate: float
    tolerance: float
    start: Callable[[Answers], Sequence]
    on_mismatch: Callable[[Sequence], None]
    num_audits: int = 0
    num_mismatches: int = 0
    # Of the hit that is audited: its logits and its cached tokens.
    _pending: dict[Sequence, tuple[Tensor, int]] = field(default_factory=dict)

    def look(self, sequence: Sequence, logits: Tensor) -> None:
        """The next token of a sequence is about to be chosen from `logits` (vocabulary,)."""
        hit = self._pending.pop(sequence, None)
        if hit is not None:
            self._compare(sequence, logits, *hit)
        elif sequence.lease is not None and self._is_due(sequence, sequence.lease.num_cached_tokens):
            request = replace(
                sequence.request,
                request_id=f"audit-{sequence.request.request_id}",
                sampling=SamplingParams(max_new_tokens=1),
                reuse=False,
            )
            recomputed = self.start(Answers(request, lambda event: None, time.monotonic))
            self._pending[recomputed] = logits.clone(), sequence.lease.num_cached_tokens

    def _is_due(self, sequence: Sequence, num_cached_tokens: int) -> bool:
        """Whether this is the first token of a hit, and one that the rate picks."""
        is_first_of_hit = num_cached_tokens and not (sequence.num_generated_tokens or sequence.index)
        if not is_first_of_hit or random.random() >= self.rate:
            return False
        self._pending = {audit: hit for audit, hit in self._pending.items() if not audit.is_finished}
        return len(self._pending) < MAX_PENDING

    def _compare(self, sequence: Sequence, logits: Tensor, predicted: Tensor, num_cached_tokens: int) -> None:
        self.num_audits += 1
        difference = float((logits - predicted).abs().max())
        if difference <= self.tolerance:
            return
        self.num_mismatches += 1
        log.error(
            "AuditMismatch: request %s, %d cached tokens, last block %s: logits differ by %.3g; what is stored is gone",
            sequence.request.request_id.removeprefix("audit-"),
            num_cached_tokens,
            sequence.hashes()[-1].hex() if sequence.hashes() else "",
            difference,
        )
        self.on_mismatch(sequence)


def tolerance_for(dtype: torch.dtype) -> float:
    """What the order of additions may change in a logit."""
    return 0.01 if dtype == torch.float32 else 1.0
