"""The kernels at the edges: of memory, of strides, of what a machine can lack."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvreuse.engine.attention.choose import choose_backend
from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.step import Step
from kvreuse.engine.fused import fuse_layers
from kvreuse.engine.native import build, kernels
from kvreuse.engine.native.kernels import load_kernels
from tests.engine import test_attention_backends as oracle
from tests.engine.harness import one_layer
from tests.engine.test_choose import found  # noqa: F401
from tests.engine.test_fused import _model

# Slabs whose last byte is the last of a page; the page behind it must not be touched.
AT_THE_END = """
import ctypes, mmap, sys, torch
from kvreuse.engine.native.kernels import load_kernels

head_dim, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
kernels, libc = load_kernels(), ctypes.CDLL(None)
if not kernels.can_attend(head_dim, dtype):
    sys.exit(77)
memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert libc.mprotect(ctypes.c_void_p(address + 2 * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
size = 5 * head_dim
offset = 2 * mmap.PAGESIZE - size * dtype.itemsize
slab = torch.frombuffer(memory, dtype=dtype, count=size, offset=offset).view(1, 1, 5, head_dim).normal_()
query = torch.randn(1, head_dim).to(dtype)
plan = torch.tensor([[0, 1, 0, 1, 1 << 40, 1 << 41]]), torch.tensor([[0, 5]])
kernels.attend(query, (slab, slab), plan, out=torch.empty_like(query), scaling=0.1, sinks=None)
"""


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_behind_the_slabs_is_read(head_dim, dtype):
    env = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", AT_THE_END, str(head_dim), dtype], check=False, env=env)
    assert done.returncode in (0, 77)


def test_a_query_whose_heads_are_not_contiguous_is_read_as_it_is():
    torch.manual_seed(0)
    chunk = [StepSlice(first_row=0, num_rows=2, num_context=3, runs=((0, 5),))]
    pool = oracle._pool(kv_heads=2, group=2, window=None, key_dim=32, value_dim=32, slices=chunk)
    query = torch.randn(1, 4, 32, 2).transpose(2, 3)
    results = [
        backend.attend(Step(pool, chunk, backend), 0, query, scaling=0.3, sinks=None)
        for backend in (NativeBackend(load_kernels()), ReferenceBackend())
    ]
    torch.testing.assert_close(*results)


def test_a_layer_of_the_same_name_but_with_code_of_its_own_stays_stock():
    model = _model("llama_wide")
    stock = type(model.model.layers[0])

    class LlamaDecoderLayer(stock):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 2

    for layer in model.model.layers:
        layer.__class__ = LlamaDecoderLayer
    assert fuse_layers(model) == 0


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize(("num_kv_heads", "num_query_heads"), [(1, 8), (3, 9), (8, 32)])
@pytest.mark.parametrize("changes", [{}, {"window": 700}, {"has_sinks": True}])
def test_sound_kernels_pass_their_trial_whatever_the_heads(head_dim, num_kv_heads, num_query_heads, changes):
    heads = {"num_kv_heads": num_kv_heads, "num_query_heads": num_query_heads}
    layout = one_layer(head_dim=head_dim, **heads, **changes)
    assert choose_backend("cpu", layout).name == "cpu"


def test_a_library_without_the_functions_is_said_not_to_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, folder = tmp_path / "empty.c", tmp_path / "kvreuse"
    folder.mkdir()
    source.write_text("int nothing;\n", "utf-8")
    target = folder / build.library_name(kernels._variant())
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    assert isinstance(load_kernels.__wrapped__(), str)


def test_a_compiler_whose_message_is_no_text_is_a_sentence_too(tmp_path, monkeypatch):
    (tmp_path / "g++").write_text("#!/bin/sh\nprintf 'bad \\377\\n' >&2\nexit 1\n", "utf-8")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "bad" in build.compile_variant("plain", tmp_path / "out")


def test_a_user_without_a_home_has_no_kernels_but_starts(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert "home" in load_kernels.__wrapped__()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_no_number_gets_no_number(bad):
    torch.manual_seed(0)
    pool = oracle._pool(kv_heads=2, group=3, window=None, key_dim=32, value_dim=32)
    query, backend = torch.randn(1, 6, 59, 32), NativeBackend(load_kernels())
    query[0, 2, 5] = bad
    out = backend.attend(Step(pool, oracle.SLICES, backend), 0, query, scaling=0.3, sinks=None)
    assert not out[0, 5, 2].isfinite().any()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch, what):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kvreuse"
    folder.mkdir()
    library = folder / build.library_name(kernels._variant())
    library.write_bytes(b"anything")
    (folder if what == "folder" else library).chmod(0o777)
    assert load_kernels.__wrapped__() == f"{library} could have been written by another user"
