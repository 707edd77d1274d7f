"""The status page in a real browser: what it shows, at three widths, in light and dark, and to assistive software."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import OVERFLOW, WIDTHS, Browser, axe_source, started
from server.conftest import MakeSite, Site

READY = "nodes.querySelectorAll('th').length > 1 && state.innerText.startsWith('serving')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))


def ask(site: Site, prompt: str) -> None:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{site.url}/invocations", json=body, timeout=20).status_code == 200


@pytest.fixture
def busy(make_site: MakeSite) -> Site:
    site = make_site()
    for number in range(12):
        ask(site, f"shared words and number {number}")
    return site


def test_it_shows_the_numbers_and_follows_them(browser: Browser, busy: Site) -> None:
    browser.open(f"{busy.url}/status")
    browser.wait(READY)
    assert browser.run("return document.getElementById('requests').textContent") == "12"
    assert browser.run("return document.querySelectorAll('#tiers svg rect').length") > 200
    assert browser.run("return document.querySelector('#misses th').textContent") == "cold"
    ask(busy, "one more")
    browser.wait("document.getElementById('requests').textContent === '13'")
    browser.wait("document.getElementById('rate-chart').getAttribute('aria-label') !== 'no requests yet'")


def test_it_says_when_the_server_does_not_answer(browser: Browser, busy: Site) -> None:
    browser.open(f"{busy.url}/status")
    browser.wait(READY)
    browser.run("window.fetch = () => Promise.reject(new Error('gone'))")
    browser.wait("document.getElementById('state').textContent === 'no answer from the server, trying again'")


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(browser: Browser, busy: Site, width: int, tmp_path: Path) -> None:
    browser.open(f"{busy.url}/status", width=width)
    browser.wait(READY)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOW) == []
    browser.picture(tmp_path / f"status-{width}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_axe_finds_nothing(browser: Browser, busy: Site, axe: str, width: int, scheme: str) -> None:
    browser.open(f"{busy.url}/status", width=width, scheme=scheme)
    browser.wait(READY)
    assert browser.audit(axe) == []


def test_it_asks_nobody_but_its_own_server(browser: Browser, busy: Site) -> None:
    browser.open(f"{busy.url}/status")
    browser.wait(READY)
    asked = browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert {url.removeprefix(busy.url) for url in asked} <= {"/status.json", "/favicon.ico"}
