"""What is in the built image, and what is said about it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from image.containers import IMAGE, engine

from kvreuse import __version__

GB = 10**9
INSTALLED = "import json, importlib.metadata as m; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return dict(json.loads(engine("image", "inspect", IMAGE))[0])


def inside(*command: str) -> str:
    return engine(
        "run", "--rm", "--no-healthcheck", "--network", "none", "--entrypoint", command[0], IMAGE, *command[1:]
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_it_starts_in_exec_form_as_root_and_serves_unless_told_otherwise(facts: dict[str, Any]) -> None:
    config = facts["Config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["/opt/kvreuse/serve"], ["serve"])
    assert config.get("User", "") == ""


def test_its_labels_say_what_the_platform_may_do(facts: dict[str, Any]) -> None:
    labels = facts["Config"]["Labels"]
    assert labels["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    assert labels["com.amazonaws.sagemaker.capabilities.multi-models"] == "false"
    assert labels["org.opencontainers.image.version"] == __version__


def test_nothing_of_the_machine_that_built_it_is_kept(facts: dict[str, Any]) -> None:
    assert [value for value in facts["Config"]["Env"] if re.search("cert|index|find_links|proxy", value, re.I)] == []
    assert inside("sh", "-c", "cat /etc/pip.conf /opt/venv/pip.conf 2>/dev/null | wc -c") == "0"


def test_with_cpu_wheels_it_is_small(facts: dict[str, Any]) -> None:
    assert 0 < facts["Size"] <= 1.3 * GB


@pytest.mark.parametrize("tool", ["gcc", "cc", "g++", "make", "java", "git", "protoc"])
def test_no_tool_that_serving_does_not_need_is_in_it(tool: str) -> None:
    assert inside("sh", "-c", f"command -v {tool} || find / -xdev -name {tool} -type f -executable") == ""


def test_the_bill_of_materials_lists_what_is_installed() -> None:
    bom = json.loads(inside("cat", "/opt/sbom.cdx.json"))
    installed = {(normal(name), version) for name, version in json.loads(inside("python3", "-c", INSTALLED))}
    listed = {(normal(component["name"]), component["version"]) for component in bom["components"]}
    assert {pair for pair in installed if pair[0] != "pip"} == listed


def test_every_module_has_its_bytecode() -> None:
    code = "import torch, transformers, kvreuse.server.lifecycle, sys; print([m for m, x in sys.modules.items() if "
    code += "(f := getattr(x, '__file__', '') or '').startswith('/opt') and f.endswith('.py') and not "
    code += "__import__('os').path.exists(__import__('importlib').util.cache_from_source(f))])"
    assert inside("python3", "-c", code) == "[]"


def test_another_command_than_serve_is_one_of_the_command_line() -> None:
    assert inside("/opt/kvreuse/serve", "bench", "--help").startswith("usage: kvreuse bench")
