"""Kernels are compiled where they are missing; what stands in the way is said in a sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvreuse.engine.native import build
from kvreuse.engine.native.kernels import Kernels, load_kernels

TINY = 'extern "C" int kvreuse_width() { return 16; }\n'
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with a copy of the sources, which `build` takes for its own."""
    folder = tmp_path / "sources"
    shutil.copytree(Path(build.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(build, "_HERE", folder)
    return folder


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The cache folder of a user who never started before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvreuse"


def _only_compiler(folder, monkeypatch, script):
    """A PATH with this compiler alone, or with none."""
    folder.mkdir()
    if script is not None:
        (folder / "g++").write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("name", ["kernels.cpp", "attention.h", "vectors.h"])
def test_a_changed_source_gives_every_library_another_name(sources, name):
    before = [build.library_name(variant) for variant in build.VARIANTS]
    with (sources / name).open("a", encoding="utf-8") as file:
        file.write("\n")
    after = [build.library_name(variant) for variant in build.VARIANTS]
    assert len({*before, *after}) == 2 * len(build.VARIANTS)


def test_changed_flags_give_another_name(monkeypatch):
    plain, avx2 = build.library_name("plain"), build.library_name("avx2")
    monkeypatch.setitem(build.VARIANTS, "plain", ("-g",))
    assert build.library_name("plain") != plain
    assert build.library_name("avx2") == avx2
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    assert build.library_name("avx2") != avx2


def test_the_name_depends_on_nothing_else(sources):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_HERE", Path(build.__file__).parent)
        expected = build.library_name("plain")
    assert build.library_name("plain") == expected


def test_without_a_compiler_there_are_none(tmp_path, monkeypatch, fresh):
    _only_compiler(tmp_path / "bin", monkeypatch, None)
    assert load_kernels.__wrapped__() == "there is no C++ compiler (g++)"
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'kernels.cpp:1: too hard' >&2; echo more >&2; exit 1", "g++ failed: kernels.cpp:1: too hard"),
        ("exit 4", "exit status 4"),
        ("kill -9 $$", "SIGKILL"),
        ("exit 0", "No such file"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path, monkeypatch, fresh, script, words):
    _only_compiler(tmp_path / "bin", monkeypatch, script)
    fault = load_kernels.__wrapped__()
    assert words in fault
    assert "\n" not in fault
    assert list(fresh.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _only_compiler(tmp_path / "bin", monkeypatch, "exit 0")
    fault = load_kernels.__wrapped__()
    assert fault.startswith("they cannot be compiled: ")
    assert str(tmp_path / "file") in fault


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library at all\n" * 1000])
def test_a_broken_library_is_named_and_not_loaded(fresh, content):
    fresh.mkdir(parents=True)
    for variant in build.VARIANTS:
        (fresh / build.library_name(variant)).write_bytes(content)
    fault = load_kernels.__wrapped__()
    assert fault.startswith("they cannot be loaded: ")
    assert str(fresh) in fault


@needs_compiler
def test_what_was_compiled_once_is_loaded_again_without_a_compiler(tmp_path, monkeypatch, fresh):
    first = load_kernels.__wrapped__()
    assert isinstance(first, Kernels)
    _only_compiler(tmp_path / "bin", monkeypatch, None)
    assert isinstance(load_kernels.__wrapped__(), Kernels)
    assert len(list(fresh.iterdir())) == 1


@needs_compiler
def test_several_processes_may_compile_at_once(sources, tmp_path):
    (sources / "kernels.cpp").write_text(TINY, "utf-8")
    target = tmp_path / "new" / "folder"
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import build\n"
        "for _ in range(3): assert build.compile_variant('plain', Path(sys.argv[2])) is None"
    )
    command = [sys.executable, "-IS", "-c", code, str(sources), str(target)]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(timeout=60) for process in running] == [0] * 4
    assert os.listdir(target) == [build.library_name("plain")]


@needs_compiler
def test_run_alone_it_says_which_variant_went_wrong(sources, tmp_path):
    (sources / "kernels.cpp").write_text("#error too hard\n", "utf-8")
    command = [sys.executable, "-IS", str(sources / "build.py"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert next(iter(build.VARIANTS)) in done.stderr
    assert "too hard" in done.stderr
    assert "Traceback" not in done.stderr
