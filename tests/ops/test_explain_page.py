"""The page of `kvreuse explain` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import OVERFLOW, WIDTHS, Browser, axe_source, started
from ops.test_explain import NOON, line, miss

from kvreuse.cli.main import main


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("explain")
    records = [line(template=f"t{i % 5}", time=NOON + 3600 * (i % 7), ttft_ms=10.0 + i) for i in range(100)]
    records += [miss(template=f"t{i % 5}", miss_reason="diverged", diverged_at=i % 9) for i in range(40)]
    (folder / "log").write_text("\n".join(map(json.dumps, records)), "utf-8")
    assert main(["explain", str(folder / "log"), "--html", str(folder / "page.html")]) == 0
    return (folder / "page.html").as_uri()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(browser: Browser, url: str, width: int, tmp_path: Path) -> None:
    browser.open(url, width=width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOW) == []
    browser.picture(tmp_path / f"explain-{width}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, url: str, scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    browser.open(url, width=360, scheme=scheme)
    assert browser.audit(axe_source(tmp_path_factory.mktemp("axe"))) == []


def test_the_plots_and_tables_show_the_findings(browser: Browser, url: str) -> None:
    browser.open(url)
    assert browser.run("return document.querySelectorAll('#rate-chart path').length") == 4
    assert browser.run("return document.querySelectorAll('#templates tr').length") == 5
    assert browser.run("return document.querySelector('#misses th').textContent") == "diverged"
    assert "64" in browser.run("return document.getElementById('sum').textContent")
