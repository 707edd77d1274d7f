"""A call that is sent again under its inference id while it runs is computed once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server.conftest import MakeSite, Site
from server.test_streams import raw_post, wait_for

ID = "X-Amzn-SageMaker-Inference-Id"
BODY: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 4}}


def send(site: Site, body: Any = BODY, **headers: str) -> httpx.Response:
    return httpx.post(f"{site.url}/invocations", json=body, headers={ID: "same", **headers}, timeout=20)


def together(site: Site, *calls: tuple[Any, dict[str, str]], num_computed: int) -> list[httpx.Response]:
    """All calls are in flight before the engine answers any."""
    site.engine.stall()
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(send, site, body, **headers) for body, headers in calls]
        wait_for(lambda: site.num_open() == len(calls) and len(site.engine.submitted) >= num_computed)
        site.engine.gate.set()
        return [future.result() for future in futures]


def test_two_calls_of_one_id_are_computed_once(site: Site) -> None:
    first, second = together(site, (BODY, {}), (BODY, {}), num_computed=1)
    assert len(site.engine.submitted) == 1
    assert first.status_code == second.status_code == 200
    assert first.json() == second.json()
    assert first.headers["x-request-id"] == second.headers["x-request-id"]


def test_after_the_answer_the_same_id_is_a_new_call(site: Site) -> None:
    assert send(site).json() == send(site).json()
    assert len(site.engine.submitted) == 2


@pytest.mark.parametrize(
    "other",
    [
        (BODY, {ID: "other"}),
        ({**BODY, "inputs": "bye"}, {}),
        ({**BODY, "stream": True}, {}),
        (BODY, {"X-KVReuse-Tenant": "b"}),
        (BODY, {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}),
    ],
    ids=["another id", "another body", "a stream", "another tenant", "a session"],
)
def test_what_differs_is_computed_apart(make_site: MakeSite, other: tuple[Any, dict[str, str]]) -> None:
    site = make_site(tenant_mode="header")
    assert [r.status_code for r in together(site, (BODY, {}), other, num_computed=2)] == [200, 200]
    assert len(site.engine.submitted) == 2


def test_the_answer_stays_for_who_joined_when_the_first_caller_leaves(site: Site) -> None:
    site.engine.stall()
    first = raw_post(site.url, BODY, f"{ID}: same")
    wait_for(lambda: len(site.engine.submitted) == 1)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(send, site)
        wait_for(lambda: site.num_open() == 2)
        first.close()
        wait_for(lambda: site.num_open() == 1)
        site.engine.gate.set()
        assert second.result().status_code == 200
    assert len(site.engine.submitted) == 1


def test_what_runs_is_aborted_when_all_have_left(site: Site) -> None:
    site.engine.stall()
    callers = [raw_post(site.url, BODY, f"{ID}: same") for _ in range(2)]
    wait_for(lambda: site.num_open() == 2)
    for caller in callers:
        caller.close()
    wait_for(lambda: site.engine.aborted)
    site.engine.gate.set()
    assert send(site).status_code == 200


def test_all_who_joined_hear_of_a_fault(site: Site) -> None:
    site.engine.stall()
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(send, site) for _ in range(2)]
        wait_for(lambda: site.num_open() == 2)
        site.engine.crash_step()
        responses = [future.result() for future in futures]
    assert [response.status_code for response in responses] == [500, 500]
