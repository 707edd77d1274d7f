"""A real redis-server as a tier: shared by instances, damaged, full, silent, dead and back."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest
from valkey import Valkey

from kvreuse.kv.tiers.remote import RedisTier
from tests.kv.tiers.contract import TierContract
from tests.kv.tiers.harness import (
    NAMESPACE,
    OTHER_NAMESPACE,
    is_same,
    load,
    make_block,
    put_all,
    redis_server,
    silent_server,
)
from tests.kv.tiers.test_disk import DAMAGE

ENTRY_BYTES = 1192 + 512 + 24  # payload and header, in the server's books


@pytest.fixture(autouse=True)
def usage_is_asked_every_time(monkeypatch):
    monkeypatch.setattr("kvreuse.kv.tiers.remote._USAGE_TTL_S", 0.0)


@pytest.fixture
def client(shared_redis):
    client = Valkey.from_url(shared_redis.url.replace("redis://", "valkey://"))
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def open_redis(client, shared_redis):
    opened = []

    def open_redis(*, url=shared_redis.url, namespace=NAMESPACE, max_bytes=2**20, timeout_s=5.0, **options):
        opened.append(RedisTier(url, namespace=namespace, max_bytes=max_bytes, timeout_s=timeout_s, **options))
        return opened[-1]

    yield open_redis
    for tier in opened:
        tier.close()


class TestRedisTier(TierContract):
    is_exact = False

    @pytest.fixture
    def open_tier(self, open_redis):
        return lambda max_bytes: open_redis(max_bytes=max_bytes)

    @pytest.fixture
    def stored_bytes(self, client):
        own = Valkey(**client.get_connection_kwargs())  # another thread may not share a transaction
        yield lambda: sum(own.strlen(key) for key in own.keys("kvreuse:*") if is_value(key) and own.exists(key))
        own.close()


def is_value(key):
    return len(key.rpartition(b":")[2]) == 32


def value_key(block):
    return f"kvreuse:{{{NAMESPACE}}}:{block.key.hex()}"


def test_what_one_instance_puts_another_one_loads(open_redis):
    first, second = open_redis(), open_redis()
    put_all(first, [make_block(number, tenant="a") for number in range(20)])
    blocks = [make_block(number, tenant="a") for number in range(20)]
    run = second.load_run([block.key for block in blocks], [block.token_bytes for block in blocks])
    assert all(is_same(loaded, block) for loaded, block in zip(run, blocks, strict=True))
    assert second.purge("a") == 20
    assert load(first, blocks[0]) is None


def test_a_block_that_another_instance_has_put_is_not_sent_again(open_redis, client):
    first, second = open_redis(), open_redis()
    put_all(first, [make_block(1, num_bytes=100_000)])
    before = int(client.info("stats")["total_net_input_bytes"])
    put_all(second, [make_block(1, num_bytes=100_000)])
    assert int(client.info("stats")["total_net_input_bytes"]) - before < 50_000


def test_a_cold_prompt_costs_one_exchange(open_redis, client):
    blocks = [make_block(number) for number in range(30)]
    client.config_resetstat()
    assert open_redis().load_run([block.key for block in blocks], [block.token_bytes for block in blocks]) == []
    assert client.info("commandstats")["cmdstat_get"]["calls"] == 1


def test_two_instances_share_one_cap(open_redis):
    first, second = open_redis(max_bytes=10_000), open_redis(max_bytes=10_000)
    for number in range(10):
        put_all((first, second)[number % 2], [make_block(number)])
    assert first.usage().num_bytes <= 10_000
    assert 0 < second.usage().num_entries == 10_000 // (second.usage().num_bytes // second.usage().num_entries)


def test_another_model_has_its_own_entries_and_its_own_cap(open_redis):
    ours, theirs = open_redis(), open_redis(namespace=OTHER_NAMESPACE)
    put_all(ours, [make_block(1)])
    assert load(theirs, make_block(1)) is None
    assert theirs.purge(None) == 0
    assert is_same(load(ours, make_block(1)), make_block(1))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_value_is_a_miss_and_dropped_and_the_tier_goes_on(open_redis, client, damage):
    tier = open_redis()
    put_all(tier, [make_block(1), make_block(2)])
    client.set(value_key(make_block(1)), damage(client.get(value_key(make_block(1)))))
    assert load(tier, make_block(1)) is None
    assert (tier.usage().num_corrupt, tier.usage().num_errors) == (1, 0)
    assert client.exists(value_key(make_block(1))) == 0
    assert is_same(load(tier, make_block(2)), make_block(2))
    assert tier.put(make_block(1))
    assert is_same(load(tier, make_block(1)), make_block(1))


def test_what_the_server_dropped_on_its_own_leaves_the_books(open_redis, client):
    tier = open_redis()
    put_all(tier, [make_block(1), make_block(2)])
    client.delete(value_key(make_block(1)))
    assert load(tier, make_block(1)) is None
    put_all(tier, [make_block(3)])
    assert tier.usage().num_entries == 2


def test_a_server_that_was_emptied_starts_again(open_redis, client):
    tier = open_redis(max_bytes=10_000)
    put_all(tier, [make_block(1)])
    client.flushall()
    client.script_flush()
    assert load(tier, make_block(1)) is None
    put_all(tier, [make_block(2)])
    assert is_same(load(tier, make_block(2)), make_block(2))
    assert (tier.usage().num_entries, tier.usage().num_errors) == (1, 0)


def test_a_server_without_memory_costs_the_put_and_not_what_is_there(clock, open_redis):
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = open_redis(url=server.url, clock=clock, max_bytes=2**30)
        stored = []
        for number in range(30):
            clock.now_s += 6
            stored.append(tier.put(make_block(number, num_bytes=200_000)))
        assert stored[0]
        assert not all(stored)
        assert tier.usage().num_errors > 0
        clock.now_s += 6
        first = make_block(0, num_bytes=200_000)
        assert is_same(load(tier, first), first)


def test_a_dead_server_rests_the_tier_and_it_recovers(clock, open_redis):
    with redis_server() as server:
        tier = open_redis(url=server.url, clock=clock)
        put_all(tier, [make_block(1)])
        server.stop()
        assert load(tier, make_block(1)) is None
        assert (tier.find([make_block(1).key]), tier.put(make_block(2))) == (0, False)
        assert (tier.usage().num_errors, tier.usage().is_healthy) == (1, False)
        server.start()
        clock.now_s += 6
        assert tier.put(make_block(2))
        assert is_same(load(tier, make_block(2)), make_block(2))


def test_a_connection_that_the_server_closed_is_no_fault(open_redis, client):
    tier = open_redis()
    put_all(tier, [make_block(1)])
    client.client_kill_filter(_type="normal", skipme=True)
    assert is_same(load(tier, make_block(1)), make_block(1))
    assert tier.usage().num_errors == 0


def test_a_silent_server_is_given_up_after_the_timeout(open_redis, clock):
    with silent_server() as address:
        tier = open_redis(url=f"redis://{address}/0", timeout_s=0.1, clock=clock)
        started_s = time.monotonic()
        assert load(tier, make_block(1)) is None
        assert not tier.put(make_block(1))
        assert time.monotonic() - started_s < 5
        assert (tier.usage().num_errors, tier.usage().is_healthy) == (1, False)


def test_a_server_that_dribbles_is_given_up_too(open_redis, clock):
    """Each byte comes within the timeout, the whole never does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ends = threading.Event()

        def dribble():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"*1\r\n$100000\r\n")
                while not ends.wait(0.03):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        server = threading.Thread(target=dribble)
        server.start()
        tier = open_redis(url=f"redis://127.0.0.1:{listening.getsockname()[1]}/0", timeout_s=0.3, clock=clock)
        started_s = time.monotonic()
        assert load(tier, make_block(1)) is None
        assert time.monotonic() - started_s < 20
        ends.set()
        server.join()
        assert tier.usage().num_errors == 1


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*x\r\n", b"$-7\r\n", b"+OK\r\n" * 9])
def test_something_that_is_no_redis_is_a_fault_and_never_an_exception(open_redis, clock, answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        tier = open_redis(url=f"redis://127.0.0.1:{listening.getsockname()[1]}/0", timeout_s=0.5, clock=clock)

        def reply():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        server = threading.Thread(target=reply)
        server.start()
        assert (load(tier, make_block(1)), tier.put(make_block(2))) == (None, False)
        assert tier.usage().num_errors > 0
        tier.close()
        listening.shutdown(socket.SHUT_RDWR)
        server.join()


def test_no_log_line_holds_the_password(open_redis, clock, caplog):
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", "right") as server:
        tier = open_redis(url=server.url.replace("://", "://:hunter2@"), clock=clock)
        assert not tier.put(make_block(1))
        assert tier.usage().num_errors == 1
    assert caplog.text
    assert "hunter2" not in caplog.text
