"""The fastest attention that fits model and machine is used, and no other when one was asked for."""

import logging

import pytest
import torch

from kvreuse.config import Config
from kvreuse.engine.attention import choose
from kvreuse.engine.attention.choose import choose_backend
from kvreuse.engine.native.kernels import Kernels, load_kernels
from kvreuse.engine.parts import assemble
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout
from tests.engine.harness import one_layer, tiny

LOADER = "kvreuse.engine.attention.native.load_kernels"


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture
def found():
    """The kernels of this machine."""
    kernels = load_kernels()
    if isinstance(kernels, str):
        pytest.skip(kernels)
    return kernels


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """A machine that never compiled the kernels and cannot."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(LOADER, load_kernels.__wrapped__)


@pytest.mark.usefixtures("found")
def test_auto_uses_the_kernels(caplog):
    assert choose_backend("auto", tiny("llama_wide").layout).name == "cpu"
    assert caplog.text == ""


@pytest.mark.usefixtures("found")
def test_the_start_says_which_one_runs(caplog):
    caplog.set_level(logging.INFO)
    assemble(tiny("mistral_wide"), Config(kv_cache_memory_bytes=2**24))
    assert "attention cpu," in caplog.text


@pytest.mark.usefixtures("found")
def test_bfloat16_passes_the_trial():
    assert choose_backend("cpu", one_layer(dtype=torch.bfloat16)).name == "cpu"


@pytest.mark.usefixtures("no_compiler")
def test_without_kernels_auto_uses_torch_and_warns(caplog):
    assert choose_backend("auto", tiny("llama_wide").layout).name == "cpu-torch"
    assert "attention backend cpu is not used: its kernels are missing: there is no C++ compiler (g++)" in caplog.text
    assert "reference" not in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_asking_for_kernels_that_are_missing_stops_the_start():
    with pytest.raises(ConfigError) as caught:
        choose_backend("cpu", tiny("llama_wide").layout)
    sentence, hint = str(caught.value).splitlines()
    assert sentence == ("option.attention_backend is cpu, but its kernels are missing: there is no C++ compiler (g++)")
    assert hint.startswith("hint: ")


def _zeros(kernels, query, slabs, plan, *, out, **rest):
    out.zero_()


def _too_long(kernels, query, slabs, plan, **rest):
    calls, runs = plan
    kernels.attend(query, slabs, (calls, runs + torch.tensor([0, 1])), **rest)


def _no_window(kernels, query, slabs, plan, **rest):
    calls, runs = plan
    calls[:, 5] = 1 << 40
    kernels.attend(query, slabs, (calls, runs), **rest)


def _failing(kernels, query, slabs, plan, **rest):
    raise RuntimeError("no such instruction\nsomewhere")


@pytest.mark.parametrize("attend", [_zeros, _too_long, _no_window, _failing])
def test_kernels_that_compute_something_else_are_not_used(found, monkeypatch, caplog, attend):
    class Broken(Kernels):
        def __init__(self):
            self._width = found._width

        def attend(self, *args, **kwargs):
            attend(found, *args, **kwargs)

    monkeypatch.setattr(LOADER, Broken)
    layout = one_layer(window=20)
    assert choose_backend("auto", layout).name == "cpu-torch"
    assert "attention backend cpu is not used: the trial failed: " in caplog.text
    assert "somewhere" not in caplog.text
    with pytest.raises(ConfigError, match=r"is cpu, but the trial failed: "):
        choose_backend("cpu", layout)


@pytest.mark.parametrize("changes", [{"dtype": torch.float16}, {"key_head_dim": 20, "value_head_dim": 20}])
def test_what_the_kernels_do_not_take_is_left_to_torch(found, caplog, changes):
    layout = one_layer(**changes)
    assert choose_backend("auto", layout).name == "cpu-torch"
    assert "attention backend cpu is not used: its kernels take float32 and bfloat16, heads of one" in caplog.text
    with pytest.raises(ConfigError, match="its kernels take float32 and bfloat16"):
        choose_backend("cpu", layout)


@pytest.mark.usefixtures("found")
def test_one_layer_that_does_not_fit_decides_for_all():
    layers = (*one_layer().layers, *one_layer(key_head_dim=20, value_head_dim=20).layers)
    assert choose_backend("auto", KVLayout(layers)).name == "cpu-torch"


def test_keys_and_values_of_two_sizes_are_left_to_the_reference_which_is_said(caplog):
    assert choose_backend("auto", tiny("deepseek_v3").layout).name == "reference"
    assert "attention backend cpu-torch is not used: its kernel takes keys and values of one head size" in caplog.text
    assert "attention is computed by the reference, which is slow" in caplog.text


@pytest.mark.parametrize("name", ["cpu", "cpu-torch"])
def test_keys_and_values_of_two_sizes_are_refused_when_another_was_asked_for(found, name):
    with pytest.raises(ConfigError, match=f"option.attention_backend is {name}, but its kernel.* of one"):
        choose_backend(name, tiny("deepseek_v3").layout)


def test_the_reference_and_torch_are_had_for_the_asking(monkeypatch, caplog):
    monkeypatch.setattr(choose, "fault", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(LOADER, lambda: pytest.fail("loaded"))
    for name in ("reference", "cpu-torch"):
        assert choose_backend(name, tiny("llama_wide").layout).name == name
    assert caplog.text == ""


def test_layers_on_two_kinds_of_devices_have_the_reference_only(caplog):
    mixed = KVLayout((*one_layer().layers, *one_layer(device=torch.device("meta")).layers))
    for name in ("cpu", "cpu-torch", "cuda"):
        with pytest.raises(ConfigError, match=f"option.attention_backend is {name}, but the model is on cpu and meta"):
            choose_backend(name, mixed)
    assert choose_backend("auto", mixed).name == "reference"
    assert "which is slow" in caplog.text
