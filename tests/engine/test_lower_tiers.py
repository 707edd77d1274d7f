"""The engine with a tier below its pool: what was evicted comes back the same, and storage never blocks a step."""

import queue
import random
import threading
import time

import pytest

from kvreuse.kv.tiers.stack import TierStack
from kvreuse.types import MissReason, Tier
from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, generate, plain_tiny, running_engine, send, tiny
from tests.kv.tiers.harness import wait_until_stored

SLOT_BYTES = 384


def _prompt(seed, length):
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def _engine(family="llama", *, num_slots=160, **options):
    options = {"host_cache_bytes": 2**24, "kv_cache_memory_bytes": SLOT_BYTES * num_slots, **options}
    return running_engine(tiny(family), **options)


def _push_out(engine, *, num_requests=8):
    for seed in range(num_requests):
        send(engine, _prompt(1000 + seed, 60), num_new=2).result()
    _settle(engine)


def _settle(engine):
    """Until all that was offered is stored."""
    wait_until_stored(engine._parts.lower.stack)


@pytest.fixture(autouse=True)
def loading_always_pays(monkeypatch):
    forecast = TierStack.forecast
    monkeypatch.setattr(TierStack, "forecast", lambda self, keys: (forecast(self, keys)[0], 0.0))
    monkeypatch.setattr("kvreuse.engine.lower_tiers.MIN_PATIENCE_S", 20.0)


