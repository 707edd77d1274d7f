"""The handler for DJL Serving over a fake engine, driven as DJL's asynchronous engine drives it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, expected_text
from server.conftest import MakeSite, Site
from serving import ROOT

from kvreuse.errors import ConfigError
from kvreuse.server import handler

STAND_IN = Path(__file__).parent / "djl_stand_in"
HELLO = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
Ask = Callable[..., list[Any]]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """container/model.py, loaded from its file as DJL does."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    spec = importlib.util.spec_from_file_location("model", ROOT / "container" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def invoke(model: types.ModuleType, body: Any, **properties: str) -> list[Any]:
    """All outputs of one request, with what DJL refuses refused."""
    from djl_python import Input, Output

    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = await model.handle(Input(data, model_dir="/opt/ml/model", **properties))
    if given is None:
        return []
    outputs = [output async for output in given] if isinstance(given, types.AsyncGeneratorType) else [given]
    assert all(isinstance(output, Output) for output in outputs)
    return outputs


@pytest.fixture
def ask(model: types.ModuleType) -> Ask:
    return lambda body, **properties: asyncio.run(invoke(model, body, **properties))


def text_of(outputs: list[Any]) -> str:
    return "".join(output.data for output in outputs)


def test_the_first_empty_request_loads_the_model_and_has_no_answer(ask: Ask, make_site: MakeSite) -> None:
    site = make_site()
    assert ask(None) == []
    assert site.engine.submitted == []


def test_a_model_that_cannot_be_had_fails_the_first_request(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "process", handler.Process())
    monkeypatch.setenv("OPTION_MODEL_ID", "/nonexistent/model")
    with pytest.raises(ConfigError):
        ask(None)


def test_an_answer_is_whole_and_carries_its_cache_facts(ask: Ask, site: Site) -> None:
    (output,) = ask(HELLO, Content_Type="application/json; charset=utf-8")
    assert json.loads(output.data) == [{"generated_text": expected_text("hello", 3)}]
    assert (output.last, output.caller_code) == (True, None)
    assert "cached_tokens=0" in output.properties["X-Amzn-SageMaker-Custom-Attributes"]


@pytest.mark.parametrize(
    "way",
    [
        {"body": HELLO | {"stream": True}},
        {"body": HELLO, "Accept": "text/event-stream"},
        {"body": HELLO, "X_Amzn_SageMaker_Accept": "text/event-stream"},
    ],
)
def test_a_stream_is_events_and_a_last_output(ask: Ask, site: Site, way: dict[str, Any]) -> None:
    outputs = ask(**way)
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.properties["Content-Type"] for output in outputs} == {"text/event-stream"}
    lines = [line for line in text_of(outputs).splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["generated_text"] == expected_text("hello", 3)


@pytest.mark.parametrize(
    ("body", "properties", "status", "said"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b'"\xff"', {}, 400, "not valid UTF-8"),
        ({"inputs": 1, "stream": True}, {}, 400, "inputs must be"),
        (HELLO, {"Content_Type": "text/plain"}, 415, "application/json"),
        ({"inputs": "x" * 30_000}, {}, 422, "more than"),
    ],
)
def test_a_refusal_is_a_status_and_a_sentence(
    ask: Ask, site: Site, body: Any, properties: dict[str, str], status: int, said: str
) -> None:
    (output,) = ask(body, **properties)
    assert (output.caller_code, output.last) == (status, True)
    assert said in output.error


def test_headers_name_the_tenant(ask: Ask, make_site: MakeSite) -> None:
    site = make_site(tenant_mode="required")
    (refused,), (answered,) = ask(HELLO), ask(HELLO, X_KVReuse_Tenant="ada")
    assert refused.caller_code == 400
    assert answered.caller_code is None
    assert [request.scope.tenant for request in site.engine.submitted] == ["ada"]


def test_a_session_is_opened_as_in_any_other_server(ask: Ask, site: Site) -> None:
    (output,) = ask(HELLO, X_Amzn_SageMaker_Session_Id="NEW_SESSION")
    assert "; Expires=" in output.properties["X-Amzn-SageMaker-New-Session-Id"]


def test_a_fault_in_mid_stream_is_the_last_event(ask: Ask, make_site: MakeSite) -> None:
    make_site(engine=FakeEngine(step_s=0.05), stream_timeout_s=0.3)
    outputs = ask({"inputs": "hello", "stream": True})
    assert outputs[-1].last
    error = json.loads(outputs[-1].data.removeprefix("event: error\ndata: "))["error"]
    assert error["type"] == "deadline_exceeded"


def test_many_requests_run_at_once(model: types.ModuleType, make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.005))

    async def all_of_them() -> list[list[Any]]:
        calls: list[Awaitable[list[Any]]] = [
            invoke(model, {"inputs": f"p{i}", "parameters": {"max_new_tokens": 40}}) for i in range(32)
        ]
        return list(await asyncio.gather(*calls))

    answers = asyncio.run(all_of_them())
    assert [json.loads(text_of(answer))[0]["generated_text"] for answer in answers] == [
        expected_text(f"p{i}", 40) for i in range(32)
    ]
    assert site.engine.peak_running > 16


def test_a_dead_engine_ends_the_process_so_that_another_is_started(
    model: types.ModuleType, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_codes: list[int] = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    monkeypatch.setattr(model, "_GRACE_S", 0.0)
    site.engine.die()

    async def ask_and_stay() -> list[Any]:
        outputs = await invoke(model, HELLO)
        await asyncio.sleep(0.05)
        return outputs

    (output,) = asyncio.run(ask_and_stay())
    assert output.caller_code == 503
    assert exit_codes == [1]
