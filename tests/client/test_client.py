"""The caller's side: what bytes it sends, under which names, how it repeats itself, what it reads back."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from shim import ENDPOINT, runtime, runtime_client

from kvreuse.client import PrefixClient, Sessions, canonical_body, compose, event_facts, prefix_aware, read_facts
from kvreuse.errors import RequestError
from kvreuse.types import CacheFacts, MissReason, Tier
from tests.server.conftest import MakeSite, make_site

__all__ = ["make_site"]

HEADER = (
    "kvreuse=1; request_id=r; cached_tokens=64; prompt_tokens=90; tier=device; miss_reason=diverged; "
    "diverged_at=64; lookup_ms=0.5"
)


def refusal(code: str, *, status: int | None = None, message: str = "") -> ClientError:
    response: dict[str, Any] = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        response |= {"OriginalStatusCode": status, "OriginalMessage": message}
    return ClientError(response, "InvokeEndpoint")


class Runtime:
    """Stands for boto3's client: raises what it was told to, else answers; remembers every call."""

    def __init__(self, *faults: Exception, has_sessions: bool = False) -> None:
        self.faults = list(faults)
        self.calls: list[dict[str, Any]] = []
        self.slept: list[float] = []
        self._has_sessions = has_sessions
        self._num_sessions = 0

    def invoke_endpoint(self, **call: Any) -> dict[str, Any]:
        self._record(call)
        answer = {"Body": io.BytesIO(b'{"a": 1}'), "ContentType": "application/json", "CustomAttributes": HEADER}
        if self._has_sessions and call.get("SessionId") == "NEW_SESSION":
            self._num_sessions += 1
            expires = datetime.now(UTC) + timedelta(hours=1)
            answer["NewSessionId"] = f"s{self._num_sessions}; Expires={expires:%Y-%m-%dT%H:%M:%SZ}"
        return answer

    def invoke_endpoint_with_response_stream(self, **call: Any) -> dict[str, Any]:
        self._record(call)
        pieces = (b'data: {"token": 1}\n\nda', b'ta: {"token": 2}\n\ndata: [DONE]\n\n')
        return {"Body": [{"PayloadPart": {"Bytes": piece}} for piece in pieces]}

    def _record(self, call: dict[str, Any]) -> None:
        self.calls.append(call)
        if self.faults:
            raise self.faults.pop(0)

    def client(self, **settings: Any) -> PrefixClient:
        return PrefixClient("e", client=self, sleep=self.slept.append, **settings)


def test_the_prompt_leads_the_body_and_the_rest_follows_in_one_order() -> None:
    first = {"stream": True, "parameters": {"seed": 1}, "inputs": "text é"}
    second = {"inputs": "text é", "parameters": {"seed": 1}, "stream": True}
    assert canonical_body(first) == canonical_body(second)
    assert canonical_body(first) == '{"inputs":"text é","parameters":{"seed":1},"stream":true}'.encode()


