"""The real model: greedy tokens equal plain generate around every block boundary, whatever ran before."""

import pytest

from tests.engine.harness import demo, generate, plain_demo, running_engine, send

B = 32
LENGTHS = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 7)
NUM_NEW = 8
TEXT = (
    "You answer questions about the tides. The sea rises and falls twice a day because the moon pulls at the "
    "water; the sun pulls too, and where both pull together the tide is high. A fisherman of the old harbour "
    "keeps a book in which every tide of the last forty years is written down in pencil, with the weather, the "
    "catch and the price of bread. When the wind comes from the west the water stays in the bay for an hour "
    "longer, and the boats wait. Nobody in the harbour owns a clock; they look at the stones of the old pier "
    "instead."
)


@pytest.fixture(scope="module")
def shared():
    ids = demo().tokenizer.encode(TEXT)
    assert len(ids) >= max(LENGTHS)
    return list(ids)


@pytest.fixture(scope="module")
def expected(shared):
    return {length: generate(plain_demo(), shared[:length], NUM_NEW) for length in LENGTHS}


def _engine(**options):
    return running_engine(demo(), kv_cache_block_size=B, kv_cache_memory_bytes=2**26, **options)


def test_the_sweep_holds_with_reuse_off_cold_and_warm(shared, expected):
    with _engine() as engine:
        for reuse in (False, True, True):
            for length in LENGTHS:
                assert send(engine, shared[:length], num_new=NUM_NEW, reuse=reuse).tokens() == expected[length]


def test_the_sweep_holds_batched_with_strangers(shared, expected):
    strangers = [shared[B:], shared[::-1], shared[: 2 * B] + shared[:B]]
    with _engine(max_batch_tokens=90) as engine:
        crowd = [send(engine, stranger, num_new=20) for stranger in strangers]
        answers = {length: send(engine, shared[:length], num_new=NUM_NEW) for length in LENGTHS}
        assert {length: answer.tokens() for length, answer in answers.items()} == expected
        for stranger, answer in zip(strangers, crowd, strict=True):
            assert answer.tokens() == generate(plain_demo(), stranger, 20)


def test_the_sweep_holds_after_eviction(shared, expected):
    # Room for little more than one prompt: every stranger pushes the sweep's blocks out.
    with running_engine(demo(), kv_cache_block_size=B, kv_cache_memory_bytes=46080 * 160) as engine:
        for length in LENGTHS:
            assert send(engine, shared[:length], num_new=NUM_NEW).tokens() == expected[length]
            send(engine, shared[::-1][:100], num_new=NUM_NEW).result()
        assert engine.snapshot()["store"].num_evicted_blocks > 0


def test_the_sweep_holds_after_an_abort_in_the_middle(shared, expected):
    with _engine() as engine:
        for length in LENGTHS:
            victim = send(engine, shared[:length], num_new=200)
            victim.events.get(timeout=60)
            engine.abort(victim.request_id)
            victim.result()
            assert send(engine, shared[:length], num_new=NUM_NEW).tokens() == expected[length]


def test_a_stop_string_in_an_earlier_request_changes_nothing(shared, expected):
    with _engine() as engine:
        prompt = shared[: 3 * B + 7]
        whole = send(engine, prompt, num_new=NUM_NEW).result().completions[0].text
        send(engine, prompt, num_new=NUM_NEW, stop=(whole.split()[1],)).result()
        assert send(engine, prompt, num_new=NUM_NEW).tokens() == expected[3 * B + 7]
        assert send(engine, prompt, num_new=NUM_NEW, reuse=False).tokens() == expected[3 * B + 7]


def test_a_hundred_repeats_give_one_answer(shared, expected):
    length = 2 * B + 1
    with _engine() as engine:
        answers = [send(engine, shared[:length], num_new=4) for _ in range(100)]
        assert {tuple(answer.tokens()) for answer in answers} == {tuple(expected[length][:4])}


def test_divergence_at_every_offset_of_a_block_is_a_miss_from_there(shared):
    prompt = shared[: 2 * B + 5]
    with _engine() as engine:
        for offset in range(B):
            # Only the continuations used last are searched for the longest common head: keep this one among them.
            send(engine, prompt, num_new=2).result()
            other = list(prompt)
            other[B + offset] = 11 if other[B + offset] != 11 else 12
            done = send(engine, other, num_new=2).result()
            assert done.facts.cached_tokens == B
            assert (done.facts.miss_reason, done.facts.diverged_at) == ("diverged", B + offset)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_pool_of_half_the_bytes_answers_nearly_the_same(shared, dtype):
    with _engine() as exact, _engine(kv_cache_dtype=dtype) as small:
        assert small.snapshot()["bytes_per_token"] * 2 == exact.snapshot()["bytes_per_token"]
        pairs = [
            [send(engine, shared[:length], num_new=1, logprobs=0).result().completions[0].logprobs[0].logprob
             for _ in range(2)]
            for engine in (exact, small) for length in (40, 103)
        ]  # fmt: skip
    assert pairs[0] == pytest.approx(pairs[2], abs=0.05)
    assert pairs[1] == pytest.approx(pairs[3], abs=0.05)
