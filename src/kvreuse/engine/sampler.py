"""From logits to the next token of every sequence of a batch.

Knows logits and sampling parameters. Knows nothing of text, requests or the KV store.

Order of a row: logit bias, repetition penalty, presence and frequency penalty, mask, then (when not greedy)
temperature, top_k, top_p, min_p, typical_p with the meanings of Transformers' logits processors. A row is computed
from its own values only, so its tokens do not depend on who else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvreuse.types import SamplingParams, TokenLogprob

__all__ = ["SamplingState", "sample"]

# Candidates looked at first when no top_k bounds them; enough for almost every top_p and min_p.
NUM_PROBED = 1024
# On a CPU: larger intermediate results fall out of its caches, which makes a row three times slower.
ROWS_AT_ONCE = 8
# Below it the best token takes everything, and dividing by much less would overflow.
MIN_TEMPERATURE = 1e-5


class SamplingState:
    """What one answer's sampling remembers between steps.

    prompt_ids: for the repetition penalty.
    index: which of the `n` answers; each draws its own numbers from one seed.
    mask: called before each draw; gives the allowed tokens as bool [vocab] with at least one True, or None for all.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        index: int = 0,
        mask: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self.params = params
        self.mask = mask
        self.is_greedy = params.temperature <= 0
        self.has_penalties = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.is_plain = not (self.has_penalties or params.logit_bias or mask)
        # One number per token is drawn, so that neither the batch nor the device changes what a seed gives.
        self._random = random.Random() if params.seed is None else random.Random(f"{params.seed}/{index}")
        # How often each token of prompt or answer is in the answer.
        self.counts = dict.fromkeys(prompt_ids, 0) if self.has_penalties else {}

    def draw(self) -> float:
        """The next random number, in [0, 1)."""
        return self._random.random()

    def record(self, token_id: int) -> None:
        """Remember a generated token for the penalties. `sample` does it for the tokens that it returns."""
        if self.has_penalties:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1


def sample(logits: Tensor, rows: Sequence[SamplingState]) -> tuple[list[int], list[TokenLogprob | None]]:
    """Choose a token per row and record it in the row's state.

    logits: float32 [len(rows), vocab], left unchanged. Logprobs are those of the model's own distribution, before
    any bias, penalty, temperature or filter.
    """
    if not rows:
        return [], []
    step = ROWS_AT_ONCE if logits.device.type == "cpu" else len(rows)
    token_ids = [
        token_id
        for start in range(0, len(rows), step)
        for token_id in _choose(logits[start : start + step], rows[start : start + step])
    ]
    for row, token_id in zip(rows, token_ids, strict=True):
        row.record(token_id)
    return token_ids, [_logprob(*item) for item in zip(logits, rows, token_ids, strict=True)]