def test_tools_stand_before_messages_and_a_role_before_its_content() -> None:
    body = {"max_tokens": 1, "messages": [{"content": "hi", "role": "user"}], "tools": [{"b": 1, "a": 2}]}
    assert canonical_body(body) == (
        b'{"tools":[{"b":1,"a":2}],"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    )


def test_a_registered_template_stands_before_its_variables() -> None:
    body = {"variables": {"a": 1}, "parameters": {}, "template": "letters"}
    assert canonical_body(body) == b'{"template":"letters","variables":{"a":1},"parameters":{}}'


def test_composing_puts_shared_text_first_and_own_values_last() -> None:
    assert compose("Template.", tenant="We are Acme.", variables={"q": "why", "n": 3}) == (
        "Template.\n\nWe are Acme.\n\nq: why\nn: 3"
    )


def test_variants_of_a_template_share_their_first_bytes_and_their_prefix_id() -> None:
    template = "Sort this letter into a drawer. " * 60
    ready = [prefix_aware(Body=json.dumps({"parameters": {"seed": n}, "inputs": f"{template}{n}"})) for n in range(3)]
    assert len({call["Body"][:1024] for call in ready}) == 1
    assert len({call["PrefixAwareId"] for call in ready}) == 1
    assert len({call["InferenceId"] for call in ready}) == 3


def test_a_body_that_is_no_json_object_is_sent_as_it_is() -> None:
    call = prefix_aware(Body=b"\x00\x01", ContentType="application/octet-stream", EndpointName="e")
    assert (call["Body"], call["ContentType"]) == (b"\x00\x01", "application/octet-stream")


def test_what_the_caller_names_wins() -> None:
    call = prefix_aware(prefix_id="x", Body={"inputs": "a"}, PrefixAwareId="mine", InferenceId="i")
    assert (call["PrefixAwareId"], call["InferenceId"]) == ("mine", "i")


@pytest.mark.parametrize("prefix_id", ["", " a", "a" * 65, "a\n"])
def test_a_prefix_id_that_the_api_would_refuse_is_refused_here(prefix_id: str) -> None:
    with pytest.raises(RequestError, match="prefix_id"):
        prefix_aware(prefix_id=prefix_id, Body={"inputs": "a"})


def test_everything_that_is_sent_is_what_the_api_takes() -> None:
    names = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "eu-west-1"}
    model = boto3.client("sagemaker-runtime", **names).meta.service_model
    known = model.operation_model("InvokeEndpoint").input_shape.members
    fake = Runtime(has_sessions=True)
    fake.client(num_sessions=2).invoke({"inputs": "a"})
    for name, value in fake.calls[0].items():
        limits = known[name].metadata
        assert name == "Body" or (len(value) <= limits["max"] and re.match(r"[!-~]+\Z", value))


def test_facts_are_read_from_the_header() -> None:
    assert read_facts(HEADER) == CacheFacts(
        prompt_tokens=90,
        cached_tokens=64,
        tier=Tier.DEVICE,
        miss_reason=MissReason.DIVERGED,
        diverged_at=64,
        lookup_ms=0.5,
    )


@pytest.mark.parametrize("attributes", [None, "", "trace=1", "kvreuse=1; request_id=r", {}])
def test_without_facts_there_are_none(attributes: Any) -> None:
    assert read_facts(attributes) is None


@pytest.mark.parametrize(
    "fault",
    [
        refusal("ModelError", status=503),
        refusal("ThrottlingException"),
        refusal("ModelNotReadyException"),
        EndpointConnectionError(endpoint_url="x"),
    ],
)
def test_what_may_pass_is_sent_again_under_the_same_inference_id(fault: Exception) -> None:
    fake = Runtime(fault, fault)
    assert fake.client().invoke({"inputs": "a"}).body == {"a": 1}
    assert len(fake.calls) == 3
    assert len({call["InferenceId"] for call in fake.calls}) == 1
    assert fake.slept[0] < fake.slept[1]


@pytest.mark.parametrize("fault", [refusal("ModelError", status=400), refusal("ValidationError")])
def test_what_the_caller_must_mend_is_not_sent_again(fault: Exception) -> None:
    fake = Runtime(fault)
    with pytest.raises(ClientError):
        fake.client().invoke({"inputs": "a"})
    assert len(fake.calls) == 1


def test_it_gives_up_after_max_attempts() -> None:
    fake = Runtime(*[refusal("ModelError", status=503)] * 9)
    with pytest.raises(ClientError):
        fake.client(max_attempts=3).invoke({"inputs": "a"})
    assert len(fake.calls) == 3


def test_a_prefix_keeps_its_session() -> None:
    fake = Runtime(has_sessions=True)
    client = fake.client(num_sessions=4)
    for number in range(3):
        client.invoke({"inputs": "x" * 1100 + str(number)})
    assert [call["SessionId"] for call in fake.calls] == ["NEW_SESSION", "s1", "s1"]


def test_prefixes_spread_over_sessions_and_a_renewal_moves_none_of_the_others() -> None:
    sessions = Sessions(4)
    places = {f"p{n}": sessions.place(f"p{n}") for n in range(200)}
    assert sorted(set(places.values())) == [0, 1, 2, 3]
    sessions.put(1, "new; Expires=2099-01-01T00:00:00Z")
    assert places == {prefix: sessions.place(prefix) for prefix in places}
    more = Sessions(5)
    moved = [prefix for prefix, place in places.items() if more.place(prefix) != place]
    assert all(more.place(prefix) == 4 for prefix in moved)


