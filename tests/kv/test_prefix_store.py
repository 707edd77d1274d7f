"""The prefix store around real Transformers models: equal text, untouched entries, an exact cap."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from kvreuse import PrefixStore
from kvreuse.cache import store as cache_store
from kvreuse.engine.demo_model import demo_model_path
from kvreuse.errors import ConfigError, RequestError

B = 8
NUM_NEW = 6
Model = Any
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(name: str, **options: Any) -> Model:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    causal = name.removesuffix("Text") + "ForCausalLM"
    return getattr(transformers, causal)(config).eval()


@pytest.fixture(scope="module")
def llama() -> Model:
    return make_model("Llama", **_SMALL)


@pytest.fixture(scope="module")
def gemma() -> Model:
    layer_types = ["sliding_attention", "full_attention"]
    return make_model("Gemma3Text", **_SMALL, head_dim=8, sliding_window=20, layer_types=layer_types)


@pytest.fixture(scope="module")
def qwen_next() -> Model:
    linear = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
    layer_types = ["linear_attention", "full_attention"]
    sizes = {**linear, **experts, **heads, "shared_expert_intermediate_size": 16}
    return make_model("Qwen3Next", **_SMALL, **sizes, layer_types=layer_types)


def make_mamba(name: str, **options: Any) -> Model:
    special = {
        key: _SMALL[key] for key in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    return make_model(name, **special, state_size=8, num_hidden_layers=2, **options)


def prompt(length: int, *, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Model, ids: Tensor, cache: Any = None, *, num_new: int = NUM_NEW) -> Any:
    return model.generate(
        ids, cache=cache, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, return_dict_in_generate=True
    )


def run(model: Model, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True).cache


def answer(model: Model, store: PrefixStore, ids: Tensor) -> tuple[Tensor, int]:
    cache, num_cached = store.match(ids)
    output = generate(model, ids, cache)
    store.put(ids, output.cache)
    store.check_integrity()
    return output.sequences, num_cached


def make_store(**options: Any) -> PrefixStore:
    return PrefixStore(**{"max_bytes": 1 << 24, "block_size": B, **options})


def filled(model: Model, ids: Tensor, **options: Any) -> PrefixStore:
    store = make_store(**options)
    assert store.put(ids, run(model, ids)) == ids.shape[1] // B * B
    return store


def values_in(cache: Any) -> list[Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def block_bytes(model: Model) -> int:
    return filled(model, prompt(B)).stats()["used_bytes"]


# --- equal text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 7])
def test_greedy_tokens_are_those_of_plain_generate_cold_and_warm(llama: Model, length: int) -> None:
    store, ids = make_store(), prompt(length)
    plain = generate(llama, ids).sequences
    cold, none_cached = answer(llama, store, ids)
    warm, num_cached = answer(llama, store, ids)
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)
    assert (none_cached, num_cached) == (0, (length - 1) // B * B)


@pytest.fixture(scope="module")
def demo() -> Model:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 103])
def test_the_demo_model_answers_alike_with_and_without_the_store(demo: Model, length: int) -> None:
    ids = torch.randint(100, 40_000, (1, 103), generator=torch.Generator().manual_seed(7))[:, :length]
    store = PrefixStore(max_bytes=1 << 28)
    plain = generate(demo, ids).sequences
    assert torch.equal(answer(demo, store, ids)[0], plain)
    warm, num_cached = answer(demo, store, ids)
    assert torch.equal(warm, plain)
    assert num_cached == (length - 1) // 32 * 32


@pytest.mark.parametrize("diverges_at", range(2 * B))
def test_a_prompt_that_diverges_inside_a_block_shares_only_the_blocks_before(llama: Model, diverges_at: int) -> None:
    ids = prompt(3 * B)
    store = filled(llama, ids)
    other = ids.clone()
    other[0, diverges_at] = (ids[0, diverges_at] + 1) % 90 + 3
    sequences, num_cached = answer(llama, store, other)
    assert num_cached == diverges_at // B * B
    assert torch.equal(sequences, generate(llama, other).sequences)


def test_a_conversation_goes_on_from_the_answer_that_was_put(llama: Model) -> None:
    store, ids = make_store(), prompt(3 * B - NUM_NEW)
    output = generate(llama, ids)
    assert store.put(output.sequences, output.cache) == 2 * B  # the cache lacks the last of 3 * B tokens
    following = torch.cat([output.sequences, prompt(B, seed=9)], dim=1)
    assert torch.equal(answer(llama, store, following)[0], generate(llama, following).sequences)


@pytest.mark.parametrize("kind", ["llama", "qwen_next"])
def test_inference_mode_of_one_call_does_not_bind_another(kind: str, request: pytest.FixtureRequest) -> None:
    model, ids, other = request.getfixturevalue(kind), prompt(3 * B), prompt(3 * B, seed=2)
    longer = torch.cat([ids, prompt(3)], dim=1)
    with torch.inference_mode():
        store = filled(model, ids)
    assert store.put(other, run(model, other)) == 3 * B
    with torch.inference_mode():
        cache, num_cached = store.match(longer)
    assert num_cached == 3 * B
    assert torch.equal(generate(model, longer, cache).sequences, generate(model, longer).sequences)


def test_what_was_put_with_gradients_is_matched_without(llama: Model) -> None:
    ids, store = prompt(3 * B), make_store()
    store.put(ids, llama(ids, use_cache=True).cache)
    cache, _ = store.match(ids)
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert torch.equal(generate(llama, ids, cache).sequences, generate(llama, ids).sequences)


# --- models whose cache cannot be cut -------------------------------------------------------------------------------


def test_a_window_that_has_dropped_tokens_is_matched_as_a_whole_prompt(gemma: Model) -> None:
    ids = prompt(5 * B)
    store, template = make_store(), ids[:, : 4 * B - 3]
    assert store.put(template, run(gemma, template)) == 4 * B - 3
    sequences, num_cached = answer(gemma, store, ids)
    assert num_cached == 4 * B - 3
    assert torch.equal(sequences, generate(gemma, ids).sequences)
    assert store.match(ids[:, : 4 * B - 4]) == (None, 0)


def test_a_window_that_still_holds_everything_is_matched_in_blocks(gemma: Model) -> None:
    store = filled(gemma, prompt(2 * B + 3))
    ids = torch.cat([prompt(2 * B + 3)[:, : 2 * B + 1], prompt(3 * B, seed=4)], dim=1)
    sequences, num_cached = answer(gemma, store, ids)
    assert num_cached == 2 * B
    assert torch.equal(sequences, generate(gemma, ids).sequences)


def test_a_sliding_window_model_with_a_full_cache_is_matched_in_blocks_beyond_its_window(gemma: Model) -> None:
    store, ids = make_store(), prompt(5 * B)
    for num_cached in (0, 4 * B):
        cache, n = store.match(ids)
        output = generate(gemma, ids, cache or DynamicCache())
        store.put(ids, output.cache)
        assert n == num_cached
        assert torch.equal(output.sequences, generate(gemma, ids).sequences)


def test_the_longer_of_blocks_and_snapshot_is_matched(gemma: Model) -> None:
    store, ids = make_store(), prompt(6 * B)
    for length in (2 * B, 4 * B):
        store.put(ids[:, :length], run(gemma, ids[:, :length]))
    assert [store.match(ids[:, :length])[1] for length in (6 * B, 3 * B)] == [4 * B, 2 * B]


def test_a_conversation_of_an_uncuttable_cache_goes_on_from_the_answer_that_was_put(gemma: Model) -> None:
    store, ids = make_store(), prompt(4 * B)
    output = generate(gemma, ids)
    assert store.put(output.sequences, output.cache) == 4 * B + NUM_NEW - 1
    following = torch.cat([output.sequences, prompt(B, seed=9)], dim=1)
    cache, _ = store.match(following)
    assert torch.equal(generate(gemma, following, cache).sequences, generate(gemma, following).sequences)


def test_putting_only_the_prompt_of_an_uncuttable_cache_stores_nothing_and_says_so(gemma: Model) -> None:
    store, ids = make_store(), prompt(4 * B)
    assert store.put(ids, generate(gemma, ids).cache) == 0
    assert store.stats()["num_entries"] == 0


def test_a_hybrid_model_goes_on_from_the_longest_snapshot(qwen_next: Model) -> None:
    store, ids = make_store(), prompt(4 * B)
    for length in (B, 2 * B + 3, 2 * B + 5, 3 * B):
        assert store.put(ids[:, :length], run(qwen_next, ids[:, :length])) == length
    for length, expected in ((3 * B + 1, 3 * B), (3 * B, 2 * B + 5), (2 * B + 5, 2 * B + 3), (B, 0)):
        cache, num_cached = store.match(ids[:, :length])
        assert num_cached == expected
        plain = generate(qwen_next, ids[:, :length]).sequences
        assert torch.equal(generate(qwen_next, ids[:, :length], cache).sequences, plain)


def test_a_recurrent_model_goes_on_from_a_snapshot_that_two_callers_extend() -> None:
    model = make_mamba("Mamba2", num_heads=4, head_dim=16, n_groups=1)
    store, ids = make_store(), prompt(4 * B)
    store.put(ids[:, : 2 * B], run(model, ids[:, : 2 * B]), length=2 * B)
    plain = generate(model, ids).sequences[:, -NUM_NEW:]
    for _ in range(2):
        cache, num_cached = store.match(ids)
        assert num_cached == 2 * B
        assert torch.equal(generate(model, ids[:, num_cached:], cache).sequences[:, -NUM_NEW:], plain)


def test_a_state_that_needs_single_steps_is_matched_only_one_token_before_the_end() -> None:
    model = make_mamba("Mamba")
    store, ids = make_store(), prompt(2 * B + 2)
    store.put(ids[:, : 2 * B], run(model, ids[:, : 2 * B]), length=2 * B)
    assert store.match(ids) == (None, 0)
    cache, num_cached = store.match(ids[:, : 2 * B + 1])
    plain = generate(model, ids[:, : 2 * B + 1]).sequences[:, -NUM_NEW:]
    assert torch.equal(generate(model, ids[:, num_cached : 2 * B + 1], cache).sequences[:, -NUM_NEW:], plain)


def test_a_recurrent_cache_must_be_put_with_its_length() -> None:
    model, ids = make_mamba("Mamba"), prompt(2 * B)
    with pytest.raises(RequestError, match="how many tokens"):
        make_store().put(ids, run(model, ids))


# --- nobody changes what is stored ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_extending_and_overwriting_a_matched_cache_leaves_the_entry_as_it_was(llama: Model, num_blocks: int) -> None:
    ids = prompt(num_blocks * B + 1)
    store = filled(llama, ids)
    before = values_in(store.match(ids)[0])
    cache, _ = store.match(ids)
    generate(llama, ids, cache)
    for layer in store.match(ids)[0].layers:
        layer.keys.zero_()
        layer.values.fill_(7)
    after = values_in(store.match(ids)[0])
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_changing_the_callers_cache_after_put_leaves_the_entry_as_it_was(llama: Model) -> None:
    ids = prompt(2 * B)
    cache = run(llama, ids)
    store = make_store()
    store.put(ids, cache)
    before = values_in(store.match(ids)[0])
    for layer in cache.layers:
        layer.keys.zero_()
    assert all(torch.equal(old, new) for old, new in zip(before, values_in(store.match(ids)[0]), strict=True))


def test_using_a_snapshot_leaves_it_as_it_was(qwen_next: Model) -> None:
    ids = prompt(4 * B)
    store = make_store()
    store.put(ids[:, : 2 * B], run(qwen_next, ids[:, : 2 * B]))
    plain = generate(qwen_next, ids).sequences
    for _ in range(3):
        assert torch.equal(generate(qwen_next, ids, store.match(ids)[0]).sequences, plain)


def test_concurrent_extenders_do_not_see_each_other(llama: Model) -> None:
    template = prompt(4 * B)
    store = filled(llama, template)
    prompts = [torch.cat([template, prompt(5, seed=seed)], dim=1) for seed in range(20, 28)]
    plain = [generate(llama, ids).sequences for ids in prompts]
    answers: list[Tensor | None] = [None] * len(prompts)
    barrier = threading.Barrier(len(prompts))

    def extend(i: int) -> None:
        barrier.wait()
        cache, num_cached = store.match(prompts[i])
        assert num_cached == 4 * B
        answers[i] = generate(llama, prompts[i], cache).sequences

    in_threads([lambda i=i: extend(i) for i in range(len(prompts))])
    assert all(torch.equal(a, p) for a, p in zip(answers, plain, strict=True) if a is not None)
    assert None not in [None if a is None else 1 for a in answers]


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_stored_once(llama: Model) -> None:
    template = prompt(4 * B)
    store = filled(llama, template)
    for seed in range(20, 25):
        answer(llama, store, torch.cat([template, prompt(B, seed=seed)], dim=1))
    assert store.stats()["used_bytes"] == (4 + 5) * block_bytes(llama)


def test_used_bytes_are_the_bytes_of_keys_and_values(llama: Model) -> None:
    config = llama.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert filled(llama, prompt(3 * B + 2)).stats()["used_bytes"] == 3 * B * per_token


def test_storing_does_not_keep_the_callers_larger_memory_alive(gemma: Model) -> None:
    ids = prompt(6 * B)
    cache = run(gemma, ids)
    store = make_store()
    store.put(ids, cache)
    found, _ = store.match(torch.cat([ids, prompt(1)], dim=1))
    stored = [tensor for layer in found.layers for tensor in (layer.keys, layer.values)]
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize for tensor in stored)


def test_the_same_prompt_is_not_stored_twice(llama: Model, qwen_next: Model) -> None:
    for model in (llama, qwen_next):
        ids = prompt(3 * B)
        store = filled(model, ids)
        before = store.stats()
        assert store.put(ids, run(model, ids)) == 3 * B
        assert store.stats() == before


def test_putting_what_is_stored_evicts_nothing(llama: Model) -> None:
    store = make_store(max_bytes=4 * block_bytes(llama))
    for seed in (1, 2, 1, 2):
        store.put(prompt(2 * B, seed=seed), run(llama, prompt(2 * B, seed=seed)))
    assert (store.stats()["num_evicted"], store.stats()["num_entries"]) == (0, 4)


def test_eviction_drops_only_what_is_needed_and_keeps_the_cap(llama: Model) -> None:
    unit = block_bytes(llama)
    store = make_store(max_bytes=6 * unit + unit // 2, policy="lru")
    for seed in range(3):
        store.put(prompt(2 * B, seed=seed), run(llama, prompt(2 * B, seed=seed)))
    store.put(prompt(B, seed=3), run(llama, prompt(B, seed=3)))
    store.check_integrity()
    assert store.stats()["used_bytes"] == 6 * unit
    lengths = [store.match(torch.cat([prompt(2 * B, seed=seed), prompt(1)], dim=1))[1] for seed in range(3)]
    assert lengths == [B, 2 * B, 2 * B]  # the tail of the oldest went, its head still serves
    assert store.stats()["num_evicted"] == 1


def test_a_hot_prompt_survives_a_flood_of_prompts_used_once(llama: Model) -> None:
    unit = block_bytes(llama)
    store, hot = make_store(max_bytes=20 * unit), prompt(4 * B)
    store.put(hot, run(llama, hot))
    for _ in range(20):
        store.match(hot)
    for seed in range(100, 200):
        store.put(prompt(2 * B, seed=seed), run(llama, prompt(2 * B, seed=seed)))
        assert store.stats()["used_bytes"] <= 20 * unit
    assert store.match(hot)[1] == 3 * B
    store.check_integrity()


def test_a_growing_prompt_does_not_evict_its_own_beginning(llama: Model) -> None:
    store = make_store(max_bytes=3 * block_bytes(llama), policy="lfu")
    popular, growing = prompt(2 * B, seed=1), prompt(2 * B, seed=2)
    for ids in (popular, growing[:, :B]):
        store.put(ids, run(llama, ids))
    for _ in range(5):
        store.match(torch.cat([popular, prompt(1)], dim=1))
    assert store.put(growing, run(llama, growing)) == 2 * B
    store.check_integrity()


def test_of_two_equals_the_deeper_block_is_evicted_first(llama: Model) -> None:
    for deep_seed, flat_seed in ((1, 2), (2, 1)):
        store = make_store(max_bytes=4 * block_bytes(llama), policy="lru", clock=lambda: 0.0)
        deep, flat, new = prompt(3 * B, seed=deep_seed), prompt(B, seed=flat_seed), prompt(B, seed=3)
        for ids in (deep, flat, new):
            store.put(ids, run(llama, ids))
        assert [store.match(torch.cat([ids, prompt(1)], dim=1))[1] for ids in (deep, flat)] == [2 * B, B]


def test_a_prompt_larger_than_the_cap_keeps_its_leading_blocks(llama: Model) -> None:
    store, ids = make_store(max_bytes=2 * block_bytes(llama)), prompt(5 * B)
    assert store.put(ids, run(llama, ids)) == 2 * B
    assert torch.equal(answer(llama, store, ids)[0], generate(llama, ids).sequences)


def test_a_snapshot_larger_than_the_cap_evicts_nothing(qwen_next: Model) -> None:
    small, large = prompt(B), prompt(9 * B, seed=2)
    bytes_of_small = filled(qwen_next, small).stats()["used_bytes"]
    store = make_store(max_bytes=bytes_of_small)
    store.put(small, run(qwen_next, small))
    assert store.put(large, run(qwen_next, large)) == 0
    assert store.stats()["num_entries"] == 1


@pytest.mark.parametrize("policy", ["lru", "lfu", "size_weighted_lru"])
def test_answers_stay_equal_while_everything_is_evicted_all_the_time(llama: Model, policy: str) -> None:
    store = make_store(max_bytes=3 * block_bytes(llama), policy=policy)
    for seed in (0, 1, 2, 0, 1, 2):
        ids = torch.cat([prompt(B + 3, seed=seed % 2), prompt(2 * B, seed=seed)], dim=1)
        assert torch.equal(answer(llama, store, ids)[0], generate(llama, ids).sequences)


def test_threads_that_put_match_and_clear_under_pressure_leave_the_books_balanced(llama: Model) -> None:
    prompts = [torch.cat([prompt(2 * B, seed=i % 3), prompt(2 * B, seed=i)], dim=1) for i in range(12)]
    caches = [run(llama, ids) for ids in prompts]
    store = make_store(max_bytes=10 * block_bytes(llama))
    over_the_cap: list[int] = []

    def work(first: int) -> None:
        for i in range(first, first + 120):
            ids, cache = prompts[i * 7 % 12], caches[i * 7 % 12]
            store.put(ids, cache, tenant=str(i % 2))
            found, n = store.match(ids, tenant=str(i % 2))
            if found is not None:
                pairs = zip(values_in(found), values_in(cache), strict=True)
                assert all(torch.equal(mine, theirs[:, :, :n]) for mine, theirs in pairs)
            if store.stats()["used_bytes"] > store.stats()["max_bytes"]:
                over_the_cap.append(i)
            if i % 40 == 0:
                store.clear(tenant="1")

    in_threads([lambda first=first: work(first) for first in range(6)])
    store.check_integrity()
    assert over_the_cap == []
    store.clear()
    assert (store.stats()["used_bytes"], store.stats()["num_entries"]) == (0, 0)


def test_what_is_matched_stays_right_while_other_threads_compact_and_write(llama: Model) -> None:
    prompts = [torch.cat([prompt(2 * B, seed=i % 3), prompt((1 + i % 5) * B, seed=i)], dim=1) for i in range(14)]
    caches = [run(llama, ids) for ids in prompts]
    store = filled(llama, prompts[0], max_bytes=24 * block_bytes(llama), policy="lru")
    is_done, num_hits = threading.Event(), [0]

    def compact() -> None:
        while not is_done.is_set():
            store._index.compact()

    def work(first: int) -> None:
        for i in range(first, first + 300):
            ids, cache = prompts[i * 5 % 14], caches[i * 5 % 14]
            store.put(ids, cache)
            found, n = store.match(ids)
            if found is not None:
                num_hits[0] += 1
                pairs = zip(values_in(found), values_in(cache), strict=True)
                assert all(torch.equal(mine, theirs[:, :, :n]) for mine, theirs in pairs)

    def work_all() -> None:
        try:
            in_threads([lambda first=first: work(first) for first in range(4)])
        finally:
            is_done.set()

    in_threads([compact, work_all])
    store.check_integrity()
    assert num_hits[0] > 0
    assert store._index.usage().num_moves > 0


@pytest.mark.parametrize("num_tokens", [2 * B, 4 * B])
def test_blocks_and_snapshots_of_a_window_model_share_one_cap(gemma: Model, num_tokens: int) -> None:
    store = make_store(max_bytes=1 << 15)
    lengths = set()
    for seed in range(12):
        for length in (num_tokens, 6 * B - num_tokens):
            ids = prompt(length, seed=seed)
            lengths.add(store.put(ids, run(gemma, ids)))
            assert store.stats()["used_bytes"] <= store.stats()["max_bytes"] == 1 << 15
    assert lengths == {2 * B, 4 * B}
    assert store.stats()["num_evicted"] > 0


@pytest.mark.parametrize("is_matched", [True, False])
def test_the_least_recently_used_snapshot_is_evicted_first(qwen_next: Model, is_matched: bool) -> None:
    first, second, third = (prompt(2 * B, seed=seed) for seed in (1, 2, 3))
    size = filled(qwen_next, first).stats()["used_bytes"]
    store = make_store(max_bytes=2 * size + size // 2)
    longer = [torch.cat([ids, prompt(1)], dim=1) for ids in (first, second, third)]
    for ids in (first, second):
        store.put(ids, run(qwen_next, ids))
    if is_matched:
        store.match(longer[0])
    else:
        store.put(first, run(qwen_next, first))
    store.put(third, run(qwen_next, third))
    assert [store.match(ids)[1] for ids in longer] == [2 * B, 0, 2 * B]
    assert (store.stats()["num_evicted"], store.stats()["used_bytes"]) == (1, 2 * size)


def test_threads_that_put_match_and_clear_snapshots_keep_the_cap(qwen_next: Model) -> None:
    prompts = [prompt(2 * B, seed=seed) for seed in range(6)]
    caches = [run(qwen_next, ids) for ids in prompts]
    longer = [torch.cat([ids, prompt(1)], dim=1) for ids in prompts]
    store = make_store(max_bytes=4 * filled(qwen_next, prompts[0]).stats()["used_bytes"])

    def work(first: int) -> None:
        for i in range(first, first + 40):
            store.put(prompts[i % 6], caches[i % 6])
            found, n = store.match(longer[i % 6])
            assert (found is None) == (n == 0)
            if found is not None:
                assert torch.equal(found.layers[1].keys, caches[i % 6].layers[1].keys)
            assert store.stats()["used_bytes"] <= store.stats()["max_bytes"]
            if i % 20 == 0:
                store.clear()

    in_threads([lambda first=first: work(first) for first in range(4)])
    store.clear()
    assert (store.stats()["used_bytes"], store.stats()["num_entries"]) == (0, 0)


def in_threads(tasks: list[Callable[[], None]]) -> None:
    """Run all at once; an error in one is raised here."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- scope, time, collisions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [{"tenant": "b"}, {}])
