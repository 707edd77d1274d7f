"""The engine over storage that outlives it: restarts, new instances, tenants, new weights, damage, silence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout
from kvreuse.kv.tiers.open import open_tiers
from kvreuse.kv.tiers.stack import TierStack
from kvreuse.types import MissReason, Request, SamplingParams, Scope, Tier
from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, Answer, generate, plain_tiny, running_engine, send, tiny
from tests.kv.tiers.harness import files_of, redis_server, silent_server, wait_until_stored

FAMILY = "llama"
PROMPT = random.Random(1).choices(range(2, VOCAB), k=5 * BLOCK + 3)
NUM_CACHED = 5 * BLOCK


@pytest.fixture(autouse=True)
def loading_always_pays(monkeypatch, tmp_path):
    forecast = TierStack.forecast
    monkeypatch.setattr(TierStack, "forecast", lambda self, keys: (forecast(self, keys)[0], 0.0))
    monkeypatch.setattr("kvreuse.engine.lower_tiers.MIN_PATIENCE_S", 20.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def checkpoint(tmp_path):
    """The tiny model as a folder, which the identity is taken from."""
    plain_tiny(FAMILY).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(params=[Tier.DISK, Tier.REMOTE])
def storage(request, tmp_path):
    """Tier and the options that name one that is empty."""
    if request.param is Tier.DISK:
        return request.param, {"disk_cache_dir": str(tmp_path / "cache")}
    server = request.getfixturevalue("redis")
    return request.param, {"remote_cache_url": f"{server.url[:-1]}{next(_databases)}", "remote_timeout_ms": 20_000}


_databases = iter(range(16))


def start(checkpoint, **options):
    return running_engine(replace(tiny(FAMILY), source=str(checkpoint)), **options)


def ask(engine, prompt=PROMPT, *, tenant=""):
    """The facts of an answer, which must be the plain model's."""
    answer = Answer()
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    request = Request(
        request_id=f"t{random.random()}", token_ids=tuple(prompt), sampling=sampling, scope=Scope(tenant=tenant)
    )
    engine.submit(request, answer.events.put)
    done = answer.result()
    assert list(done.completions[0].token_ids) == generate(plain_tiny(FAMILY), prompt, 6)
    wait_until_stored(engine._parts.lower.stack)
    return done.facts


def test_a_second_engine_on_the_same_storage_hits_what_the_first_one_computed(checkpoint, storage):
    tier, options = storage
    with start(checkpoint, **options) as engine:
        assert ask(engine).cached_tokens == 0
    with start(checkpoint, **options) as engine:
        facts = ask(engine)
        assert (facts.cached_tokens, facts.tier, facts.miss_reason) == (NUM_CACHED, tier, None)
        assert ask(engine).tier is Tier.DEVICE


def test_a_tenant_never_hits_what_another_one_stored_also_after_a_restart(checkpoint, storage):
    tier, options = storage
    with start(checkpoint, **options) as engine:
        ask(engine, tenant="a")
    with start(checkpoint, **options) as engine:
        assert ask(engine, tenant="b").cached_tokens == 0
        assert ask(engine).cached_tokens == 0
        assert (facts := ask(engine, tenant="a")).tier is tier
        assert facts.cached_tokens == NUM_CACHED
        engine.purge(tenant="a")
        assert ask(engine, tenant="a").cached_tokens == 0
        assert ask(engine, tenant="b").cached_tokens == NUM_CACHED


def test_new_weights_at_the_same_path_miss(checkpoint, storage):
    _, options = storage
    with start(checkpoint, **options) as engine:
        ask(engine)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with start(checkpoint, **options) as engine:
        assert (facts := ask(engine)).cached_tokens == 0
        assert facts.miss_reason is MissReason.COLD