def _choose(logits: Tensor, rows: Sequence[SamplingState]) -> list[int]:
    scores = logits if all(row.is_plain for row in rows) else _adjusted(logits, rows)
    chosen = scores.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    filtered = [i for i in drawn if _has_filter(rows[i].params)]
    unfiltered = [i for i in drawn if i not in filtered]
    for indices, draw in ((unfiltered, _draw), (filtered, _draw_filtered)):
        if indices:
            chosen[indices] = draw(scores[indices], [rows[i] for i in indices])
    token_ids: list[int] = chosen.tolist()
    return token_ids


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def _adjusted(logits: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """A copy of the logits [n, vocab] with bias, penalties and mask applied."""
    adjusted = logits.clone()
    for scores, row in zip(adjusted, rows, strict=True):
        bias = {i: value for i, value in row.params.logit_bias.items() if 0 <= i < len(scores)}
        if bias:
            scores[list(bias)] += scores.new_tensor(list(bias.values()))
        if row.has_penalties:
            _penalise(scores, row)
        allowed = row.mask() if row.mask is not None else None
        if allowed is not None:
            scores.masked_fill_(~allowed.to(scores.device), -torch.inf)
    return adjusted


def _penalise(scores: Tensor, row: SamplingState) -> None:
    params = row.params
    ids = torch.tensor(list(row.counts), dtype=torch.long, device=scores.device)
    counts = scores.new_tensor(list(row.counts.values()))
    # Ids beyond the model's vocabulary can be in the prompt but are never generated.
    is_known = ids < len(scores)
    ids, counts = ids[is_known], counts[is_known]
    seen = scores[ids]
    seen = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    scores[ids] = seen - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


def _draw(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """Draw from the whole vocabulary. scores: [n, vocab]; returns token ids [n]."""
    return _pick(_weights(_tempered(scores, rows)), rows)


def _draw_filtered(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """Draw from what the filters leave. scores: [n, vocab]; returns token ids [n].

    All filters but typical_p keep a run of the best candidates, so only as many are sorted as it takes to see its end.
    """
    tempered = _tempered(scores, rows)
    needs_total = any(row.params.top_p < 1 and row.params.top_k == 0 for row in rows)
    total = _weights(tempered).sum(-1, keepdim=True, dtype=torch.float64) if needs_total else tempered.new_zeros(1, 1)
    num_candidates = max(_num_probed(row.params, vocab=tempered.shape[-1]) for row in rows)
    while True:
        values, ids = _best(tempered, min(num_candidates, tempered.shape[-1]))
        keep, is_open = _filter_best(values, total, rows)
        if not is_open or values.shape == tempered.shape:
            break
        num_candidates *= 8
    weights = _filter_typical(_weights(values).double() * keep, rows)
    return ids.gather(-1, _pick(weights, rows)[:, None])[:, 0]


def _num_probed(params: SamplingParams, *, vocab: int) -> int:
    """How many candidates probably show where the filters end. One more than they keep is needed."""
    if params.top_k > 0:
        return params.top_k + 1
    return NUM_PROBED if params.top_p < 1 or params.min_p > 0 else vocab


def _tempered(scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    return scores / _column(scores, [max(row.params.temperature, MIN_TEMPERATURE) for row in rows])


def _weights(values: Tensor) -> Tensor:
    """Probabilities up to a factor; the best is 1. Whoever adds them up does so in float64."""
    return (values - values.amax(-1, keepdim=True)).exp_()


def _best(scores: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """(values, ids), both [..., num_candidates], best first and among equals the lower id first."""
    if num_candidates == scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk orders equals as it likes; a draw must not depend on that.
    ids = scores.topk(num_candidates, dim=-1).indices.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _filter_best(values: Tensor, total: Tensor, rows: Sequence[SamplingState]) -> tuple[Tensor, bool]:
    """(kept: bool [n, candidates], whether more candidates are needed to be sure) after top_k, top_p and min_p.

    values: best first. total: [n, 1], the weight of the whole vocabulary, read for top_p without top_k.
    """
    weights = _weights(values).double()
    top_k = torch.tensor([[row.params.top_k] for row in rows], device=values.device)
    kth = values.gather(-1, (top_k - 1).clamp(min=0, max=values.shape[-1] - 1))
    # Everything equal to the k-th best is in.
    keep = (weights > 0) & ((values >= kth) | (top_k == 0))
    is_last = values == values[:, -1:]
    is_open = (keep & is_last & (top_k > 0)).any()
    total = torch.where(top_k > 0, (weights * keep).sum(-1, keepdim=True), total)
    top_p = _column(weights, [row.params.top_p for row in rows])
    weight_before = weights.cumsum(-1) - weights
    keep &= (weight_before < top_p * total) | (top_p >= 1)
    keep &= weights >= _column(weights, [row.params.min_p for row in rows])
    keep[:, 0] = True
    return keep, bool(is_open | (keep & is_last).any())


def _filter_typical(weights: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """Zero the weights [n, candidates] outside the typical set (Meister et al. 2022, arXiv:2202.00666)."""
    if all(row.params.typical_p >= 1 for row in rows):
        return weights
    mass = _column(weights, [row.params.typical_p for row in rows])
    probs = weights / weights.sum(-1, keepdim=True)
    entropy = -torch.xlogy(probs, probs).sum(-1, keepdim=True)
    distance = (-probs.log() - entropy).abs()
    sorted_distance, order = distance.sort(dim=-1, stable=True)
    num_below = (probs.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    limit = sorted_distance.gather(-1, num_below.clamp(max=weights.shape[-1] - 1))
    return weights * ((distance <= limit) | (mass >= 1))


def _pick(weights: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """Positions [n] drawn in proportion to weights [n, candidates], by inverting the cumulated weights."""
    cumulated = weights.double().cumsum(-1)
    total = cumulated[:, -1:]
    # Strictly below the total, so that a position of weight 0 is never met.
    target = torch.minimum(_column(cumulated, [row.draw() for row in rows]) * total, total * (1 - 2**-52))
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def _logprob(logits: Tensor, row: SamplingState, token_id: int) -> TokenLogprob | None:
    """logits: [vocab]. Of one row at a time: which of equal tokens are reported depends on how many are wanted."""
    if row.params.logprobs is None:
        return None
    logprobs = logits.log_softmax(-1)
    values, ids = _best(logprobs, min(row.params.logprobs, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), top=top)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    """[n, 1] in the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
