"""S3 as a tier, by moto's server: shared by instances, damaged, unavailable, silent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvreuse.api.templates import load_templates
from kvreuse.errors import ConfigError
from kvreuse.kv.tiers.s3 import S3Tier, fetch_text
from tests.kv.tiers.contract import TierContract
from tests.kv.tiers.harness import NAMESPACE, OTHER_NAMESPACE, is_same, load, make_block, put_all, silent_server
from tests.kv.tiers.test_disk import DAMAGE

BUCKET = "caches"


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def account(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")


@pytest.fixture
def bucket(endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    bucket = boto3.resource("s3").Bucket(BUCKET)
    bucket.create()
    bucket.objects.all().delete()
    yield bucket
    bucket.meta.client.close()


@pytest.fixture
def open_s3():
    opened = []

    def open_s3(*, namespace=NAMESPACE, max_bytes=2**20, timeout_s=20.0, **options):
        tier = S3Tier(
            BUCKET, prefix="fleet/a", namespace=namespace, max_bytes=max_bytes, timeout_s=timeout_s, **options
        )
        opened.append(tier)
        return tier

    yield open_s3
    for tier in opened:
        tier.close()


class TestS3Tier(TierContract):
    is_exact = False

    @pytest.fixture
    def open_tier(self, open_s3, bucket):
        return lambda max_bytes: open_s3(max_bytes=max_bytes)

    @pytest.fixture
    def stored_bytes(self, bucket):
        return lambda: sum(item.size for item in bucket.objects.all())


def key_of(block):
    return f"fleet/a/{NAMESPACE}/{block.key.hex()}"


def test_what_one_instance_puts_another_one_loads_whether_it_was_up_already_or_not(open_s3, bucket):
    first, second = open_s3(), open_s3()
    blocks = [make_block(number, tenant="ab"[number % 2]) for number in range(20)]
    put_all(first, blocks)
    for tier in (second, open_s3()):
        run = tier.load_run([block.key for block in blocks], [block.token_bytes for block in blocks])
        assert all(is_same(loaded, block) for loaded, block in zip(run, blocks, strict=True))
    assert second.purge("a") == 10
    assert [load(open_s3(), block) is None for block in blocks[:2]] == [True, False]


def test_a_restart_counts_what_is_there_and_evicts_the_oldest(open_s3, bucket):
    put_all(open_s3(), [make_block(number) for number in range(3)])
    size = sum(item.size for item in bucket.objects.all()) // 3
    bucket.put_object(Key=f"fleet/a/{NAMESPACE}/notes.txt", Body=b"not ours")
    second = open_s3(max_bytes=3 * size)
    assert second.usage().num_bytes == 3 * size
    put_all(second, [make_block(9)])
    assert sum(len(item.key.rpartition("/")[2]) == 32 for item in bucket.objects.all()) == 3


def test_another_model_never_sees_it(open_s3, bucket):
    put_all(open_s3(), [make_block(1)])
    assert load(open_s3(namespace=OTHER_NAMESPACE), make_block(1)) is None


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "of another instance"])
def test_a_damaged_object_is_a_miss_and_dropped_and_the_tier_goes_on(open_s3, bucket, damage, is_own):
    reader = open_s3()
    writer = reader if is_own else open_s3()
    put_all(writer, [make_block(1), make_block(2)])
    damaged = bucket.Object(key_of(make_block(1)))
    damaged.put(Body=damage(damaged.get()["Body"].read()))
    assert load(reader, make_block(1)) is None
    assert (reader.usage().num_corrupt, reader.usage().num_errors) == (1, 0)
    assert [item.key for item in bucket.objects.all()] == [key_of(make_block(2))]
    assert is_same(load(reader, make_block(2)), make_block(2))
    assert reader.put(make_block(1))
    assert is_same(load(reader, make_block(1)), make_block(1))


def test_a_cold_prompt_costs_one_request(open_s3, bucket):
    tier, requests = open_s3(), []
    tier._client.meta.events.register("before-call", lambda model, **_: requests.append(model.name))
    blocks = [make_block(number) for number in range(30)]
    assert tier.load_run([block.key for block in blocks], [block.token_bytes for block in blocks]) == []
    assert requests == ["GetObject"]


class Unavailable(BaseHTTPRequestHandler):
    """503 to everything."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_DELETE = answer  # the names are http.server's

    def log_message(self, *_):
        pass


def test_a_503_rests_the_tier_and_it_recovers(open_s3, bucket, clock, endpoint, monkeypatch):
    put_all(open_s3(), [make_block(1)])
    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
        tier = open_s3(clock=clock)
        assert not tier.put(make_block(2))
        assert (tier.find([make_block(1).key]), load(tier, make_block(1))) == (0, None)
        assert (tier.usage().num_errors, tier.usage().is_healthy) == (1, False)
        server.shutdown()
        thread.join()
    tier._client.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    tier._client = open_s3()._client
    clock.now_s += 6
    assert is_same(load(tier, make_block(1)), make_block(1))
    assert tier.put(make_block(2))


def test_a_silent_service_is_given_up_after_the_timeout(open_s3, clock, monkeypatch):
    with silent_server() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{address}")
        tier = open_s3(timeout_s=0.2, clock=clock)
        assert not tier.put(make_block(1))
        assert tier.usage().num_errors == 1


def test_a_bucket_that_is_not_there_is_a_tier_that_stores_nothing(open_s3, endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setattr(f"{__name__}.BUCKET", "no-such-bucket")
    tier = open_s3()
    assert not tier.put(make_block(1))
    assert (tier.usage().is_healthy, tier.usage().num_errors) == (False, 1)


def test_a_template_manifest_is_read_from_s3(bucket):
    bucket.put_object(Key="a/templates.yaml", Body=b"- {id: letter, text: 'Dear {{name}}'}\n")
    url = f"s3://{BUCKET}/a/templates.yaml"
    assert load_templates(url, text=fetch_text(url))["letter"].body == "Dear {{name}}"


def test_a_manifest_that_is_not_there_is_one_sentence(bucket):
    with pytest.raises(ConfigError, match=f"cannot read s3://{BUCKET}/none.yaml"):
        fetch_text(f"s3://{BUCKET}/none.yaml")


def test_what_a_purge_could_not_delete_is_not_served(bucket, open_s3, clock, monkeypatch):
    tier, block = open_s3(clock=clock), make_block(0, tenant="a")
    put_all(tier, [block])

    def refuse(key):
        raise OSError("no route")

    with monkeypatch.context() as broken:
        broken.setattr(tier, "_delete", refuse)
        tier.purge("a")
    clock.now_s += 60  # it rests no more
    assert load(tier, block) is None
    assert [item.key for item in bucket.objects.all()] == [key_of(block)]
