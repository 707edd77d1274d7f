"""Handlers of every legal shape, run through the toolkit in the server's process."""

from __future__ import annotations

import io
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes import FakeEngine, expected_text
from server.conftest import MakeSite, Site

from kvreuse.errors import RequestError
from kvreuse.server import handler
from kvreuse.server.toolkit import Toolkit

Serve = Callable[..., Site]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def serve(make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A Site over the handler whose source is given, found in the model's code/ folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(source: str, **settings: Any) -> Site:
        name = f"handler_{tmp_path.name}"
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / f"{name}.py").write_text(textwrap.dedent(source))
        site = make_site(is_loaded=False, **settings)
        site.load(entry_point=f"{name}.py", model_dir=str(tmp_path))
        return site

    yield make
    for name in [name for name in sys.modules if name.startswith("handler_")]:
        del sys.modules[name]


def post(site: Site, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{site.url}/invocations", json=body, headers=headers, timeout=20)


def test_transform_fn_of_a_user_is_called_with_their_model(serve: Serve) -> None:
    site = serve("""
        def model_fn(model_dir): return "model"
        def transform_fn(model, data, content_type, accept): return f"{model} {data} {content_type}", "text/plain"
    """)
    response = post(site, {"a": 1})
    assert response.text == 'model {"a":1} application/json'
    assert response.headers["content-type"].startswith("text/plain")
    assert httpx.get(f"{site.url}/ping").status_code == 200


def test_three_hooks_with_context_and_warm_up(serve: Serve) -> None:
    site = serve("""
        import json
        done = []
        def pre_model_fn(model_dir): done.append("pre")
        def model_fn(model_dir, context): done.append("model"); return done
        def model_warmup_fn(model_dir, model): done.append("warm")
        def input_fn(data, content_type): return json.loads(data)
        def predict_fn(data, model, context):
            context.set_response_header(0, "X-Mine", context.get_request_header(0, "x-yours"))
            return {"got": data, "done": model}
        def output_fn(prediction, accept): return json.dumps(prediction)
    """)
    response = post(site, [1], **{"X-Yours": "abc"})
    assert response.json() == {"got": [1], "done": ["pre", "model", "warm"]}
    assert response.headers["x-mine"] == "abc"


def test_a_handler_with_an_output_function_only_gets_our_generation(serve: Serve) -> None:
    site = serve("""
        import json
        def output_fn(prediction, accept): return json.dumps({"mine": json.loads(prediction.join())})
    """)
    response = post(site, {"inputs": "hello", "parameters": {"max_new_tokens": 3}})
    assert response.json() == {"mine": [{"generated_text": expected_text("hello", 3)}]}


def test_a_handler_with_an_input_function_only_still_streams(serve: Serve) -> None:
    site = serve("""
        import json
        def input_fn(data, content_type): return {"inputs": json.loads(data)["q"], "stream": True}
    """)
    response = post(site, {"q": "hello"})
    assert response.headers["content-type"].startswith("text/event-stream")


def test_a_handler_that_calls_ours_keeps_one_engine_and_the_other_routes(serve: Serve) -> None:
    site = serve("""
        from kvreuse.server import handler
        def model_fn(model_dir): return handler.model_fn(model_dir)
        def transform_fn(model, data, content_type, accept):
            return model.answer({"inputs": "fixed " + data, "parameters": {"max_new_tokens": 3}}).join()
    """)
    assert post(site, 7).json() == [{"generated_text": expected_text("fixed 7", 3)}]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{site.url}/v1/chat/completions", json=chat).status_code == 200


def test_a_handler_without_the_engine_has_no_openai_routes(serve: Serve) -> None:
    site = serve("""
        def model_fn(model_dir): return None
        def transform_fn(model, data, content_type, accept): return data
    """)
    assert httpx.post(f"{site.url}/v1/chat/completions", json={}).status_code == 404


def test_an_iterator_of_a_user_is_streamed(serve: Serve) -> None:
    site = serve("""
        def model_fn(model_dir): return None
        def transform_fn(model, data, content_type, accept): return (f"{i}\\n" for i in range(3)), "text/plain"
    """)
    assert post(site, {}).text == "0\n1\n2\n"


def test_every_request_sees_its_own_context_and_all_run_at_once(serve: Serve) -> None:
    """All 64 meet at a barrier, which passes only when each has its own thread."""
    num = 64
    site = serve(
        f"""
        import threading
        barrier = threading.Barrier({num}, timeout=10)
        def model_fn(model_dir): return None
        def transform_fn(model, data, content_type, accept, context):
            barrier.wait()
            return context.get_request_header(0, "x-me")
        """,
        max_concurrency=num,
    )
    with ThreadPoolExecutor(num) as pool:
        texts = list(pool.map(lambda i: post(site, {}, **{"x-me": str(i)}).text, range(num)))
    assert texts == [str(i) for i in range(num)]


def test_a_users_error_has_its_status_and_no_traceback(serve: Serve) -> None:
    site = serve("""
        from sagemaker_inference.errors import BaseInferenceToolkitError
        def model_fn(model_dir): return None
        def transform_fn(model, data, content_type, accept):
            if data == "1": raise BaseInferenceToolkitError(418, "short and stout", "teapot")
            raise ValueError("SECRET")
    """)
    refused, broken = post(site, 1), post(site, 2)
    assert (refused.status_code, refused.json()["error"]["message"]) == (418, "short and stout")
    assert (broken.status_code, broken.json()["error"]["message"]) == (500, "internal error")
    assert "Traceback" not in refused.text + broken.text


def test_pickled_arrays_are_never_loaded(serve: Serve, tmp_path: Path) -> None:
    site = serve("def output_fn(prediction, accept): return str(prediction)")
    witness = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()], dtype=object), allow_pickle=True)
    headers = {"content-type": "application/x-npy"}
    response = httpx.post(f"{site.url}/invocations", content=buffer.getvalue(), headers=headers)
    assert response.status_code == 415
    assert not witness.exists()