def test_another_scope_never_matches(llama: Model, scope: dict[str, str]) -> None:
    ids = prompt(2 * B)
    store = make_store()
    store.put(ids, run(llama, ids), tenant="a")
    assert store.match(ids, **scope) == (None, 0)
    assert store.match(ids, tenant="a")[1] == B


@pytest.mark.parametrize("kind", ["llama", "qwen_next"])
def test_clear_forgets_one_tenant(kind: str, request: pytest.FixtureRequest) -> None:
    model, ids, store = request.getfixturevalue(kind), prompt(2 * B), make_store()
    longer = torch.cat([ids, prompt(1)], dim=1)
    for tenant in ("a", "b"):
        store.put(ids, run(model, ids), tenant=tenant)
    store.clear(tenant="a")
    store.check_integrity()
    assert store.match(longer, tenant="a") == (None, 0)
    assert store.match(longer, tenant="b")[1] == 2 * B


@pytest.mark.parametrize("kind", ["llama", "qwen_next"])
def test_an_entry_expires_after_its_last_use_and_gives_its_memory_back(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model, now = request.getfixturevalue(kind), [0.0]
    ids = prompt(2 * B)
    longer = torch.cat([ids, prompt(1)], dim=1)
    store = filled(model, ids, ttl_s=10.0, clock=lambda: now[0])
    used = store.stats()["used_bytes"]
    now[0] = 9.0
    assert store.match(longer)[1] == 2 * B
    now[0] = 19.0
    assert store.match(longer)[1] == 2 * B
    now[0] = 29.1
    assert store.match(longer) == (None, 0)
    assert (store.stats()["used_bytes"], store.stats()["num_entries"]) == (0, 0)
    assert store.put(ids, run(model, ids)) == 2 * B
    assert store.match(longer)[1] == 2 * B
    assert store.stats()["num_expired"] == store.stats()["num_entries"]
    assert store.stats()["used_bytes"] == used
    store.check_integrity()


def test_expired_entries_are_evicted_before_live_ones(llama: Model) -> None:
    now = [0.0]
    store = make_store(max_bytes=2 * block_bytes(llama), policy="lfu", ttl_s=10.0, clock=lambda: now[0])
    old, young, new = (prompt(B, seed=seed) for seed in (1, 2, 3))
    store.put(old, run(llama, old))
    for _ in range(5):
        store.match(torch.cat([old, prompt(1)], dim=1))
    now[0] = 11.0
    store.put(young, run(llama, young))
    store.put(new, run(llama, new))
    assert store.match(torch.cat([young, prompt(1)], dim=1))[1] == B
    assert (store.stats()["num_expired"], store.stats()["num_evicted"]) == (1, 0)


def test_a_hash_collision_is_a_counted_miss(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def colliding(hashes: list[bytes], packed: bytes, *, scope: object, block_size: int) -> None:
        start = len(hashes)
        hashes += [bytes([start + i]) * 16 for i in range(len(packed) // (4 * block_size))]

    monkeypatch.setattr(cache_store, "extend_hashes", colliding)
    store = filled(llama, prompt(2 * B))
    stranger = prompt(2 * B + 1, seed=5)
    assert store.match(stranger) == (None, 0)
    assert store.stats()["num_collisions"] == 1
    assert store.put(stranger, run(llama, stranger)) == 0
    store.check_integrity()


def test_hits_misses_and_tokens_are_counted(llama: Model) -> None:
    store, ids = make_store(), prompt(2 * B + 4)
    answer(llama, store, ids)
    answer(llama, store, ids)
    stats = store.stats()
    assert (stats["hits"], stats["misses"]) == (1, 1)
    assert (stats["cached_tokens"], stats["prompt_tokens"]) == (2 * B, 2 * (2 * B + 4))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_caches_that_cannot_be_stored_are_refused_by_name(llama: Model) -> None:
    encoder_decoder = EncoderDecoderCache(DynamicCache(), DynamicCache())
    static = StaticCache(config=llama.config, max_cache_len=64)
    for cache in (encoder_decoder, static):
        with pytest.raises(ConfigError, match=type(cache).__name__):
            make_store().put(prompt(2 * B), cache)


def test_a_batch_is_refused(llama: Model) -> None:
    ids = prompt(2 * B).repeat(2, 1)
    with pytest.raises(RequestError, match="one sequence"):
        make_store().put(ids[0], run(llama, ids))
    with pytest.raises(RequestError, match="one prompt"):
        make_store().match(ids)


def test_the_cache_of_another_model_is_refused(llama: Model) -> None:
    store = filled(llama, prompt(2 * B))
    other = make_model("Llama", **{**_SMALL, "num_hidden_layers": 3})
    with pytest.raises(RequestError, match="one store per model"):
        store.put(prompt(2 * B), run(other, prompt(2 * B)))


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0},
        {"memory_ratio": 1.5},
        {"max_bytes": 1, "block_size": 0},
        {"max_bytes": 1, "ttl_s": 0},
        {"max_bytes": 1, "policy": "mru"},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefixStore(**options)


def test_the_cap_can_be_a_share_of_the_free_memory(llama: Model) -> None:
    caps = [filled(llama, prompt(B), max_bytes=None, memory_ratio=r).stats()["max_bytes"] for r in (0.0001, 0.001)]
    assert 0 < caps[0] < caps[1]


# --- the documented handler -----------------------------------------------------------------------------------------


def test_the_documented_handler_answers_alike_and_reuses_the_template() -> None:
    text = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    handler: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], handler)
    context = handler["model_fn"](demo_model_path())
    template = "You are a careful assistant. Answer in one short sentence and never guess. " * 4
    first = handler["predict_fn"]({"inputs": template + "What is a cat?"}, context)
    second = handler["predict_fn"]({"inputs": template + "What is a dog?"}, context)
    fresh = handler["predict_fn"]({"inputs": template + "What is a dog?"}, (*context[:2], PrefixStore()))
    assert first["cached_tokens"] == fresh["cached_tokens"] == 0
    assert second["cached_tokens"] >= 32
    assert second["generated_text"] == fresh["generated_text"]
