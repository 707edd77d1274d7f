"""Names of KV: the same where the numbers are the same, another one wherever anything that makes them differs."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.kv.identity import checkpoint_folder, kv_namespace, model_digest
from kvreuse.kv.layout import KVLayout, LayerSpec

CPU = torch.device("cpu")
LAYER = LayerSpec(num_kv_heads=2, key_head_dim=8, value_head_dim=8, num_query_heads=4, dtype=torch.float32, device=CPU)
LAYOUT = KVLayout((LAYER, LAYER))
PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
)


def make_checkpoint(folder):
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS]
    save_file(
        {f"{name}.weight": torch.randn(4, 4, generator=generator) for name in names}, folder / "model.safetensors"
    )
    texts = {"config.json": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4}, "tokenizer.json": {}}
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "model")


def change_tensor(folder, name):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{name}.weight"][0, 0] += 1
    save_file(tensors, path)


def test_a_copy_elsewhere_has_the_same_name(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert model_digest(tmp_path / "copy") == model_digest(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_change_of_any_text_changes_the_name(folder, name):
    before = model_digest(folder)
    path = folder / name
    path.write_text(path.read_text() + " ")
    assert model_digest(folder) != before


def test_new_weights_at_the_same_path_change_the_name(folder):
    before = model_digest(folder)
    change_tensor(folder, "lm_head")
    assert model_digest(folder) != before


def test_weights_that_were_changed_in_place_with_size_and_time_restored_change_the_name(folder, monkeypatch):
    monkeypatch.setattr("kvreuse.kv.identity._RACY_S", -1.0)
    before, path = model_digest(folder), folder / "model.safetensors"
    stat = path.stat()
    time.sleep(0.02)  # the change of the inode gets another time
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert model_digest(folder) != before


def test_weights_are_read_once_and_again_only_when_the_file_is_another(folder, monkeypatch):
    monkeypatch.setattr("kvreuse.kv.identity._RACY_S", -1.0)
    name = model_digest(folder)
    monkeypatch.setattr("kvreuse.kv.identity._read", lambda path: pytest.fail("it was read again"))
    assert model_digest(folder) == name


def test_a_file_that_changed_just_now_is_not_taken_for_known(folder, monkeypatch):
    reads = []
    model_digest(folder)
    monkeypatch.setattr("kvreuse.kv.identity._RACY_S", -1.0)
    read = __import__("kvreuse.kv.identity", fromlist=["_read"])._read
    monkeypatch.setattr("kvreuse.kv.identity._read", lambda path: (reads.append(path), read(path))[1])
    model_digest(folder)
    assert len(reads) == 1


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"stamp": 1}', "damaged"])
def test_a_damaged_memory_of_a_digest_is_not_believed(folder, tmp_path, monkeypatch, content):
    monkeypatch.setattr("kvreuse.kv.identity._RACY_S", -1.0)
    name = model_digest(folder)
    [memo] = (tmp_path / "cache" / "kvreuse" / "digests").iterdir()
    memo.write_text(content if content != "damaged" else memo.read_text().replace('{"', '{"x'))
    assert model_digest(folder) == name


def test_a_cache_folder_that_cannot_be_written_costs_only_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvreuse.kv.identity._RACY_S", -1.0)
    name = model_digest(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_digest(folder) == name


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}" + bytes(3)])
def test_a_file_that_is_no_safetensors_is_refused_or_named_but_never_a_crash(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    try:
        assert len(model_digest(folder)) == 32
    except ConfigError as error:
        assert "name its stored KV" in error.message


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no safetensors"):
        model_digest(tmp_path)


def test_a_model_that_is_not_on_this_machine_is_refused():
    with pytest.raises(ConfigError, match="not found"):
        checkpoint_folder("nobody/no-such-model")


# -- what endpoints with cross-model sharing have in common


@pytest.mark.parametrize(
    "name",
    ["lm_head", "model.norm", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj",
     "model.layers.1.self_attn.o_proj"],
)  # fmt: skip
def test_what_comes_after_the_last_keys_and_values_does_not_part_models_that_share(folder, tmp_path, name):
    other = shutil.copytree(folder, tmp_path / "other")
    change_tensor(other, name)
    assert model_digest(other, is_shared=True) == model_digest(folder, is_shared=True)
    assert model_digest(other) != model_digest(folder)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj",
     "model.layers.1.input_layernorm", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"],
)  # fmt: skip
def test_whatever_makes_keys_and_values_parts_them(folder, tmp_path, name):
    other = shutil.copytree(folder, tmp_path / "other")
    change_tensor(other, name)
    assert model_digest(other, is_shared=True) != model_digest(folder, is_shared=True)


def test_another_size_parts_them(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}))
    assert model_digest(other, is_shared=True) != model_digest(folder, is_shared=True)


def test_names_and_the_chat_template_do_not_part_models_that_share(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    config = {**json.loads((other / "config.json").read_text()), "_name_or_path": "x", "eos_token_id": 7}
    (other / "config.json").write_text(json.dumps(config))
    (other / "chat_template.jinja").write_text("another")
    assert model_digest(other, is_shared=True) == model_digest(folder, is_shared=True)


def test_shards_are_the_same_model_to_those_that_share(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = sorted(load_file(other / "model.safetensors").items())
    (other / "model.safetensors").unlink()
    for number in range(2):
        save_file(dict(tensors[number::2]), other / f"model-0000{number + 1}-of-00002.safetensors")
    assert model_digest(other, is_shared=True) == model_digest(folder, is_shared=True)


# -- the namespace


CHANGES = [
    {"kv_cache_dtype": "int8"},
    {"kv_cache_quant_group_size": 32},
    {"kv_cache_block_size": 16},
    {"dtype": "bfloat16"},
    {"max_model_len": 100},
    {"cross_model_sharing": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_option_that_changes_stored_kv_changes_the_namespace(folder, change):
    assert kv_namespace(Config(**change), folder=folder, layout=LAYOUT) != kv_namespace(
        Config(), folder=folder, layout=LAYOUT
    )


def test_options_that_do_not_change_stored_kv_do_not_change_the_namespace(folder):
    config = Config(dtype="float32", port=1234, host_cache_bytes=2**20, kv_cache_memory_ratio=0.1)
    assert kv_namespace(config, folder=folder, layout=LAYOUT) == kv_namespace(Config(), folder=folder, layout=LAYOUT)


def test_another_dtype_of_the_pool_changes_the_namespace(folder):
    layout = KVLayout(tuple(replace(layer, dtype=torch.float16) for layer in LAYOUT.layers))
    assert kv_namespace(Config(), folder=folder, layout=layout) != kv_namespace(Config(), folder=folder, layout=LAYOUT)
