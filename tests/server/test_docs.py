"""docs/api.md and the code name the same routes, fields, facts and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvreuse import errors
from kvreuse.api import openai, sagemaker
from kvreuse.api.facts import CUSTOM_ATTRIBUTES, kv_cache
from kvreuse.server.app import ROUTES
from kvreuse.server.toolkit import UserError
from kvreuse.types import CacheFacts, MissReason, Tier

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`\s]+)`", text))


def test_every_route_has_its_row_and_every_row_its_route() -> None:
    rows = re.findall(r"^\| `(\w+ /\S*)` \|", section("Routes"), re.MULTILINE)
    assert rows == [f"{method} {path}" for method, path in ROUTES]


def test_every_parameter_has_its_row_and_every_row_its_parameter() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", section("Hugging Face schema"), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(sagemaker.PARAMETERS)


@pytest.mark.parametrize("fields", [openai.CHAT, openai.COMPLETION, openai.IGNORED])
def test_every_openai_field_is_named(fields: tuple[str, ...]) -> None:
    assert set(fields) - named(section("OpenAI schemas")) == set()


def test_every_cache_fact_is_named_with_its_values() -> None:
    facts = section("Cache facts")
    values = {*map(str, Tier), *map(str, MissReason), *kv_cache(CacheFacts(prompt_tokens=1))}
    assert values - named(facts) == set()
    assert CUSTOM_ATTRIBUTES in facts


def test_every_error_type_is_named() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name not in ("KVReuseError", "ConfigError")]
    types = {kind.type for kind in (*kinds, UserError)}
    assert types - named(section("Errors")) == set()
    statuses = {str(kind.status) for kind in kinds if "status" in vars(kind)}
    assert statuses - set(re.findall(r"\d{3}", section("Errors"))) == set()
