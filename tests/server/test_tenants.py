"""Tenants: named by a trusted header only, apart in the store, purged alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from server.conftest import MakeSite, Site

from kvreuse.api.facts import CUSTOM_ATTRIBUTES
from kvreuse.cache.hashing import block_hashes
from kvreuse.config import Config
from kvreuse.errors import RequestError
from kvreuse.server.callers import caller_of
from kvreuse.types import Scope

HEADER = "X-KVReuse-Tenant"
BODY: dict[str, Any] = {"inputs": "a prompt of several blocks", "parameters": {"max_new_tokens": 2, "details": True}}


def send(site: Site, tenant: str | None, body: Any = BODY) -> httpx.Response:
    headers = {} if tenant is None else {HEADER: tenant}
    return httpx.post(f"{site.url}/invocations", json=body, headers=headers, timeout=20)


def cached(response: httpx.Response) -> int:
    return int(response.json()[0]["details"]["kv_cache"]["cached_tokens"])


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site(tenant_mode="required")


def test_case_22_no_hit_crosses_tenants(site: Site) -> None:
    cold, warm = send(site, "a"), send(site, "a")
    assert cached(cold) == 0
    assert cached(warm) > 0
    assert cached(send(site, "b")) == 0


def test_case_22_the_hashes_of_two_tenants_have_nothing_in_common() -> None:
    names = [set(block_hashes(range(640), scope=Scope(tenant=name), block_size=32)) for name in ("", "a", "b", "ab")]
    assert len(set().union(*names)) == 4 * 20


def test_case_23_a_missing_tenant_is_refused_where_one_is_required(site: Site) -> None:
    response = send(site, None)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == HEADER
    assert site.engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_case_23_no_openai_route_does_without_either(site: Site, path: str) -> None:
    body = {"prompt": "a"} if path.endswith("v1/completions") else {"messages": [{"role": "user", "content": "a"}]}
    response = httpx.post(site.url + path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


@pytest.mark.parametrize("field", ["tenant", "scope", "cache_salt", "X-KVReuse-Tenant", "user"])
def test_case_23_no_body_chooses_a_tenant(site: Site, field: str) -> None:
    for body in ({"inputs": "a", field: "b"}, {"inputs": "a", "parameters": {field: "b"}}):
        assert send(site, "a", body).status_code == 400
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "user": "b", "metadata": {"tenant": "b"}}
    assert send(site, "a", chat).status_code == 200
    assert {request.scope for request in site.engine.submitted} == {Scope(tenant="a")}


@pytest.mark.parametrize("name", ["a b", "a,b", "a;b", "é", "x" * 129, ","])
def test_what_could_be_two_names_is_none(name: str) -> None:
    with pytest.raises(RequestError, match="one tenant"):
        caller_of({HEADER: name}, Config(tenant_mode="header"))


def test_a_header_sent_twice_names_nobody(site: Site) -> None:
    headers = [(HEADER, "a"), (HEADER, "b")]
    for path in ("/invocations", "/v1/completions"):
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(site.url + path, json=body, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("sent", "tenant"),
    [("tenant=a", "a"), ("trace=1; tenant=a", "a"), ("trace=1,tenant=a", "a"), ("tenant=a=b", "a=b")],
)
def test_the_custom_attributes_can_name_the_tenant(sent: str, tenant: str) -> None:
    config = Config(tenant_mode="required", tenant_header=CUSTOM_ATTRIBUTES)
    assert caller_of({CUSTOM_ATTRIBUTES.lower(): sent}, config).scope == Scope(tenant=tenant)


@pytest.mark.parametrize("sent", ["", "tenant=", "tenant=a; tenant=b", "my-tenant=a", "tenant"])
def test_custom_attributes_that_name_no_one_tenant_are_refused(sent: str) -> None:
    config = Config(tenant_mode="required", tenant_header=CUSTOM_ATTRIBUTES)
    with pytest.raises(RequestError):
        caller_of({CUSTOM_ATTRIBUTES: sent}, config)


def test_attributes_do_not_count_where_another_header_is_the_trusted_one() -> None:
    assert caller_of({CUSTOM_ATTRIBUTES: "tenant=a"}, Config(tenant_mode="header")).scope == Scope()


def test_off_ignores_the_header() -> None:
    assert caller_of({HEADER: "a b"}, Config()).scope == Scope()


def test_with_header_callers_without_one_share_among_themselves(make_site: MakeSite) -> None:
    site = make_site(tenant_mode="header")
    cold, warm = send(site, None), send(site, None)
    assert cached(cold) == 0
    assert cached(warm) > 0
    assert cached(send(site, "a")) == 0


def test_a_secret_hides_the_name_and_tells_names_apart() -> None:
    keyed = [Config(tenant_mode="header", tenant_secret=secret) for secret in ("x", "y")]
    salts = {caller_of({HEADER: name}, config).scope.tenant for config in keyed for name in ("acme", "other")}
    assert len(salts) == 4
    assert not any("acme" in salt or "other" in salt for salt in salts)


def test_purge_drops_one_tenant_and_no_other(site: Site) -> None:
    for tenant in ("a", "b"):
        send(site, tenant)
    assert httpx.post(f"{site.url}/purge", headers={HEADER: "a"}).json() == {"purged_blocks": 1}
    assert cached(send(site, "a")) == 0
    assert cached(send(site, "b")) > 0


def test_purge_without_a_tenant_drops_everything(site: Site) -> None:
    for tenant in ("a", "b"):
        send(site, tenant)
    assert httpx.post(f"{site.url}/purge").json() == {"purged_blocks": 2}
    assert cached(send(site, "b")) == 0


def test_purge_is_for_the_machine_itself(site: Site) -> None:
    async def purge() -> int:
        transport = httpx.ASGITransport(site.app, client=("10.0.0.7", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            return (await client.post("/purge")).status_code

    assert asyncio.run(purge()) == 403
