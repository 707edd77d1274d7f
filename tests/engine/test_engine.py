"""The engine's promises around a tiny model: single flight, faults, aborts, pressure, truth about the cache."""

import random
import threading

import pytest

from kvreuse.errors import EngineDeadError, InternalError, OverloadedError, RequestError
from kvreuse.types import Delta, Done, Failed, FinishReason, MissReason, Request, SamplingParams, Tier
from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, check_at_rest, generate, plain_tiny, running_engine, send, tiny


def _prompt(seed, length):
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def _llama(**options):
    return running_engine(tiny("llama"), **options)


def _slots(num_tokens):
    """Bytes of a pool for so many tokens of the tiny llama."""
    return num_tokens * 3 * 2 * (8 + 8) * 4


class _Gate:
    """Holds the engine's thread before each forward until it is opened."""

    def __init__(self, engine, monkeypatch):
        self.event = threading.Event()
        runner = engine._parts.runner
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda batch: (self.event.wait(30), run(batch))[1])


def test_cold_requests_of_one_template_do_one_prefill_of_it(monkeypatch):
    template = _prompt(1, 12 * BLOCK)
    with _llama(max_batch_size=100, max_batch_tokens=128) as engine:
        gate = _Gate(engine, monkeypatch)
        answers = [send(engine, template + _prompt(100 + i, 5), num_new=3) for i in range(100)]
        gate.event.set()
        for i, answer in enumerate(answers):
            assert answer.tokens() == generate(plain_tiny("llama"), template + _prompt(100 + i, 5), 3)
        assert engine.snapshot()["prefilled_tokens"] == 12 * BLOCK + 100 * 5


def test_variants_in_flight_share_the_template_in_memory():
    template, own, new = _prompt(1, 40 * BLOCK), 4, 4
    with _llama(max_batch_size=100, max_batch_tokens=1000) as engine:
        answers = [send(engine, template + _prompt(100 + i, own), num_new=new) for i in range(100)]
        for answer in answers:
            answer.result()
        assert engine.snapshot()["store"].max_used_slots <= 1.1 * (len(template) + 100 * (own + new))


def test_facts_tell_how_much_was_cached_and_why_not_more():
    prompt = _prompt(2, 3 * BLOCK + 2)
    with _llama() as engine:
        cold = send(engine, prompt).result().facts
        assert (cold.cached_tokens, cold.tier, cold.miss_reason) == (0, Tier.NONE, MissReason.COLD)
        warm = send(engine, prompt).result().facts
        assert (warm.cached_tokens, warm.tier, warm.miss_reason) == (3 * BLOCK, Tier.DEVICE, None)
        assert warm.prompt_tokens == len(prompt)
        assert warm.ttft_ms > 0
        off = send(engine, prompt, reuse=False).result().facts
        assert (off.cached_tokens, off.miss_reason) == (0, MissReason.DISABLED)
        short = send(engine, prompt[:BLOCK]).result().facts
        assert (short.cached_tokens, short.miss_reason) == (0, MissReason.BELOW_MIN)


def test_every_answer_of_n_equals_the_single_one_and_the_prompt_is_computed_once():
    prompt = _prompt(3, 4 * BLOCK + 1)
    with _llama() as engine:
        done = send(engine, prompt, n=3).result()
        assert [c.index for c in done.completions] == [0, 1, 2]
        assert {c.token_ids for c in done.completions} == {tuple(generate(plain_tiny("llama"), prompt, 8))}
        assert engine.snapshot()["prefilled_tokens"] <= len(prompt) + 2 * 2
        assert done.facts.cached_tokens == 0


def test_deltas_join_to_the_completion():
    with _llama() as engine:
        answer = send(engine, _prompt(4, 20), num_new=10)
        deltas = []
        while isinstance(event := answer.events.get(timeout=60), Delta):
            deltas.append(event)
        assert isinstance(event, Done)
        assert "".join(d.text for d in deltas) == event.completions[0].text
        assert [t for d in deltas for t in d.token_ids] == list(event.completions[0].token_ids)
        assert [d.finish_reason for d in deltas] == [None] * 9 + [FinishReason.LENGTH]


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(monkeypatch):
    prompt = _prompt(5, 2 * BLOCK + 3)
    with _llama() as engine:
        expected = send(engine, prompt).tokens()
        runner = engine._parts.runner
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda batch: 1 / 0)
        failed = send(engine, prompt).result()
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InternalError)
        monkeypatch.setattr(runner, "run", run)
        assert engine.is_alive
        assert send(engine, prompt).tokens() == expected


def test_a_dead_engine_fails_what_is_in_flight_and_takes_nothing_more(monkeypatch):
    with _llama() as engine:

        def die(batch):
            raise EngineDeadError("the device is lost")

        monkeypatch.setattr(engine._parts.runner, "run", die)
        failed = send(engine, _prompt(6, 10)).result()
        assert isinstance(failed.error, EngineDeadError)
        engine._thread.join(timeout=10)
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            send(engine, _prompt(6, 10))


def test_steps_that_keep_failing_end_the_engine(monkeypatch):
    with _llama() as engine:
        monkeypatch.setattr(engine._parts.runner, "run", lambda batch: 1 / 0)
        for _ in range(16):
            assert isinstance(send(engine, _prompt(6, 10)).result(), Failed)
        engine._thread.join(timeout=10)
        assert not engine.is_alive


@pytest.mark.parametrize("num_events", [0, 1, 5])
def test_an_abort_gives_everything_back(num_events):
    with _llama() as engine:
        answer = send(engine, _prompt(7, 30), num_new=400)
        for _ in range(num_events):
            answer.events.get(timeout=60)
        engine.abort(answer.request_id)
        done = answer.result()
        assert done.completions[0].finish_reason is FinishReason.ABORT
        check_at_rest(engine)


