"""Cache facts as numbers, as a body and as a header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.api.facts import custom_attributes, kv_cache, total, usage
from kvreuse.errors import InternalError
from kvreuse.types import CacheFacts, Completion, Done, FinishReason, MissReason, Tier


def done(facts: CacheFacts, *lengths: int) -> Done:
    completions = tuple(
        Completion(index=i, text="", token_ids=(1,) * length, finish_reason=FinishReason.EOS)
        for i, length in enumerate(lengths)
    )
    return Done(completions=completions, facts=facts)


def test_usage_counts_the_prompt_once_and_every_answer() -> None:
    counted = usage([done(CacheFacts(prompt_tokens=10, cached_tokens=4), 3, 5)])
    assert counted == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_several_prompts_are_summed_and_the_slowest_wins() -> None:
    fast = CacheFacts(prompt_tokens=10, cached_tokens=4, tier=Tier.DEVICE, ttft_ms=1)
    slow = CacheFacts(prompt_tokens=20, cached_tokens=8, tier=Tier.DISK, ttft_ms=9)
    cold = CacheFacts(prompt_tokens=1, miss_reason=MissReason.COLD, ttft_ms=5)
    facts = total([done(fast), done(slow), InternalError("x"), done(cold)])
    assert facts == CacheFacts(prompt_tokens=31, cached_tokens=12, tier=Tier.DISK, ttft_ms=9)


@pytest.mark.parametrize("results", [[], [InternalError("x")]])
def test_no_answer_is_zero_tokens_not_null(results: list[InternalError]) -> None:
    assert usage(results)["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_header_leaves_out_what_does_not_apply() -> None:
    facts = CacheFacts(prompt_tokens=3, miss_reason=MissReason.DIVERGED, diverged_at=2)
    assert custom_attributes("abc", facts) == (
        "kvreuse=1; request_id=abc; cached_tokens=0; prompt_tokens=3; tier=none; miss_reason=diverged; diverged_at=2; "
        "lookup_ms=0.0; queue_ms=0.0; ttft_ms=0.0"
    )
    assert kv_cache(CacheFacts(prompt_tokens=3))["miss_reason"] is None


@given(request_id=st.text(), tokens=st.integers(0, 10**18), time_ms=st.floats(0, 1e9))
def test_the_header_is_short_visible_ascii(request_id: str, tokens: int, time_ms: float) -> None:
    text = custom_attributes(request_id, CacheFacts(prompt_tokens=tokens, cached_tokens=tokens, ttft_ms=time_ms))
    assert len(text) <= 1024
    assert all(" " <= character <= "~" for character in text)