def test_a_session_near_its_end_is_renewed() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    sessions = Sessions(1, clock=lambda: now)
    sessions.put(0, "id; Expires=2030-01-01T00:00:31Z")
    assert sessions.get(0) == "id"
    now += 2
    assert sessions.get(0) is None


def test_a_lost_session_is_replaced_at_once() -> None:
    fake = Runtime(has_sessions=True)
    client = fake.client(num_sessions=1)
    client.invoke({"inputs": "a"})
    fake.faults = [refusal("ModelError", status=400, message="the session s1 is unknown or expired")]
    client.invoke({"inputs": "a"})
    assert [call["SessionId"] for call in fake.calls] == ["NEW_SESSION", "s1", "NEW_SESSION"]
    assert fake.slept == []


def test_a_stream_opens_its_session_with_an_ordinary_call() -> None:
    fake = Runtime(has_sessions=True)
    list(fake.client(num_sessions=1).stream({"inputs": "a", "parameters": {"seed": 1}}))
    opener, stream = fake.calls
    assert json.loads(opener["Body"]) == {"requestType": "NEW_SESSION"}
    assert (opener["SessionId"], stream["SessionId"]) == ("NEW_SESSION", "s1")


def test_an_endpoint_without_sessions_still_streams() -> None:
    fake = Runtime()
    assert len(list(fake.client(num_sessions=1).stream({"inputs": "a"}))) == 2
    assert "SessionId" not in fake.calls[-1]


def test_a_stream_gives_events_whole_however_they_are_cut() -> None:
    assert list(Runtime().client().stream({"inputs": "a"})) == [{"token": 1}, {"token": 2}]


def test_the_async_face_does_the_same() -> None:
    async def both() -> tuple[Any, list[Any]]:
        client = Runtime().client()
        return (await client.ainvoke({"inputs": "a"})).body, [event async for event in client.astream({"inputs": "a"})]

    assert asyncio.run(both()) == ({"a": 1}, [{"token": 1}, {"token": 2}])


@pytest.fixture
def endpoint(make_site: MakeSite) -> Iterator[Any]:
    """The container over a fake engine, behind the hosting runtime, for boto3's own client."""
    with runtime(make_site().url) as url:
        client = runtime_client(url)
        yield client
        client.close()


def test_a_second_variant_reports_its_hit_through_the_real_client(endpoint: Any) -> None:
    client = PrefixClient(ENDPOINT, client=endpoint)
    answers = [
        client.invoke({"inputs": f"One shared template. {n}", "parameters": {"max_new_tokens": 2}}) for n in (1, 2)
    ]
    cold, hit = [answer.facts for answer in answers]
    assert cold is not None and hit is not None
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 20)


def test_a_session_of_the_real_container_is_opened_used_and_replaced(endpoint: Any) -> None:
    client = PrefixClient(ENDPOINT, client=endpoint, num_sessions=1)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    first, second = client.invoke(body), client.invoke(body)
    assert "NewSessionId" in first.response
    assert "NewSessionId" not in second.response
    assert client._sessions is not None
    client._sessions.put(0, "gone")
    assert "NewSessionId" in client.invoke(body).response
    client._sessions.drop(0)
    assert len(list(client.stream(body))) > 1


def test_the_last_event_of_a_real_stream_has_the_facts(endpoint: Any) -> None:
    *_, last = PrefixClient(ENDPOINT, client=endpoint).stream({"inputs": "hello", "parameters": {"max_new_tokens": 3}})
    facts = event_facts(last)
    assert facts is not None
    assert facts.prompt_tokens == 5


def test_an_existing_call_is_wrapped_by_a_plain_function(endpoint: Any) -> None:
    response = endpoint.invoke_endpoint(**prefix_aware(EndpointName=ENDPOINT, Body=b'{"inputs": "hello"}'))
    assert read_facts(response["CustomAttributes"]) is not None