def test_an_abort_of_the_prefill_that_others_wait_for_lets_them_go_on(monkeypatch):
    template = _prompt(8, 10 * BLOCK)
    with _llama(max_batch_tokens=64, max_batch_size=4) as engine:
        gate = _Gate(engine, monkeypatch)
        owner = send(engine, [*template, 5])
        waiters = [send(engine, [*template, 10 + i]) for i in range(3)]
        engine.abort(owner.request_id)
        engine.abort(waiters[1].request_id)
        gate.event.set()
        owner.result()
        for i in (0, 2):
            assert waiters[i].tokens() == generate(plain_tiny("llama"), [*template, 10 + i], 8)


def test_a_short_pool_preempts_and_every_answer_is_still_right():
    prompts = [_prompt(20 + i, 30) for i in range(6)]
    with _llama(kv_cache_memory_bytes=_slots(160), max_batch_size=6) as engine:
        answers = [send(engine, p, num_new=60) for p in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens() == generate(plain_tiny("llama"), prompt, 60)


def test_a_full_queue_refuses_at_once(monkeypatch):
    with _llama(max_concurrency=2, max_queue=1) as engine:
        gate = _Gate(engine, monkeypatch)
        answers = [send(engine, _prompt(9, 10)) for _ in range(3)]
        with pytest.raises(OverloadedError):
            send(engine, _prompt(9, 10))
        gate.event.set()
        for answer in answers:
            answer.tokens()
        send(engine, _prompt(9, 10)).tokens()


@pytest.mark.parametrize(
    ("prompt", "num_new", "status"),
    [((), 1, 400), ((5,) * 512, 1, 422), ((5,) * 500, 13, 422), ((VOCAB,), 1, 400), ((-1,), 1, 400)],
)
def test_what_cannot_be_served_is_refused_before_it_queues(prompt, num_new, status):
    with _llama() as engine:
        with pytest.raises(RequestError) as caught:
            send(engine, prompt, num_new=num_new)
        assert caught.value.status == status
        send(engine, (5,) * 504, num_new=8).tokens()


def test_a_broken_listener_harms_nobody_else():
    prompt = _prompt(11, 20)
    with _llama() as engine:
        done = threading.Event()

        def listener(event):
            if isinstance(event, Done):
                done.set()
            raise RuntimeError("gone")

        engine.submit(
            Request(request_id="broken", token_ids=tuple(prompt), sampling=SamplingParams(max_new_tokens=300)), listener
        )
        assert send(engine, prompt).tokens() == generate(plain_tiny("llama"), prompt, 8)
        assert done.wait(30)


def test_stop_drains_what_runs_and_refuses_what_comes():
    with _llama() as engine:
        answer = send(engine, _prompt(12, 10), num_new=100)
        answer.events.get(timeout=60)
        engine.stop(drain_s=60)
        assert answer.result().completions[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineDeadError):
            send(engine, _prompt(12, 10))


def test_a_canary_is_unchanged_after_errors_and_aborts_of_all_kinds(monkeypatch):
    canary, rng = _prompt(13, 3 * BLOCK), random.Random(13)
    expected = generate(plain_tiny("llama"), canary, 8)
    with _llama(kv_cache_memory_bytes=_slots(400)) as engine:
        run = engine._parts.runner.run
        for round_ in range(30):
            if round_ % 7 == 3:
                monkeypatch.setattr(engine._parts.runner, "run", lambda batch: 1 / 0)
            noise = [send(engine, canary[: rng.randrange(1, 24)] + _prompt(round_, 9), num_new=30) for _ in range(3)]
            engine.abort(noise[rng.randrange(3)].request_id)
            if round_ % 7 == 3:
                assert all(answer.result() for answer in noise)
                monkeypatch.setattr(engine._parts.runner, "run", run)
            assert send(engine, canary).tokens() == expected
            if round_ % 7 != 3:
                assert all(answer.result() for answer in noise)


@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_of_shared_prefixes_equal_reuse_off(seed):
    rng = random.Random(seed)
    trunk = _prompt(seed, 80)
    prompts = []
    for _ in range(40):
        parent = rng.choice([*prompts, trunk])
        prompts.append(parent[: rng.randrange(1, len(parent))] + _prompt(rng.randrange(10**6), rng.randrange(1, 25)))
    with _llama(max_batch_size=16, max_batch_tokens=70, kv_cache_memory_bytes=_slots(700)) as engine:
        answers = [send(engine, p, num_new=rng.randrange(1, 12)) for p in prompts]
        got = [answer.tokens() for answer in answers]
        for prompt, tokens in zip(prompts, got, strict=True):
            assert send(engine, prompt, num_new=len(tokens), reuse=False).tokens() == tokens


def test_a_hit_leaves_the_stored_entry_as_it_was():
    prompt = _prompt(31, 4 * BLOCK)
    with _llama() as engine:
        send(engine, [*prompt, 5]).result()
        pool = engine._parts.pool
        with engine._parts.cache.acquire([*prompt, 5], scope=Request(request_id="", token_ids=(1,)).scope) as lease:
            runs = lease.runs(lease.num_cached_tokens)

        def content():
            return [slab[start : start + n].clone() for slab in (*pool.keys, *pool.values) for start, n in runs]

        before = content()
        extenders = [send(engine, [*prompt, 40 + i], num_new=30) for i in range(2)]
        for i, answer in enumerate(extenders):
            assert answer.tokens() == generate(plain_tiny("llama"), [*prompt, 40 + i], 30)
        assert all((a == b).all() for a, b in zip(before, content(), strict=True))