def test_transform_fn_beside_predict_fn_is_refused_at_load(serve: Serve) -> None:
    with pytest.raises(ValueError, match="Cannot use transform_fn"):
        serve("""
            def transform_fn(model, data, content_type, accept): return data
            def predict_fn(data, model): return data
        """)


def test_the_containers_handler_is_recognised_as_our_own(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    make_site()
    monkeypatch.setattr(sys, "path", [str(ROOT / "container"), *sys.path])
    monkeypatch.delitem(sys.modules, "inference", raising=False)
    toolkit = Toolkit(entry_point="inference.py", model_dir="/nonexistent")
    toolkit.load()
    assert toolkit.is_own
    assert Path(sys.modules.pop("inference").__file__ or "") == ROOT / "container" / "inference.py"


class StockContext:
    """What multi-model-server passes to hooks."""

    def __init__(self) -> None:
        self.system_properties = {"server_name": "MMS"}
        self.status = 200
        self.headers: dict[str, str] = {}

    def get_all_request_header(self, index: int) -> dict[str, str]:
        return {}

    def get_request_id(self, index: int = 0) -> str:
        return "abc"

    def set_response_header(self, index: int, key: str, value: str) -> None:
        self.headers[key] = value

    def set_response_status(self, code: int = 200, phrase: str = "", index: int = 0) -> None:
        self.status = code


def transform(site: Site, body: Any, context: Any) -> Any:
    return handler.transform_fn(site.service, json.dumps(body), "application/json", "*/*", context)


def test_under_the_stock_server_an_answer_is_joined(site: Site) -> None:
    context = StockContext()
    body, content_type = transform(site, {"inputs": "hello", "parameters": {"max_new_tokens": 3}}, context)
    assert json.loads(body) == [{"generated_text": expected_text("hello", 3)}]
    assert content_type == "application/json"
    assert "cached_tokens=0" in context.headers["X-Amzn-SageMaker-Custom-Attributes"]


def test_under_the_stock_server_a_stream_is_joined(site: Site) -> None:
    body, content_type = transform(site, {"inputs": "hello", "stream": True}, StockContext())
    assert content_type == "text/event-stream"
    assert body.count(b"data: ") == 257


def test_under_the_stock_server_an_error_is_a_status_and_a_body(site: Site) -> None:
    context = StockContext()
    body, _ = transform(site, {"inputs": 1}, context)
    assert context.status == 400
    assert json.loads(body)["error"]["request_id"] == "abc"


def test_without_a_context_an_error_is_raised(site: Site) -> None:
    with pytest.raises(RequestError, match="inputs must be"):
        transform(site, {"inputs": 1}, None)


def test_threads_may_join_answers_at_the_same_time(site: Site) -> None:
    barrier = threading.Barrier(16, timeout=10)

    def one(i: int) -> Any:
        barrier.wait()
        body = {"inputs": f"p{i}", "parameters": {"max_new_tokens": 3}}
        return json.loads(site.service.answer(body).join())[0]["generated_text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [expected_text(f"p{i}", 3) for i in range(16)]


def test_many_requests_of_our_own_handler_run_at_once_without_threads(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.005), max_concurrency=1)
    num_threads = threading.active_count()
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 60}}
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: post(site, body).status_code, range(64)))
    assert answers == [200] * 64
    assert site.engine.peak_running > 32
    assert threading.active_count() <= num_threads + 1
