"""The stock multi-model-server with this container's handler: what "drop-in" means.

Needs java and the package multi-model-server beside the others; skipped where one of them is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from serving import ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("java") is None, reason="the stock model server needs java"),
    pytest.mark.skipif(find_spec("mms") is None, reason="the package multi-model-server is not installed"),
]
START_S = 120
# As the inference toolkit configures it, with one worker.
PROPERTIES = """
enable_envvars_config=true
decode_input_request=false
load_models=ALL
default_workers_per_model=1
default_service_handler=sagemaker_inference.default_handler_service
inference_address=http://127.0.0.1:{inference}
management_address=http://127.0.0.1:{management}
"""


def free_ports(num: int) -> list[int]:
    """Below 32768: its configuration takes no higher ones."""
    found: list[int] = []
    for port in range(20_000, 32_768):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == num:
            break
    return found


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{url}/invocations", content=data, headers={"Content-Type": "application/json", **headers}, timeout=60
    )


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Its /ping is 200 before the model is there, so an answer is the sign."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if post(url, {"inputs": "a", "parameters": {"max_new_tokens": 1}}).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the stock model server never answered")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("stock")
    inference, management = free_ports(2)
    (folder / "mms.properties").write_text(PROPERTIES.format(inference=inference, management=management))
    (folder / "model" / "code").mkdir(parents=True)
    shutil.copy(ROOT / "container" / "inference.py", folder / "model" / "code")
    settings = {
        "OPTION_MODEL_ID": "demo",
        "OPTION_KV_CACHE_MEMORY_BYTES": str(64 * 2**20),
        "OPTION_MAX_MODEL_LEN": "1024",
        "PYTHONPATH": os.pathsep.join([str(folder / "model" / "code"), str(ROOT / "src"), *sys.path]),
        "TMPDIR": str(folder),  # it keeps its process id there
    }
    start = [sys.executable, "-c", "from mms.model_server import start; start()", "--start", "--foreground"]
    start += ["--mms-config", "mms.properties", "--model-store", "/", "--models", f"model={folder / 'model'}"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            start, cwd=folder, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until_it_answers(f"http://127.0.0.1:{inference}", process)
        yield f"http://127.0.0.1:{inference}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_answer_has_its_cache_facts(url: str) -> None:
    template = "Sort this letter into one of five drawers and say only the name of the drawer. " * 8
    cold, hit = (post(url, {"inputs": template + name, "parameters": {"max_new_tokens": 2}}) for name in "AB")
    assert cold.status_code == hit.status_code == 200
    assert isinstance(hit.json()[0]["generated_text"], str)
    assert "cached_tokens=0;" in cold.headers["x-amzn-sagemaker-custom-attributes"]
    assert "tier=device" in hit.headers["x-amzn-sagemaker-custom-attributes"]


def test_a_stream_arrives_whole(url: str) -> None:
    response = post(url, {"inputs": "One", "stream": True, "parameters": {"max_new_tokens": 3}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *_, last = [line for line in response.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["details"]["generated_tokens"] == 3


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), ({"inputs": 1}, 400), ({"inputs": "word " * 3000}, 422)])
def test_a_refusal_has_our_status_and_body(url: str, body: Any, status: int) -> None:
    response = post(url, body)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in response.text


def test_requests_at_the_same_time_are_answered_one_after_the_other(url: str) -> None:
    body = {"inputs": "Two", "parameters": {"max_new_tokens": 2}}
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: post(url, body).text, range(8)))
    assert len(set(texts)) == 1
