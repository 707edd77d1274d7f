"""The reader of Java properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.config.properties import parse_properties
from kvreuse.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a=1\nb = 2\nc:3\nd 4\ne", {"a": "1", "b": "2", "c": "3", "d": "4", "e": ""}),
        ("# no\n ! no\n\n  a=1", {"a": "1"}),
        ("a=x # not a comment", {"a": "x # not a comment"}),
        ("a=one,\\\n   two\nb=3", {"a": "one,two", "b": "3"}),
        ("a=one\\\\\nb=3", {"a": "one\\", "b": "3"}),
        ("a=last\\", {"a": "last"}),
        ("a\\ b\\=c=d=e", {"a b=c": "d=e"}),
        ("a=\\u00e9\\t\\n.", {"a": "é\t\n."}),
        ("a==b", {"a": "=b"}),
        ("a=1\r\nb=2  \r\n", {"a": "1", "b": "2"}),
        ("", {}),
    ],
)
def test_the_properties_format_is_java_s(content: str, expected: dict[str, str]) -> None:
    assert parse_properties(content) == expected


@given(st.text())
def test_any_text_is_read_or_refused_in_words(content: str) -> None:
    try:
        assert all(isinstance(value, str) for value in parse_properties(content).values())
    except ConfigError as error:
        assert "given twice" in error.message
