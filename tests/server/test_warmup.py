"""Templates are computed before traffic, in order, within their budget, and again after they were dropped."""

import re
import time

import pytest
from fakes import BLOCK, FakeEngine

from kvreuse.api.call import Template
from kvreuse.api.facts import CUSTOM_ATTRIBUTES
from kvreuse.api.templates import load_templates
from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.server.callers import caller_of

LONG = "You answer questions about the tides of the old harbour, in one sentence each. " * 3


def _site(make_site, templates, **kwargs):
    return make_site(templates=templates, **kwargs)


def _states(site):
    return {state["id"]: state["state"] for state in site.service.warm_up.states()}


def test_all_templates_are_warm_afterwards_and_the_next_request_hits(make_site):
    templates = {name: Template(body=f"{name} {LONG}{{{{question}}}}") for name in ("one", "two")}
    site = _site(make_site, templates)
    assert _states(site) == {"one": "cold", "two": "cold"}
    site.service.warm_up.run(budget_s=30)
    assert _states(site) == {"one": "warm", "two": "warm"}
    assert [request.sampling.max_new_tokens for request in site.engine.submitted] == [1, 1]
    body = {"template": "one", "variables": {"question": "when?"}}
    assert site.service.answer(body).join()
    cached = site.service.answer(body)
    cached.join()
    num_cached_tokens = int(re.findall(r"cached_tokens=(\d+)", cached.headers[CUSTOM_ATTRIBUTES])[0])
    assert num_cached_tokens >= len(LONG) // BLOCK * BLOCK


def test_those_of_higher_priority_go_first(make_site):
    templates = {
        name: Template(body=f"{name} {LONG}{{{{q}}}}", priority=priority)
        for name, priority in (("low", -5), ("high", 9), ("middle", 0))
    }
    site = _site(make_site, templates)
    site.service.warm_up.run(budget_s=30)
    firsts = [site.engine.tokenizer.decode(request.token_ids).split()[0] for request in site.engine.submitted]
    assert firsts == ["high", "middle", "low"]


def test_a_spent_budget_leaves_the_rest_cold_and_serves_all_the_same(make_site):
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}")})
    site.service.warm_up.run(budget_s=0)
    assert _states(site) == {"one": "cold"}
    assert site.service.answer({"template": "one", "variables": {"q": "?"}}).join()


def test_a_stuck_engine_costs_the_budget_and_no_more(make_site):
    engine = FakeEngine()
    engine.stall()
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}")}, engine=engine)
    site.service.warm_up.run(budget_s=0.2)
    assert _states(site) == {"one": "failed"}
    assert engine.aborted


def test_what_was_dropped_is_computed_again_while_nobody_waits(make_site):
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}")})
    warm_up = site.service.warm_up
    warm_up.run(budget_s=30)
    site.engine.purge()
    assert _states(site) == {"one": "cold"}
    warm_up.keep(interval_s=0.05)
    deadline = time.monotonic() + 20
    while _states(site) != {"one": "warm"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_pinned_template_is_pinned_once_and_let_go_when_its_time_is_over(make_site):
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}", pin=True, ttl_s=0.01)})
    warm_up = site.service.warm_up
    warm_up.run(budget_s=30)
    assert len(site.engine.pins.held) == 1
    time.sleep(0.02)
    assert _states(site) == {"one": "expired"}
    assert site.engine.pins.held == []


@pytest.mark.parametrize(
    ("header", "value"),
    [("X-KVReuse-Tenant", "acme"), ("X-Amzn-SageMaker-Custom-Attributes", "tenant=acme")],
)
def test_a_template_is_warmed_for_its_tenant_only(make_site, header, value):
    options = {"tenant_mode": "header", "tenant_header": header, "tenant_secret": "s"}
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}", tenant="acme")}, **options)
    site.service.warm_up.run(budget_s=30)
    asked = caller_of({header: value}, Config(**options)).scope
    assert asked.tenant not in ("", "acme")
    assert [request.scope for request in site.engine.submitted] == [asked]


def test_the_states_are_part_of_the_status(make_site):
    site = _site(make_site, {"one": Template(body=LONG + "{{q}}", priority=3)})
    [state] = site.service.warm_up.states()
    assert {"id": "one", "state": "cold", "pinned": False, "priority": 3}.items() <= state.items()
    assert state["tokens"] >= len(LONG)


def test_the_manifest_says_how_to_warm(tmp_path):
    manifest = tmp_path / "templates.yaml"
    manifest.write_text("- {id: a, text: 'x {{y}}', tenant: t, priority: 2, pin: true, ttl_s: 60}\n")
    template = load_templates(manifest)["a"]
    assert (template.tenant, template.priority, template.pin, template.ttl_s) == ("t", 2, True, 60.0)
    manifest.write_text("- {id: a, text: x, priority: soon}\n")
    with pytest.raises(ConfigError, match="priority"):
        load_templates(manifest)
