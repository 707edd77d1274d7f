"""The files that the image is made from agree with the project's own, without building it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvreuse import __version__

ROOT = Path(__file__).parents[2]
LOCKS = ("torch-cpu.lock", "torch-cuda.lock", "requirements.lock")
EXTRAS = ("grammar", "remote", "otel")
PINNED = re.compile(r"^([\w.-]+)==([\w.+]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    return {found[1]: found[2] for found in PINNED.finditer((ROOT / "container" / name).read_text("utf-8"))}


def constraints() -> dict[str, str]:
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split())
    return {normal(name): version for name, version in pairs}


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text("utf-8")


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_is_pinned_and_has_a_hash(name: str) -> None:
    lines = (ROOT / "container" / name).read_text("utf-8").splitlines()
    assert len(locked(name)) == sum(not line.startswith(" ") for line in lines) > 5


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_the_versions_that_are_tested_with(name: str) -> None:
    tested = constraints()
    differing = {
        package: version
        for package, version in locked(name).items()
        if version.removesuffix("+cpu") != tested.get(package, version)
    }
    assert differing == {}


def test_what_both_locks_of_a_build_name_they_name_alike() -> None:
    for name in LOCKS[:2]:
        first, second = locked(name), locked("requirements.lock")
        assert {package for package in first.keys() & second.keys() if first[package] != second[package]} == set()


def test_every_dependency_is_locked_for_either_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["dependencies"] + [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    for torch in LOCKS[:2]:
        found = locked(torch) | locked("requirements.lock")
        for requirement in map(Requirement, wanted):
            assert found[normal(requirement.name)] in requirement.specifier


def test_the_cpu_wheel_is_the_same_release_and_brings_no_cuda() -> None:
    assert locked("torch-cpu.lock")["torch"] == locked("torch-cuda.lock")["torch"] + "+cpu"
    assert [name for name in locked("torch-cpu.lock") if name.startswith(("nvidia", "cuda", "triton"))] == []


def test_the_base_image_is_pinned_by_its_digest() -> None:
    sources = re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    assert re.fullmatch(r"public\.ecr\.aws/docker/library/python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", sources[0])
    assert set(sources[1:]) == {"base"}


def test_the_version_label_is_this_version() -> None:
    assert f'org.opencontainers.image.version="{__version__}"' in dockerfile()


def bill(*locks: Path) -> dict[str, object]:
    script = ROOT / "container" / "sbom.py"
    done = subprocess.run([sys.executable, script, *locks], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_the_bill_of_materials_names_each_package_once(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text(f"Zope_A==1.0+cpu \\\n    --hash=sha256:{'a' * 64}\nb==2 \\\n    --hash=sha256:{'b' * 64}\n")
    found = bill(lock, lock)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    components = found["components"]
    assert isinstance(components, list)
    assert [component["purl"] for component in components] == ["pkg:pypi/b@2", "pkg:pypi/zope-a@1.0%2Bcpu"]
    assert components[1]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]


def test_the_bill_of_materials_guesses_no_hash(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text(f"a==1 \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n")
    [component] = bill(lock)["components"]  # type: ignore[misc]
    assert "hashes" not in component


def test_the_entrypoint_serves_unless_another_command_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for given, run in (
        ([], "serve"),
        (["serve"], "serve"),
        (["--port", "1"], "serve --port 1"),
        (["bench", "x"], "bench x"),
    ):
        done = subprocess.run(
            [ROOT / "container" / "serve", *given],
            env={"KVREUSE_PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"-m kvreuse.cli.main {run}\n"
