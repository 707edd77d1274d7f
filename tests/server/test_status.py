"""The status page: what its numbers say, what they cost, and that no prompt is in them."""

from __future__ import annotations

import re

import httpx
import pytest
from server.conftest import MakeSite, Site

from kvreuse.api.call import Template
from kvreuse.server import status

SECRET = "the patient's name is Rosalind Quux"


def ask(site: Site, prompt: str, **more: object) -> None:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 3}, **more}
    assert httpx.post(f"{site.url}/invocations", json=body, timeout=20).status_code == 200


def numbers(site: Site) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{site.url}/status.json").json()
    return found


def test_the_numbers_tell_hits_misses_times_tiers_and_the_tree(site: Site) -> None:
    ask(site, "one prompt")
    ask(site, "one prompt")
    now = numbers(site)
    assert (now["up"], now["model"], now["requests"], now["hits"]) == (True, "fake", 2, 1)
    assert (now["prompt_tokens"], now["cached_tokens"]) == (20, 8)
    assert now["misses"] == {"cold": 1}
    assert now["ttft"]["hit"]["p50_s"] == pytest.approx(0.0015, rel=0.03)  # type: ignore[index]
    (device,) = now["tiers"]  # type: ignore[misc]
    assert (device["name"], device["num_slots"], device["max_bytes"]) == ("device", 400, 40_000)
    nodes = now["tree"]["nodes"]  # type: ignore[index]
    assert [(n["num_tokens"], n["num_bytes"], n["idle_s"], n["tier"]) for n in nodes] == [(10, 1000, 2, "device")] * 2


def test_lower_tiers_are_listed_below_the_device(site: Site) -> None:
    site.engine.gauges["tiers"] = {"disk": {"num_bytes": 5, "max_bytes": 9}, "host": {"num_bytes": 7, "max_bytes": 8}}
    tiers = numbers(site)["tiers"]
    assert [(tier["name"], tier["used_bytes"]) for tier in tiers[1:]] == [("host", 7), ("disk", 5)]  # type: ignore[index]


def test_no_text_of_a_prompt_or_an_answer_is_in_page_or_numbers(site: Site) -> None:
    ask(site, SECRET)
    shown = httpx.get(f"{site.url}/status").text + httpx.get(f"{site.url}/status.json").text
    assert all(word not in shown for word in ("Rosalind", "Quux", "patient"))


def test_the_nodes_of_a_registered_template_have_its_name(make_site: MakeSite) -> None:
    template = Template(body="You answer for {{shop}} today.", variables={})
    site = make_site(templates={"support": template})
    body = {"template": "support", "variables": {"shop": "Quux"}, "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{site.url}/invocations", json=body, timeout=20).status_code == 200
    ask(site, "something else")
    assert [node["name"] for node in numbers(site)["tree"]["nodes"]] == ["support", ""]  # type: ignore[index]
    assert [line.get("template") for line in site.log_lines()] == ["support", None]


def test_while_loading_the_page_is_there_and_says_so(make_site: MakeSite) -> None:
    site = make_site(is_loaded=False)
    assert httpx.get(f"{site.url}/status").status_code == 200
    assert (numbers(site)["up"], numbers(site)["tiers"]) == (False, [])


@pytest.mark.parametrize("path", ["/status", "/status.json"])
def test_switched_off_it_is_404(make_site: MakeSite, path: str) -> None:
    site = make_site(status_page=False)
    answer = httpx.get(site.url + path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the status page is switched off by option.status_page"


def test_the_page_is_one_file_that_may_load_nothing_from_elsewhere(site: Site) -> None:
    answer = httpx.get(f"{site.url}/status")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    outside = re.findall(r"(?:src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", answer.text)
    assert outside == []
    assert "/* style.css */" not in answer.text


def test_many_viewers_cost_no_more_than_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_LEAST_PAUSE_S", 1000.0)
    first = numbers(site)
    ask(site, "more")
    assert numbers(site) == first


def test_an_expensive_picture_is_drawn_more_seldom(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(status, "_MAX_SHARE", 1e-9)  # any work at all is then paid for with a long pause
    first = numbers(site)
    ask(site, "more")
    assert numbers(site) == first
