"""boto3's runtime client against the container, through a stand-in of the hosting runtime."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError
from fakes import FakeEngine, expected_text
from server.conftest import MakeSite, Site
from serving import Container
from shim import ENDPOINT, VARIANT, runtime, runtime_client

JSON = "application/json"
# As the client's own model of the service has it.
SESSION_HEADER = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
TEMPLATE = "Sort this letter into one of five drawers and say only the name of the drawer. " * 8


@contextmanager
def client_of(site: Site) -> Iterator[Any]:
    with runtime(site.url) as url, closing(runtime_client(url)) as client:
        yield client


def invoke(client: Any, body: Any, **named: str) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer: dict[str, Any] = client.invoke_endpoint(EndpointName=ENDPOINT, Body=data, **{"ContentType": JSON, **named})
    with answer["Body"] as unread:
        answer["Body"] = io.BytesIO(unread.read())
    return answer


def stream(client: Any, body: Any, **named: str) -> Iterator[bytes]:
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, Body=json.dumps(body).encode(), ContentType=JSON, **named
    )
    return payloads(answer["Body"])


def payloads(body: Any) -> Iterator[bytes]:
    with closing(body):
        for event in body:
            yield event["PayloadPart"]["Bytes"]


def events(pieces: Iterator[bytes]) -> list[dict[str, Any]]:
    lines = b"".join(pieces).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def attributes(answer: dict[str, Any]) -> dict[str, str]:
    return dict(pair.split("=") for pair in answer["CustomAttributes"].split("; "))


def refusal(client: Any, body: Any, **named: str) -> dict[str, Any]:
    with pytest.raises(ClientError) as caught:
        invoke(client, body, **named)
    response: dict[str, Any] = caught.value.response
    assert response["Error"]["Code"] == "ModelError"
    return response


def test_an_answer_carries_its_cache_facts_in_the_custom_attributes(sagemaker: Any) -> None:
    answers = [invoke(sagemaker, {"inputs": TEMPLATE + name, "parameters": {"max_new_tokens": 2}}) for name in "AB"]
    assert [isinstance(json.load(answer["Body"])[0]["generated_text"], str) for answer in answers] == [True, True]
    assert answers[0]["ContentType"] == JSON
    assert answers[0]["InvokedProductionVariant"] == VARIANT
    cold, hit = map(attributes, answers)
    assert cold["cached_tokens"] == "0"
    assert 96 <= int(hit["cached_tokens"]) < int(hit["prompt_tokens"])
    assert hit["tier"] == "device"


def test_a_stream_is_the_whole_answer_in_pieces(sagemaker: Any) -> None:
    body = {"inputs": "The tide rises because", "parameters": {"max_new_tokens": 8}}
    whole = json.load(invoke(sagemaker, body)["Body"])[0]["generated_text"]
    said = events(stream(sagemaker, {**body, "stream": True}))
    assert "".join(event["token"]["text"] for event in said) == said[-1]["generated_text"] == whole
    assert isinstance(said[-1]["details"]["kv_cache"]["cached_tokens"], int)


def test_each_piece_of_a_stream_is_whole_events(sagemaker: Any) -> None:
    pieces = list(stream(sagemaker, {"inputs": "Count: 1, 2,", "stream": True, "parameters": {"max_new_tokens": 6}}))
    assert len(pieces) > 1
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)


def test_accept_asks_for_a_stream_too(sagemaker: Any) -> None:
    body = {"inputs": "One", "parameters": {"max_new_tokens": 2}}
    assert len(events(stream(sagemaker, body, Accept="text/event-stream"))) == 3


def test_a_stream_names_its_request_and_its_content_type(sagemaker: Any) -> None:
    body = json.dumps({"inputs": "One", "stream": True, "parameters": {"max_new_tokens": 1}}).encode()
    answer = sagemaker.invoke_endpoint_with_response_stream(EndpointName=ENDPOINT, Body=body, ContentType=JSON)
    list(answer["Body"])
    assert answer["ContentType"].startswith("text/event-stream")
    assert attributes(answer)["request_id"]


def test_a_body_that_asks_for_no_stream_may_come_by_the_stream_call(sagemaker: Any) -> None:
    pieces = stream(sagemaker, {"inputs": "One", "parameters": {"max_new_tokens": 2}})
    assert isinstance(json.loads(b"".join(pieces))[0]["generated_text"], str)


def test_chat_and_completion_bodies_are_told_by_their_shape(sagemaker: Any) -> None:
    chat = invoke(sagemaker, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    text = invoke(sagemaker, {"prompt": "Hi", "max_tokens": 2})
    assert [json.load(answer["Body"])["object"] for answer in (chat, text)] == ["chat.completion", "text_completion"]


@pytest.mark.parametrize(
    ("body", "named", "status", "param"),
    [
        (b"{", {}, 400, None),
        (b'{"inputs": "\xff"}', {}, 400, None),
        (b"x", {"ContentType": "text/plain"}, 415, "Content-Type"),
        ({"inputs": "a", "parameters": {"top_p": 2}}, {}, 400, "parameters.top_p"),
        ({"inputs": "word " * 4000}, {}, 422, "inputs"),
        (b" " * (26 * 2**20), {}, 413, None),
    ],
)
def test_a_refusal_is_a_model_error_with_status_and_reason(
    sagemaker: Any, body: Any, named: dict[str, str], status: int, param: str | None
) -> None:
    response = refusal(sagemaker, body, **named)
    assert response["OriginalStatusCode"] == status
    error = json.loads(response["OriginalMessage"])["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["request_id"]


def test_a_refused_stream_is_a_model_error_before_any_event(sagemaker: Any) -> None:
    with pytest.raises(ClientError) as caught:
        stream(sagemaker, {"inputs": 1, "stream": True})
    assert caught.value.response["Error"]["Code"] == "ModelError"
    assert caught.value.response["OriginalStatusCode"] == 400


def test_a_full_queue_is_a_model_error_with_503(make_site: MakeSite) -> None:
    engine = FakeEngine(max_outstanding=0)
    with client_of(make_site(engine=engine)) as client:
        response = refusal(client, {"inputs": "a"})
    assert response["OriginalStatusCode"] == 503
    assert json.loads(response["OriginalMessage"])["error"]["type"] == "overloaded"


def test_a_step_that_fails_in_mid_stream_is_a_model_stream_error(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.01))
    with client_of(site) as client:
        pieces = stream(client, {"inputs": "hello", "stream": True})
        heard = [next(pieces)]
        site.engine.crash_step()
        with pytest.raises(EventStreamError) as caught:
            heard.extend(pieces)
    assert caught.value.response["Error"]["Code"] == "ModelStreamError"
    error = json.loads(heard[-1].partition(b"event: error\ndata: ")[2])["error"]
    assert error["type"] == "internal_error"
    assert heard[0].startswith(b"data: ")


def test_a_stream_past_its_deadline_is_a_model_stream_error(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.05), stream_timeout_s=0.5)
    with client_of(site) as client:
        pieces = stream(client, {"inputs": "hello", "stream": True})
        with pytest.raises(EventStreamError, match="ModelStreamError"):
            list(pieces)
    assert site.engine.aborted


def test_a_caller_who_leaves_a_stream_ends_the_request(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.01))
    with client_of(site) as client:
        answer = client.invoke_endpoint_with_response_stream(
            EndpointName=ENDPOINT, Body=b'{"inputs": "hello", "stream": true}', ContentType=JSON
        )
        next(iter(answer["Body"]))
        answer["Body"].close()
        for _ in range(1000):
            if not site.engine.num_outstanding:
                break
            time.sleep(0.01)
    assert site.engine.num_outstanding == 0
    assert site.engine.aborted


def test_many_clients_each_get_their_own_answer(make_site: MakeSite) -> None:
    with client_of(make_site(engine=FakeEngine(step_s=0.002))) as client:

        def one(number: int) -> bool:
            body = {"inputs": f"prompt {number}", "parameters": {"max_new_tokens": 5}}
            text = json.load(invoke(client, body)["Body"])[0]["generated_text"]
            return bool(text == expected_text(f"prompt {number}", 5))

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(one, range(48)))


def test_attributes_of_a_caller_change_nothing_in_the_answer(sagemaker: Any, container: Container) -> None:
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}}
    plain = json.load(invoke(sagemaker, body)["Body"])
    named = {"CustomAttributes": "trace=1", "InferenceId": "me-1", "TargetVariant": VARIANT}
    answer = invoke(sagemaker, body, **named)
    assert json.load(answer["Body"]) == plain
    assert attributes(answer)["kvreuse"] == "1"
    assert container.ping() == 200


def test_a_session_is_opened_used_and_closed(sagemaker: Any) -> None:
    body = {"inputs": TEMPLATE + "A session.", "parameters": {"max_new_tokens": 2}}
    opened = invoke(sagemaker, body, SessionId="NEW_SESSION")
    assert SESSION_HEADER.fullmatch(opened["NewSessionId"])
    session_id = opened["NewSessionId"].partition(";")[0]
    assert int(attributes(invoke(sagemaker, body, SessionId=session_id))["cached_tokens"]) > 0
    assert events(stream(sagemaker, {**body, "stream": True}, SessionId=session_id))
    closed = invoke(sagemaker, {"requestType": "CLOSE"}, SessionId=session_id)
    assert closed["ClosedSessionId"] == session_id
    assert refusal(sagemaker, body, SessionId=session_id)["OriginalStatusCode"] == 400


def test_a_session_that_nobody_opened_is_an_error(sagemaker: Any) -> None:
    response = refusal(sagemaker, {"inputs": "a"}, SessionId="made-up")
    assert response["OriginalStatusCode"] == 400
    assert json.loads(response["OriginalMessage"])["error"]["param"] == "X-Amzn-SageMaker-Session-Id"


def test_the_same_inference_id_in_flight_is_one_computation(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.02))
    with client_of(site) as client, ThreadPoolExecutor(8) as pool:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 40}}
        texts = list(pool.map(lambda _: invoke(client, body, InferenceId="again")["Body"].read(), range(8)))
    assert len(set(texts)) == 1
    assert len(site.engine.submitted) == 1


def test_custom_attributes_can_name_the_tenant(make_site: MakeSite) -> None:
    site = make_site(tenant_mode="required", tenant_header="X-Amzn-SageMaker-Custom-Attributes")
    with client_of(site) as client:
        assert refusal(client, {"inputs": "hello"})["OriginalStatusCode"] == 400
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 1}}
        invoke(client, body, CustomAttributes="trace=1;tenant=ada")
    assert [request.scope.tenant for request in site.engine.submitted] == ["ada"]
