"""Containers of the built image, run by docker or podman: the two take the same words.

Knows the engine's command line. The client is a program inside the container, so that it works without a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["IMAGE", "Container", "engine", "run", "started"]

ENGINE = os.environ.get("KVREUSE_ENGINE", "")
IMAGE = os.environ.get("KVREUSE_IMAGE", "")
START_S = 120
STOP_S = 25
# method, path, body -> one line of JSON: status, answer, custom attributes.
CLIENT = """
import json, os, sys, urllib.error, urllib.request as r
method, path, body = sys.argv[1:]
url = "http://127.0.0.1:" + os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080") + path
call = r.Request(url, method=method, data=body.encode() or None, headers={"Content-Type": "application/json"})
try:
    answer = r.urlopen(call, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    sys.exit(9)
print(json.dumps([answer.status, answer.read().decode(), answer.headers["x-amzn-sagemaker-custom-attributes"] or ""]))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The engine's command as it ends, well or not."""
    return subprocess.run([ENGINE, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)


def engine(*arguments: object) -> str:
    """What the engine's command says; it must end well."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Container:
    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, path: str, body: Any = None) -> tuple[int, str, dict[str, str]]:
        """Status, text and cache facts of one request; status 0 where nothing listens."""
        method, data = ("GET", "") if body is None else ("POST", json.dumps(body))
        done = run("exec", self.name, "python3", "-c", CLIENT, method, path, data)
        if done.returncode != 0:
            return 0, done.stderr, {}
        status, text, attributes = json.loads(done.stdout)
        return status, text, dict(pair.split("=") for pair in attributes.split("; ") if pair)

    def invoke(self, prompt: str, **parameters: Any) -> tuple[int, str, dict[str, str]]:
        return self.call("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": 4, **parameters}})

    def wait_for_ping(self, status: int) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = self.call("/ping")[0]
            if found == status:
                return
            assert found or self.is_running, self.logs()
        raise AssertionError(f"/ping never answered {status}: {self.logs()}")

    def wait_for_log(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.logs():
            assert self.is_running, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    @property
    def is_running(self) -> bool:
        return engine("inspect", "-f", "{{.State.Running}}", self.name) == "true"

    def logs(self) -> str:
        done = run("logs", self.name)
        return done.stdout + done.stderr

    def stop(self) -> int:
        """SIGTERM, then SIGKILL, which shows as 137. The exit code."""
        engine("stop", "-t", STOP_S, self.name)
        return self.exit_code()

    def exit_code(self) -> int:
        """Waits for the end."""
        return int(engine("wait", self.name))


@contextmanager
def started(model: Path, *flags: str, **env: object) -> Iterator[Container]:
    """`IMAGE serve` with the model as SageMaker mounts it, removed afterwards. Keyword arguments are variables."""
    settings = {"OPTION_KV_CACHE_MEMORY_BYTES": "16MiB", **env}
    variables = [word for name, value in settings.items() for word in ("-e", f"{name}={value}")]
    mount = ["-v", f"{model}:/opt/ml/model:ro"]
    container = Container(engine("run", "-d", "--no-healthcheck", *mount, *variables, *flags, IMAGE, "serve"))
    try:
        yield container
    finally:
        run("rm", "-f", "-t", "0", container.name) if ENGINE == "podman" else run("rm", "-f", container.name)
