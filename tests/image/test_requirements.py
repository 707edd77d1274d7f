"""option.install_requirements: what a handler needs is there when it is imported, and the server's own stays."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

from kvreuse.errors import ConfigError
from kvreuse.server.requirements import install_requirements

ROOT = Path(__file__).parents[2]


def write_wheel(folder: Path, name: str, *, content: str, requires: str = "") -> Path:
    """The smallest wheel there can be: one module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def code_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty code folder; what is installed from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def test_a_wheel_beside_the_file_can_be_imported(code_dir: Path) -> None:
    write_wheel(code_dir / "wheels", "kvreuse_extra_a", content="WORD = 'a'")
    (code_dir / "requirements.txt").write_text("--find-links wheels\nkvreuse-extra-a==1.0\n")
    install_requirements(code_dir)
    assert importlib.import_module("kvreuse_extra_a").WORD == "a"


def test_what_the_server_has_already_is_used_as_it_is(code_dir: Path) -> None:
    write_wheel(code_dir, "kvreuse_extra_b", content="import numpy", requires="numpy")
    (code_dir / "requirements.txt").write_text("./kvreuse_extra_b-1.0-py3-none-any.whl\n")
    install_requirements(code_dir)
    assert importlib.import_module("kvreuse_extra_b").numpy is numpy
    assert list(code_dir.parent.rglob("site-packages/numpy")) == []


@pytest.mark.parametrize("wanted", ["numpy==1.0", "no-such-package-of-kvreuse"])
def test_what_cannot_be_had_is_refused_in_one_sentence(code_dir: Path, wanted: str) -> None:
    (code_dir / "requirements.txt").write_text(f"{wanted}\n")
    with pytest.raises(ConfigError) as caught:
        install_requirements(code_dir)
    assert str(code_dir / "requirements.txt") in caught.value.message
    assert wanted in caught.value.message
    assert "\n" not in caught.value.message


def test_a_folder_without_the_file_needs_nothing(code_dir: Path) -> None:
    before = list(sys.path)
    install_requirements(code_dir)
    assert sys.path == before


@pytest.mark.parametrize(("option", "shown"), [("true", "cannot be installed"), ("false", "config.json")])
def test_the_file_is_read_only_when_the_option_says_so(tmp_path: Path, option: str, shown: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "requirements.txt").write_text("no-such-package-of-kvreuse\n")
    done = subprocess.run(
        [
            ROOT / "container" / "serve",
            "serve",
            "--model_id",
            tmp_path,
            "--port",
            "0",
            "--install-requirements",
            option,
        ],
        env={"KVREUSE_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert shown in done.stderr
