"""Every supported family: the engine's greedy tokens equal plain generate, cold, warm, batched, evicted, reuse off."""

import random

import pytest

from tests.engine.families import FAMILIES, VOCAB
from tests.engine.harness import BLOCK, generate, plain_tiny, running_engine, send, tiny

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7)
NUM_NEW = 6


def _prompt(seed, length):
    return random.Random(seed).choices(range(2, VOCAB), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_plain_generate(family):
    shared = _prompt(0, max(LENGTHS))
    prompts = [shared[:length] for length in LENGTHS]
    strangers = [shared[: 2 * BLOCK] + _prompt(seed, 5 + seed) for seed in (1, 2, 3)]
    expected = [generate(plain_tiny(family), p, NUM_NEW) for p in (*prompts, *strangers)]
    # A small step budget cuts the prompts in several chunks.
    with running_engine(tiny(family), max_batch_size=8, max_batch_tokens=13) as engine:
        for reuse in (False, True, True):
            one_by_one = [send(engine, p, num_new=NUM_NEW, reuse=reuse).tokens() for p in (*prompts, *strangers)]
            assert one_by_one == expected
        batched = [send(engine, p, num_new=NUM_NEW) for p in (*prompts, *strangers)]
        assert [answer.tokens() for answer in batched] == expected
        engine.purge()
        again = [send(engine, p, num_new=NUM_NEW) for p in (*strangers, *prompts)]
        assert [answer.tokens() for answer in again] == [*expected[len(prompts) :], *expected[: len(prompts)]]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_the_reference_backend_serves_the_same_tokens(family):
    prompt = _prompt(5, 3 * BLOCK + 7)
    with running_engine(tiny(family), attention_backend="reference") as engine:
        for _ in range(2):
            assert send(engine, prompt, num_new=NUM_NEW).tokens() == generate(plain_tiny(family), prompt, NUM_NEW)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_a_long_answer_in_a_crowd_equals_the_answer_alone(family):
    shared = _prompt(9, 5 * BLOCK)
    prompts = [shared + _prompt(seed, seed % 11) for seed in range(10, 22)]
    with running_engine(tiny(family), max_batch_size=12, max_batch_tokens=40) as engine:
        answers = [send(engine, p, num_new=40) for p in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens() == generate(plain_tiny(family), prompt, 40)
