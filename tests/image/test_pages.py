"""The blocks of the pages on deploying are run: the Python ones against moto, the folder for DJL Serving for real."""

from __future__ import annotations

import ast
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError
from fakes import expected_text
from moto.server import ThreadedMotoServer
from server.conftest import (
    MakeSite,
    make_site,  # noqa: F401  # a fixture
)
from shim import runtime

from kvreuse.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("image.md", "deploy-by-hand.md", "local-mode.md", "djl.md")
# moto knows no newer types of instances.
OWN_VALUES = 'INSTANCE_TYPE = "ml.g4dn.xlarge"'


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty account, and made-up credentials for it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", f"http://{host}:{port}")
    yield
    server.stop()


def test_deploying_by_hand_creates_invokes_streams_and_removes(
    aws: None,
    make_site: MakeSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values, create, invoke, stream, remove = blocks("deploy-by-hand.md", "python")
    names: dict[str, object] = {}
    with runtime(make_site().url) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
        for block in (values, OWN_VALUES, create):
            exec(block, names)
        client = boto3.client("sagemaker")
        assert client.describe_endpoint(EndpointName="kvreuse")["EndpointStatus"] == "InService"
        exec(invoke, names)
        said = capsys.readouterr().out
        assert said.count("generated_text") == said.count("cached_tokens=") == 2
        exec(stream, names)
        assert expected_text(f"{names['template']}Dear sir, where is my bill?", 32) in capsys.readouterr().out
        exec(remove, names)
    with pytest.raises(ClientError):
        client.describe_endpoint(EndpointName="kvreuse")
    assert client.list_models()["Models"] == client.list_endpoint_configs()["EndpointConfigs"] == []


def test_the_folder_for_djl_serving_has_a_wheel_a_handler_and_properties(tmp_path: Path) -> None:
    for name in ("container", "src", "pyproject.toml", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "model").mkdir()
    subprocess.run(["bash", "-euo", "pipefail", "-c", blocks("djl.md", "sh")[0]], cwd=tmp_path, check=True)
    config = load_config(env={}, properties_path=tmp_path / "model" / "serving.properties")
    assert (config.entry_point, config.kv_cache_memory_ratio) == ("model.py", 0.4)
    assert (tmp_path / "model" / "model.py").read_bytes() == (ROOT / "container" / "model.py").read_bytes()
    [wheel] = (tmp_path / "model" / "requirements").glob("kvreuse-*.whl")
    assert "kvreuse/server/handler.py" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_whole(page: str) -> None:
    """Those that cannot be run everywhere too."""
    shell, python = blocks(page, "sh"), blocks(page, "python")
    assert shell + python
    for block in shell:
        subprocess.run(["bash", "-n", "-c", block], check=True)
    for block in python:
        ast.parse(block)