def test_endpoints_that_share_hit_across_another_final_norm_and_only_then(checkpoint, storage):
    _, options = storage
    with start(checkpoint, cross_model_sharing=True, **options) as engine:
        ask(engine)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1  # the served model keeps its own, so its tokens stay those of the plain one
    save_file(tensors, path, metadata={"format": "pt"})
    for is_shared, expected in ((False, 0), (True, NUM_CACHED)):
        with start(checkpoint, cross_model_sharing=is_shared, **options) as engine:
            assert ask(engine).cached_tokens == expected


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp16"])
def test_kv_of_another_dtype_is_stored_and_comes_back(checkpoint, storage, kv_cache_dtype):
    tier, options = storage
    with start(checkpoint, **options, kv_cache_dtype=kv_cache_dtype) as engine:
        send(engine, PROMPT).result()
        wait_until_stored(engine._parts.lower.stack)
    with start(checkpoint, **options, kv_cache_dtype=kv_cache_dtype) as engine:
        facts = send(engine, PROMPT).result().facts
        assert (facts.cached_tokens, facts.tier) == (NUM_CACHED, tier)
    with start(checkpoint, **options) as engine:
        assert ask(engine).cached_tokens == 0


def test_files_that_were_damaged_are_misses_and_never_wrong_text(checkpoint, tmp_path):
    rng, options = random.Random(2), {"disk_cache_dir": str(tmp_path / "cache")}
    for damage in (
        lambda raw: raw[: rng.randrange(len(raw))],
        lambda raw: bytes(len(raw)),
        lambda raw: bytes(byte ^ (rng.random() < 0.01) for byte in raw),
    ):
        with start(checkpoint, **options) as engine:
            assert ask(engine).cached_tokens == 0
            engine._parts.cache.purge()
            for path in files_of(tmp_path / "cache"):
                path.write_bytes(damage(path.read_bytes()))
            assert ask(engine).cached_tokens == 0
            engine.purge()


def test_a_tiny_pool_over_little_memory_over_a_small_disk_is_always_right_and_under_its_cap(checkpoint, tmp_path):
    rng, cap = random.Random(3), 2**20
    templates = [rng.choices(range(2, VOCAB), k=rng.randrange(2, 7) * BLOCK + 1) for _ in range(6)]
    options = {"disk_cache_dir": str(tmp_path / "cache"), "disk_cache_bytes": cap, "tier_write": "on_evict"}
    sizes = {"kv_cache_memory_bytes": 384 * 130, "host_cache_bytes": 384 * BLOCK * 12}
    with start(checkpoint, **sizes, **options) as engine:
        tiers = {ask(engine, [*rng.choice(templates), rng.randrange(2, VOCAB), 3]).tier for _ in range(40)}
        assert sum(path.stat().st_size for path in files_of(tmp_path / "cache")) <= cap
    assert {Tier.HOST, Tier.DISK} <= tiers


def test_a_server_that_never_answers_costs_the_timeout_and_no_request(checkpoint, monkeypatch):
    monkeypatch.setattr("kvreuse.engine.lower_tiers.MIN_PATIENCE_S", 0.05)
    with (
        silent_server() as address,
        start(checkpoint, remote_cache_url=f"redis://{address}/0", remote_timeout_ms=100) as engine,
    ):
        for seed in range(3):
            assert ask(engine, random.Random(seed).choices(range(2, VOCAB), k=30)).cached_tokens == 0
        assert engine.snapshot()["tiers"]["remote"].num_errors > 0


@pytest.mark.parametrize(
    "url",
    [
        "http://somewhere",
        "redis://host:port/0",
        "redis://user:hunter2@host:nine/0",
        "valkey",
        "redis://",
        "s3://",
        "memcached://h",
    ],
)
def test_a_url_that_cannot_be_used_stops_the_start_and_shows_no_password(checkpoint, url):
    with pytest.raises(ConfigError, match=r"option\.remote_cache_url") as error:
        open_tiers(Config(remote_cache_url=url), model_folder=checkpoint, layout=KVLayout(()))
    assert "hunter2" not in error.value.message


def test_what_is_logged_of_a_remote_tier_shows_no_password(checkpoint, caplog):
    caplog.set_level("DEBUG")
    config = Config(remote_cache_url="rediss://user:hunter2@cache.example:6380/0?ssl_keyfile=secret")
    [tier] = open_tiers(config, model_folder=checkpoint, layout=KVLayout(()))
    tier.close()
    assert "rediss://***@cache.example:6380/0" in caplog.text
    assert "hunter2" not in caplog.text
    assert "secret" not in caplog.text
