"""`IMAGE serve` in the ways it is run: by whom, with what it may write, with which network and which model folder."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from image.containers import IMAGE, Container, engine, run, started
from image.test_requirements import write_wheel
from shim import ENDPOINT, runtime, runtime_client

PROMPT = "Read the letter below and say in one word what it asks for. " * 4
READ_ONLY = ("--read-only", "--tmpfs", "/tmp:rw,size=256m")
NOBODY = ("--user", "10001:10001", "--cap-drop", "all", "--security-opt", "no-new-privileges")
ALONE = ("--network", "none")
WAYS = {
    "as root, without a network": ALONE,
    "as uid 10001": (*ALONE, *NOBODY),
    "with a read-only file system": (*ALONE, *READ_ONLY),
    "as uid 10001 with a read-only file system": (*ALONE, *NOBODY, *READ_ONLY),
}
HANDLER = """
from kvreuse_greeting import GREETING
from kvreuse.server.handler import model_fn, transform_fn as answer

def transform_fn(model, data, content_type, accept, context):
    return GREETING, "text/plain"
"""
KILLER = """
import ctypes, threading
from kvreuse.server.handler import model_fn

def transform_fn(model, data, content_type, accept, context):
    [thread] = [t for t in threading.enumerate() if t.name == "kvreuse-engine"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    return "done", "text/plain"
"""


def assert_serves_and_stops(container: Container) -> None:
    """Two identical prompts: the second is served from the cache and says the same. Then an orderly end."""
    container.wait_for_ping(200)
    cold, warm = container.invoke(PROMPT), container.invoke(PROMPT)
    assert (cold[0], warm[0]) == (200, 200), cold
    assert cold[1] == warm[1]
    assert (cold[2]["cached_tokens"], int(warm[2]["cached_tokens"]) > 0) == ("0", True)
    assert "attention cpu," in container.logs()  # by the kernels that the image brings: it has no compiler
    assert container.stop() == 0, container.logs()


@contextmanager
def client_of(model: Path, **env: object) -> Iterator[tuple[Container, Any]]:
    """A container on a port of this machine, and boto3's client for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started(model, "--network", "host", OPTION_HOST="127.0.0.1", SAGEMAKER_BIND_TO_PORT=port, **env) as container:
        container.wait_for_ping(200)
        with runtime(f"http://127.0.0.1:{port}") as url, closing(runtime_client(url)) as client:
            yield container, client


def pieces(client: Any, prompt: str, **parameters: Any) -> Iterator[bytes]:
    body = {"inputs": prompt, "parameters": parameters, "stream": True}
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, Body=json.dumps(body).encode(), ContentType="application/json"
    )
    return (event["PayloadPart"]["Bytes"] for event in answer["Body"])


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_it_serves_and_stops(model: Path, flags: tuple[str, ...]) -> None:
    with started(model, *flags) as container:
        assert_serves_and_stops(container)


def test_weights_may_lie_in_a_subfolder(model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    shutil.copytree(model, tmp_path / "base" / "model")
    with started(tmp_path, *ALONE) as container:
        assert_serves_and_stops(container)


def test_boto3_invokes_and_streams_on_the_port_that_the_platform_names(model: Path) -> None:
    with client_of(model) as (_, client):
        body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}).encode()
        answers = [client.invoke_endpoint(EndpointName=ENDPOINT, Body=body) for _ in range(2)]
        texts = [json.loads(answer["Body"].read())[0]["generated_text"] for answer in answers]
        events = b"".join(pieces(client, PROMPT, max_new_tokens=8)).decode()
    assert texts[0] == texts[1]
    assert "cached_tokens=0;" in answers[0]["CustomAttributes"]
    assert "cached_tokens=0;" not in answers[1]["CustomAttributes"]
    assert json.loads(events.splitlines()[-2].removeprefix("data: "))["generated_text"] == texts[0]


def test_sigterm_lets_sixteen_streams_finish(model: Path) -> None:
    with client_of(model) as (container, client), ThreadPoolExecutor(16) as pool:
        streams = [pieces(client, f"{PROMPT} Letter {number}.", max_new_tokens=300) for number in range(16)]
        first = [next(stream) for stream in streams]
        rest = [pool.submit(b"".join, stream) for stream in streams]
        assert container.stop() == 0, container.logs()
        texts = [(start + end.result()).decode() for start, end in zip(first, rest, strict=True)]
    assert [text.count('"generated_text":"') for text in texts] == [1] * 16


def test_a_handler_gets_its_requirements_when_the_option_says_so(model_copy: Path) -> None:
    write_wheel(model_copy / "code" / "wheels", "kvreuse_greeting", content="GREETING = 'good day'")
    (model_copy / "code" / "requirements.txt").write_text("--no-index\n--find-links wheels\nkvreuse-greeting\n")
    (model_copy / "code" / "inference.py").write_text(HANDLER)
    with started(model_copy, *ALONE, *NOBODY, *READ_ONLY, OPTION_INSTALL_REQUIREMENTS="true") as container:
        container.wait_for_ping(200)
        assert container.invoke("hello")[:2] == (200, "good day")
    with started(model_copy, *ALONE) as container:
        assert container.exit_code() == 1
        assert "No module named 'kvreuse_greeting'" in container.logs()


def test_ping_fails_when_the_engine_is_dead(model_copy: Path) -> None:
    (model_copy / "code").mkdir()
    (model_copy / "code" / "inference.py").write_text(KILLER)
    with started(model_copy, *ALONE) as container:
        container.wait_for_ping(200)
        assert container.invoke("hello")[0] == 200
        container.wait_for_ping(503)
        assert container.stop() == 0


def test_a_folder_without_a_model_ends_it_with_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with started(tmp_path, *ALONE) as container:
        assert container.exit_code() == 1
        assert container.logs().splitlines()[-1].startswith("kvreuse: error: /opt/ml/model holds no config.json")


def test_the_healthcheck_asks_the_port_that_is_served(model: Path) -> None:
    word, *check = json.loads(engine("image", "inspect", "-f", "{{json .Config.Healthcheck.Test}}", IMAGE))
    assert word == "CMD"
    with started(model, *ALONE, OPTION_PORT=9000) as container:
        container.wait_for_log("lifecycle: ready")
        assert run("exec", container.name, *check).returncode == 0
        assert container.call("/ping")[0] == 0  # nothing on the usual port
