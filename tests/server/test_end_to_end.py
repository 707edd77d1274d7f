"""The container's entrypoint with the demo model: one process, real text, real hits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = "You are a careful clerk. Read the letter and say in one word what it asks for. " * 8
CANARY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}


class Container:
    def __init__(self, log: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        settings = {
            "OPTION_MODEL_ID": "demo",
            "OPTION_AUDIT_RATE": "0",
            "OPTION_KV_CACHE_MEMORY_BYTES": str(256 * 2**20),
            "OPTION_MAX_MODEL_LEN": "2048",
            "OPTION_HOST": "127.0.0.1",
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "KVREUSE_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "src"),
        }
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [ROOT / "container" / "serve", "serve"], env=os.environ | settings, stdout=out
            )

    def wait(self) -> None:
        for _ in range(3000):
            if self.process.poll() is not None:
                raise AssertionError(f"the container ended with {self.process.returncode}")
            try:
                if httpx.get(f"{self.url}/ping").status_code == 200:
                    return
            except httpx.ConnectError:
                pass
            time.sleep(0.05)
        raise AssertionError("the container was never ready")

    def post(self, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/invocations", json=body, timeout=60)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    container = Container(tmp_path_factory.mktemp("container") / "stdout")
    container.wait()
    yield container
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(30) == 0


def attributes(response: httpx.Response) -> dict[str, str]:
    header = response.headers["x-amzn-sagemaker-custom-attributes"]
    return dict(pair.split("=") for pair in header.split("; "))


def test_the_second_variant_of_a_template_hits(container: Container) -> None:
    first, second = (
        container.post({"inputs": TEMPLATE + letter, "parameters": {"max_new_tokens": 4}})
        for letter in ("Dear sir, send me the bill.", "Dear madam, where is my parcel?")
    )
    assert first.status_code == 200
    assert attributes(first)["cached_tokens"] == "0"
    hit = attributes(second)
    assert int(hit["cached_tokens"]) >= 96
    assert int(hit["cached_tokens"]) < int(hit["prompt_tokens"])
    assert hit["tier"] == "device"


def test_text_is_the_same_cold_warm_streamed_and_without_reuse(container: Container) -> None:
    body: dict[str, Any] = {"inputs": TEMPLATE + "Hello.", "parameters": {"max_new_tokens": 8}}
    cold, warm = (container.post(body).json()[0]["generated_text"] for _ in range(2))
    fresh = container.post({**body, "parameters": {"max_new_tokens": 8, "kv_cache_reuse": False}})
    lines = container.post({**body, "stream": True}).text.splitlines()
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert cold == warm == fresh.json()[0]["generated_text"] == streamed[-1]["generated_text"]
    assert "".join(event["token"]["text"] for event in streamed) == cold
    assert attributes(fresh)["miss_reason"] == "disabled"
    assert streamed[-1]["details"]["kv_cache"]["cached_tokens"] > 0


def test_the_official_client_chats(container: Container) -> None:
    with openai.OpenAI(base_url=f"{container.url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "Say hello."}]
        whole = client.chat.completions.create(model="", messages=messages, max_tokens=8, temperature=0, logprobs=True)
        chunks = client.chat.completions.create(model="", messages=messages, max_tokens=8, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == streamed != ""
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(token.logprob <= 0 for token in logprobs.content)


def test_an_answer_that_must_be_json_is(container: Container) -> None:
    # Closed and greedy: nothing that the model could go on with until its tokens are used up.
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    messages = [{"role": "user", "content": "Name the capital of France."}]
    answer = container.post(
        {"messages": messages, "response_format": wanted, "max_tokens": 60, "temperature": 0}
    ).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    refused = container.post({"messages": messages, "response_format": wanted})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_a_session_keeps_its_prefix_and_closes(container: Container) -> None:
    session_id = "X-Amzn-SageMaker-Session-Id"
    body = {"inputs": "A session's own letter. " * 20, "parameters": {"max_new_tokens": 2}}
    opened = httpx.post(f"{container.url}/invocations", json=body, headers={session_id: "NEW_SESSION"}, timeout=60)
    session = opened.headers["X-Amzn-SageMaker-New-Session-Id"].partition(";")[0]
    pinned = "kvreuse_kv_pinned_slots"
    assert f"\n{pinned} 0.0\n" not in httpx.get(f"{container.url}/metrics").text
    closed = httpx.post(f"{container.url}/invocations", json={"requestType": "CLOSE"}, headers={session_id: session})
    assert closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == session
    assert f"\n{pinned} 0.0\n" in httpx.get(f"{container.url}/metrics").text


def test_odd_requests_leave_a_canary_unchanged_and_ping_alive(container: Container) -> None:
    before = container.post(CANARY).json()
    odd: list[Any] = [
        {"inputs": "x " * 5000},
        {"inputs": "a", "parameters": {"stop_token_ids": [2**31 - 1], "max_new_tokens": 2}},
        {"prompt": [10**6], "max_tokens": 2},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}, "max_tokens": 2},
        {"inputs": "a", "parameters": {"logit_bias": {"999999999": 5}, "max_new_tokens": 2}},
        {"inputs": "a", "parameters": {"top_k": 1_000_000, "temperature": 100, "max_new_tokens": 2}},
        {"inputs": "\x00￿", "parameters": {"max_new_tokens": 2, "top_n_tokens": 20}},
    ]
    for body in odd:
        assert container.post(body).status_code in (200, 400, 422)
        assert httpx.get(f"{container.url}/ping").status_code == 200
    assert container.post(CANARY).json() == before


def test_many_streams_at_once_all_end_well(container: Container) -> None:
    def one(number: int) -> str:
        body = {"inputs": f"{TEMPLATE} Letter {number}.", "parameters": {"max_new_tokens": 4}, "stream": True}
        return container.post(body).text

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(one, range(32)))
    assert all('"generated_text":"' in text and text.endswith("}\n\n") for text in texts)


def test_metrics_agree_with_the_log(container: Container) -> None:
    container.post(CANARY)
    lines = [json.loads(line) for line in container.log.read_text().splitlines()]
    counted = sum(line["completion_tokens"] for line in lines if line["status"] == 200)
    text = httpx.get(f"{container.url}/metrics").text
    assert f"\nkvreuse_generated_tokens_total {float(counted)}\n" in text
    assert all(line["event"] == "request" for line in lines)
