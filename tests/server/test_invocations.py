"""POST /invocations as Hugging Face callers use it."""

from __future__ import annotations

import json

import httpx
from fakes import expected_text
from server.conftest import Site


def test_a_string_is_answered_as_the_hugging_face_containers_do(client: httpx.Client) -> None:
    response = client.post("/invocations", json={"inputs": "hello", "parameters": {"max_new_tokens": 5}})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == [{"generated_text": expected_text("hello", 5)}]


def test_cache_facts_are_in_the_custom_attributes(client: httpx.Client) -> None:
    body = {"inputs": "a long shared head, then one", "parameters": {"max_new_tokens": 2}}
    client.post("/invocations", json=body)
    response = client.post("/invocations", json=body | {"inputs": "a long shared head, then two"})
    attributes = dict(pair.split("=") for pair in response.headers["x-amzn-sagemaker-custom-attributes"].split("; "))
    assert attributes["kvreuse"] == "1"
    assert (attributes["cached_tokens"], attributes["prompt_tokens"], attributes["tier"]) == ("24", "28", "device")
    assert attributes["request_id"] == response.headers["x-request-id"]


def test_details_carry_usage_and_kv_cache(client: httpx.Client) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3, "details": True}}
    details = client.post("/invocations", json=body).json()[0]["details"]
    assert details["finish_reason"] == "length"
    assert details["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert details["kv_cache"]["miss_reason"] == "cold"
    assert set(details["kv_cache"]) == {
        *("cached_tokens", "prompt_tokens", "tier", "miss_reason", "diverged_at"),
        *("lookup_ms", "queue_ms", "ttft_ms"),
    }


def test_n_inputs_give_n_ordered_answers(client: httpx.Client) -> None:
    prompts = [f"prompt {i}" for i in range(7)]
    response = client.post("/invocations", json={"inputs": prompts, "parameters": {"max_new_tokens": 4}})
    assert [item["generated_text"] for item in response.json()] == [expected_text(p, 4) for p in prompts]


def test_a_bad_input_answers_for_itself_only(client: httpx.Client) -> None:
    inputs = ["one", 2, "", "x" * 30_000, "five"]
    response = client.post("/invocations", json={"inputs": inputs, "parameters": {"max_new_tokens": 4}})
    assert response.status_code == 200
    answers = response.json()
    assert answers[0] == {"generated_text": expected_text("one", 4)}
    assert answers[4] == {"generated_text": expected_text("five", 4)}
    assert answers[1]["error"]["param"] == "inputs[1]"
    assert answers[2]["error"]["type"] == "invalid_request_error"
    assert "20000" in answers[3]["error"]["message"]


def test_n_answers_share_one_prompt(client: httpx.Client, site: Site) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "n": 3, "do_sample": True}}
    texts = [item["generated_text"] for item in client.post("/invocations", json=body).json()]
    assert texts == [expected_text("hello", 4, index=i) for i in range(3)]
    assert len(site.engine.submitted) == 1


def test_full_text_repeats_the_prompt(client: httpx.Client) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "return_full_text": True}}
    assert client.post("/invocations", json=body).json()[0]["generated_text"] == "hello" + expected_text("hello", 4)


def test_truncate_keeps_the_end_of_the_prompt(client: httpx.Client) -> None:
    body = {"inputs": "far too long", "parameters": {"max_new_tokens": 4, "truncate": 4}}
    assert client.post("/invocations", json=body).json()[0]["generated_text"] == expected_text("long", 4)


def test_an_open_length_fits_what_the_model_still_holds(client: httpx.Client, site: Site) -> None:
    response = client.post("/invocations", json={"inputs": "x" * 19_990})
    assert response.status_code == 200
    assert site.engine.submitted[0].sampling.max_new_tokens == 10


def test_content_type_parameters_do_not_matter(client: httpx.Client) -> None:
    content = json.dumps({"inputs": "hellö", "parameters": {"max_new_tokens": 2}}).encode()
    response = client.post("/invocations", content=content, headers={"content-type": "Application/JSON; charset=UTF-8"})
    assert response.json() == [{"generated_text": expected_text("hellö", 2)}]


def test_messages_and_prompt_are_known_by_their_shape(client: httpx.Client) -> None:
    chat = client.post("/invocations", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).json()
    text = client.post("/invocations", json={"prompt": "hi", "max_tokens": 2}).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == expected_text("user:hi\n", 2)
    assert text["object"] == "text_completion"
    assert text["choices"][0]["text"] == expected_text("hi", 2)


def test_reuse_can_be_switched_off_for_one_request(client: httpx.Client, site: Site) -> None:
    client.post("/invocations", json={"inputs": "hello", "parameters": {"kv_cache_reuse": False}})
    assert site.engine.submitted[0].reuse is False


def test_a_long_body_is_answered_too(client: httpx.Client) -> None:
    prompt = "y" * 17_000
    response = client.post("/invocations", json={"inputs": prompt, "parameters": {"max_new_tokens": 2}})
    assert response.json() == [{"generated_text": expected_text(prompt, 2)}]


def test_one_log_line_per_request_and_no_prompt_in_it(client: httpx.Client, site: Site) -> None:
    client.post("/invocations", json={"inputs": "SECRET prompt", "parameters": {"max_new_tokens": 3}})
    client.post("/invocations", json={"inputs": "SECRET prompt", "parameters": {"SECRET": 1, "top_p": "SECRET"}})
    ok, bad = site.log_lines()
    assert (ok["status"], ok["prompt_tokens"], ok["completion_tokens"], ok["cached_tokens"]) == (200, 13, 3, 0)
    assert (bad["status"], bad["error"]) == (400, "invalid_request_error")
    assert "SECRET" not in site.log.getvalue()
