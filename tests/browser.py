"""A headless Chromium driven over WebDriver's own HTTP, and axe-core from npm. Absent, the tests are skipped."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

WIDTHS = (360, 800, 1440)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
OVERFLOW = """
return [...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, svg')
  && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map((e) => e.outerHTML.slice(0, 80))
"""
AUDIT = """
const done = arguments[arguments.length - 1];
axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] }).then(
  (found) => done(found.violations.map((v) => [v.id, ...v.nodes.map((n) => n.html + n.failureSummary)].join(' | '))));
"""


class Browser:
    """One tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self._session}/{path}", json=body, timeout=60).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def _cdp(self, command: str, **params: Any) -> None:
        self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str, *, width: int = 800, scheme: str = "light") -> None:
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._post("url", {"url": url})

    def run(self, script: str) -> Any:
        """What the script returns."""
        return self._post("execute/sync", {"script": script, "args": []})

    def wait(self, condition: str) -> None:
        for _ in range(200):
            if self.run(f"return Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"{condition} never held; the page says: {self.run('return document.body.innerText')}")

    def audit(self, axe: str) -> list[str]:
        """What axe-core objects to."""
        self.run(axe)
        found: list[str] = self._post("execute/async", {"script": AUDIT, "args": []})
        return found

    def picture(self, path: Path) -> None:
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return document.documentElement.clientWidth")
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        answer = httpx.get(f"{self._session}/screenshot", timeout=60)
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser until the block ends; skips the test where there is none."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or binary is None:
        pytest.skip("chromium and chromedriver are not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([driver, f"--port={port}"], stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}/session"
    try:
        args = [*FLAGS, f"--user-data-dir={folder}"]
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"binary": binary, "args": args}}
        session = f"{url}/{_create(url, wanted)}"
        yield Browser(session)
        httpx.delete(session, timeout=60)
    finally:
        process.terminate()
        process.wait(20)


def _create(url: str, wanted: dict[str, Any]) -> str:
    for _ in range(200):
        try:
            answer = httpx.post(url, json={"capabilities": {"alwaysMatch": wanted}}, timeout=120)
            return str(answer.json()["value"]["sessionId"])
        except httpx.ConnectError:
            time.sleep(0.05)
    raise AssertionError("chromedriver never listened")


def axe_source(folder: Path) -> str:
    """axe-core's script, from npm into `folder`; skips the test where npm or its registry is not there."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4"]
    if subprocess.run(command, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("npm cannot install axe-core here")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text("utf-8")
