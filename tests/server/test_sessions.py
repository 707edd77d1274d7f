"""Sessions over HTTP: opened, used, closed and expired as the hosting contract has it, each holding one pin."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import httpx
import pytest
from fakes import FakePins, expected_text
from server.conftest import MakeSite, Site

from kvreuse.config import Config
from kvreuse.errors import RequestError
from kvreuse.server.callers import Caller
from kvreuse.server.sessions import NEW_SESSION, Sessions
from kvreuse.types import Scope

ID = "X-Amzn-SageMaker-Session-Id"
OPENED, CLOSED = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"
BODY: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
CLOSE = {"requestType": "CLOSE"}


def send(site: Site, session: str, body: Any = BODY, **headers: str) -> httpx.Response:
    return httpx.post(f"{site.url}/invocations", json=body, headers={ID: session, **headers}, timeout=20)


def opened(site: Site, **headers: str) -> str:
    return send(site, "NEW_SESSION", **headers).headers[OPENED].partition(";")[0]


def pinned(site: Site) -> list[str]:
    return [site.engine.tokenizer.decode(token_ids) for token_ids, _ in site.engine.pins.held]


def test_a_new_session_names_itself_and_its_end(site: Site) -> None:
    header = send(site, "NEW_SESSION").headers[OPENED]
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", header)
    ends = datetime.fromisoformat(header.partition("Expires=")[2]).timestamp()
    assert 1000 < ends - datetime.now().timestamp() < 1300


def test_a_session_keeps_the_conversation_so_far_and_only_that(site: Site) -> None:
    session = opened(site)
    assert pinned(site) == ["hello" + expected_text("hello", 3)]
    longer = {"inputs": "hello again", "parameters": {"max_new_tokens": 1}}
    assert OPENED not in send(site, session, longer).headers
    assert pinned(site) == ["hello again" + expected_text("hello again", 1)]


def test_a_stream_goes_on_with_a_session(site: Site) -> None:
    session = opened(site)
    assert send(site, session, {**BODY, "inputs": "more", "stream": True}).status_code == 200
    assert pinned(site) == ["more" + expected_text("more", 3)]


def test_a_stream_cannot_open_one(site: Site) -> None:
    response = send(site, "NEW_SESSION", {**BODY, "stream": True})
    assert response.status_code == 400
    assert pinned(site) == []


def test_close_says_so_and_lets_the_prefix_go(site: Site) -> None:
    session = opened(site)
    response = send(site, session, CLOSE)
    assert (response.status_code, response.headers[CLOSED]) == (200, session)
    assert pinned(site) == []
    assert send(site, session).status_code == 400


def test_a_session_may_be_opened_without_a_prompt(site: Site) -> None:
    response = send(site, "NEW_SESSION", {"requestType": "NEW_SESSION"})
    assert response.status_code == 200
    assert send(site, response.headers[OPENED].partition(";")[0]).status_code == 200


def test_a_close_without_a_session_is_an_ordinary_bad_body(client: httpx.Client) -> None:
    assert client.post("/invocations", json=CLOSE).status_code == 400


@pytest.mark.parametrize("session", ["unknown", "new_session"])
def test_an_unknown_session_is_an_error_and_computes_nothing(site: Site, session: str) -> None:
    response = send(site, session)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ID
    assert site.engine.submitted == []


def test_a_session_is_its_tenants_alone(make_site: MakeSite) -> None:
    site = make_site(tenant_mode="required")
    tenant = "X-KVReuse-Tenant"
    session = opened(site, **{tenant: "a"})
    assert send(site, session, **{tenant: "b"}).status_code == 400
    assert send(site, session, CLOSE, **{tenant: "b"}).status_code == 400
    assert send(site, session, **{tenant: "a"}).status_code == 200


def test_purging_a_tenant_closes_its_sessions(make_site: MakeSite) -> None:
    site = make_site(tenant_mode="required")
    tenant = "X-KVReuse-Tenant"
    sessions = {name: opened(site, **{tenant: name}) for name in ("a", "b")}
    httpx.post(f"{site.url}/purge", headers={tenant: "a"})
    assert send(site, sessions["a"], **{tenant: "a"}).status_code == 400
    assert send(site, sessions["b"], **{tenant: "b"}).status_code == 200


def test_a_call_that_fails_opens_nothing(make_site: MakeSite) -> None:
    site = make_site(max_sessions=1)
    assert send(site, "NEW_SESSION", {"inputs": "x" * 30_000}).status_code == 422
    assert send(site, "NEW_SESSION", {"inputs": ["a", "b"]}).status_code == 400
    site.engine.stall()
    site.engine.crash_step()
    send(site, "NEW_SESSION")
    assert send(site, "NEW_SESSION").status_code == 200


def test_no_more_sessions_than_allowed(make_site: MakeSite) -> None:
    site = make_site(max_sessions=1)
    session = opened(site)
    response = send(site, "NEW_SESSION")
    assert response.status_code == 503
    assert "retry-after" in response.headers
    send(site, session, CLOSE)
    assert send(site, "NEW_SESSION").status_code == 200


def test_the_openai_routes_know_sessions_too(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 3}
    response = httpx.post(f"{site.url}/v1/completions", json=body, headers={ID: "NEW_SESSION"})
    assert response.headers[OPENED]
    assert pinned(site) == ["hello" + expected_text("hello", 3)]


def test_an_expired_session_is_an_error_and_its_pin_is_gone() -> None:
    now = [1000.0]
    pins = FakePins()
    sessions = Sessions(pins, Config(session_ttl_s=60), clock=lambda: now[0])  # type: ignore[arg-type]
    end = sessions.turn(Caller(session_id="NEW_SESSION"), [], body={}, is_stream=False)
    session_id = end([])[NEW_SESSION].partition(";")[0]
    caller = Caller(session_id=session_id)
    sessions._hold(sessions._find(caller), (1, 2, 3))
    assert pins.held == [((1, 2, 3), Scope())]
    now[0] += 60
    with pytest.raises(RequestError, match="unknown, closed or expired"):
        sessions.turn(caller, [], body={}, is_stream=False)
    assert pins.held == []