@pytest.mark.parametrize("tier_write", ["through", "on_evict"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_what_was_evicted_comes_back_from_the_host_tier_with_the_same_tokens(family, tier_write):
    prompt = _prompt(1, 5 * BLOCK + 3)
    expected = generate(plain_tiny(family), prompt, 8)
    slot_bytes = tiny_slot_bytes(family)
    with _engine(family, tier_write=tier_write, kv_cache_memory_bytes=slot_bytes * 160) as engine:
        assert send(engine, prompt).tokens() == expected
        _push_out(engine)
        back = send(engine, prompt)
        done = back.result()
        assert list(done.completions[0].token_ids) == expected
        assert (done.facts.cached_tokens, done.facts.tier) == (5 * BLOCK, Tier.HOST)
        assert done.facts.miss_reason is None
        assert send(engine, prompt).result().facts.tier is Tier.DEVICE


def tiny_slot_bytes(family):
    from kvreuse.engine.probe import probe_layout

    return probe_layout(tiny(family).model).bytes_per_token


def test_a_part_that_is_still_resident_is_not_loaded_again():
    prompt = _prompt(2, 6 * BLOCK)
    with _engine(num_slots=400) as engine:
        send(engine, prompt[: 3 * BLOCK + 1], num_new=1).result()
        send(engine, [*prompt, 5], num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        send(engine, prompt[: 2 * BLOCK], reuse=True, num_new=1).result()
        done = send(engine, [*prompt, 5], num_new=1).result()
        assert (done.facts.cached_tokens, done.facts.tier) == (6 * BLOCK, Tier.HOST)
        assert engine.snapshot()["tiers"]["promoted_tokens"] <= 6 * BLOCK + BLOCK


def test_requests_of_one_template_load_it_once_and_wait_together():
    template = _prompt(3, 6 * BLOCK)
    with _engine(num_slots=600, max_batch_size=16) as engine:
        send(engine, [*template, 5], num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        answers = [send(engine, [*template, 10 + i]) for i in range(8)]
        for i, answer in enumerate(answers):
            assert answer.tokens() == generate(plain_tiny("llama"), [*template, 10 + i], 8)
        assert engine.snapshot()["tiers"]["promoted_tokens"] == 6 * BLOCK


def test_storage_that_hangs_delays_only_who_waits_for_it_and_not_for_long(monkeypatch):
    monkeypatch.setattr("kvreuse.engine.lower_tiers.MIN_PATIENCE_S", 0.2)
    prompt, other = _prompt(4, 6 * BLOCK), _prompt(5, 20)
    release = threading.Event()
    with _engine(num_slots=600) as engine:
        send(engine, prompt, num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        [host] = engine._parts.lower.stack._tiers
        read = host._read
        monkeypatch.setattr(host, "_read", lambda *args: (release.wait(30), read(*args))[1])
        stuck = send(engine, prompt)
        assert send(engine, other).tokens() == generate(plain_tiny("llama"), other, 8)
        done = stuck.result()
        assert list(done.completions[0].token_ids) == generate(plain_tiny("llama"), prompt, 8)
        assert done.facts.cached_tokens == 0
        release.set()


def test_a_load_that_would_lose_is_skipped_and_said(monkeypatch):
    forecast = TierStack.forecast
    monkeypatch.setattr(TierStack, "forecast", lambda self, keys: (forecast(self, keys)[0], 1e9))
    prompt = _prompt(6, 5 * BLOCK)
    with _engine(num_slots=600) as engine:
        send(engine, prompt, num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        facts = send(engine, prompt, num_new=1).result().facts
        assert (facts.cached_tokens, facts.miss_reason) == (0, MissReason.SLOWER_THAN_PREFILL)


def test_an_aborted_load_leaves_nothing_and_others_go_on(monkeypatch):
    template = _prompt(7, 6 * BLOCK)
    release = threading.Event()
    with _engine(num_slots=600) as engine:
        send(engine, [*template, 5], num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        [host] = engine._parts.lower.stack._tiers
        read = host._read
        monkeypatch.setattr(host, "_read", lambda *args: (release.wait(30), read(*args))[1])
        first, second = send(engine, [*template, 6]), send(engine, [*template, 7])
        engine.abort(first.request_id)
        first.result()
        release.set()
        assert second.tokens() == generate(plain_tiny("llama"), [*template, 7], 8)


def test_a_purge_reaches_the_tier():
    prompt = _prompt(8, 5 * BLOCK)
    with _engine(num_slots=600) as engine:
        send(engine, prompt, num_new=1).result()
        _settle(engine)
        engine.purge()
        facts = send(engine, prompt, num_new=1).result().facts
        assert (facts.cached_tokens, facts.miss_reason) == (0, MissReason.COLD)


def test_an_entry_that_was_changed_in_the_tier_is_a_miss_and_never_wrong_text():
    prompt = _prompt(9, 5 * BLOCK)
    with _engine(num_slots=600) as engine:
        send(engine, prompt, num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        [host] = engine._parts.lower.stack._tiers
        for key, block in list(host._blocks.items()):
            host._blocks[key] = type(block)(
                key=key, tenant="", token_bytes=bytes(len(block.token_bytes)), payload=block.payload
            )
        done = send(engine, prompt).result()
        assert list(done.completions[0].token_ids) == generate(plain_tiny("llama"), prompt, 8)
        assert done.facts.cached_tokens == 0
        assert host.usage().num_corrupt > 0


def test_random_traffic_over_a_tiny_pool_and_a_tiny_tier_is_always_right():
    rng = random.Random(11)
    templates = [_prompt(50 + i, rng.randrange(2, 7) * BLOCK + 1) for i in range(6)]
    with _engine(num_slots=130, host_cache_bytes=SLOT_BYTES * BLOCK * 20, tier_write="on_evict") as engine:
        seen_tiers = set()
        for _ in range(12):
            prompts = [rng.choice(templates) + _prompt(rng.randrange(999), 3) for _ in range(5)]
            answers = [send(engine, p, num_new=4) for p in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                done = answer.result()
                seen_tiers.add(done.facts.tier)
                assert list(done.completions[0].token_ids) == generate(plain_tiny("llama"), prompt, 4)
            for tier in engine._parts.lower.stack._tiers:
                tier.check_integrity()
        assert Tier.HOST in seen_tiers


def test_a_purge_reaches_what_is_on_its_way_to_the_tier(monkeypatch):
    prompt, release = _prompt(12, 5 * BLOCK), threading.Event()
    with _engine(num_slots=600) as engine:
        [host] = engine._parts.lower.stack._tiers
        write = host._write
        monkeypatch.setattr(host, "_write", lambda *args: (release.wait(30), write(*args))[1])
        send(engine, prompt, num_new=1).result()
        purger = threading.Thread(target=engine.purge)
        purger.start()
        purger.join(0.2)
        release.set()
        purger.join()
        _settle(engine)
        assert host.usage().num_entries == 0
        assert send(engine, prompt, num_new=1).result().facts.cached_tokens == 0


def test_a_load_on_its_way_up_does_not_undo_a_purge(monkeypatch):
    prompt, arrived = _prompt(13, 5 * BLOCK), queue.SimpleQueue()
    with _engine(num_slots=600) as engine:
        send(engine, prompt, num_new=1).result()
        _settle(engine)
        engine._parts.cache.purge()
        monkeypatch.setattr(engine._parts.lower, "post", arrived.put)
        answer = send(engine, prompt, num_new=1)
        job = arrived.get(timeout=30)
        engine.purge()
        engine._inbox.put(job)
        assert answer.result().facts.cached_tokens == 0
        assert engine._parts.lower.num_promoted_tokens == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_a_fault_ends_is_replaced(monkeypatch):
    prompt = _prompt(14, 5 * BLOCK)
    with _engine(num_slots=600) as engine:
        stack = engine._parts.lower.stack
        pack = stack._codec.pack
        monkeypatch.setattr(stack._codec, "pack", lambda *args: 1 / 0)
        send(engine, prompt, num_new=1).result()
        deadline_s = time.monotonic() + 30
        while stack._queued_bytes and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert stack._queued_bytes == 0
        monkeypatch.setattr(stack._codec, "pack", pack)
        send(engine, _prompt(15, 5 * BLOCK), num_new=1).result()
        _settle(engine)
        assert stack.usage()["host"].num_entries == 5
