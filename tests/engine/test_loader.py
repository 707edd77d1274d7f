"""A checkpoint is found, loaded and checked; what cannot be served is refused in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvreuse.config import Config
from kvreuse.engine.demo_model import demo_model_path
from kvreuse.engine.loader import LoadedModel, check_supported, configure_threads, load_model
from kvreuse.errors import ConfigError

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def make_config(model_type: str, **extra: Any) -> Any:
    return AutoConfig.for_model(model_type, **(SIZES | extra))


def save_checkpoint(folder: Path, model_type: str = "llama", *, dtype: str = "bfloat16", **extra: Any) -> Path:
    """A random model with the tokenizer of the demo model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **extra), dtype=dtype)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


def load(model_id: Path | str, **options: Any) -> LoadedModel:
    config = Config(model_id=str(model_id), **options)
    return load_model(config, device=torch.device("cpu"), attn_implementation="sdpa")


def test_the_demo_model_is_loaded_by_its_short_name() -> None:
    loaded = load("demo")
    assert (loaded.name, loaded.max_model_len, loaded.eos_token_ids) == ("demo", 8192, (2,))
    assert (loaded.model.dtype, loaded.model.training) == (torch.float32, False)
    assert loaded.tokenizer.hf.chat_template


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    loaded = load(save_checkpoint(tmp_path / "my-model"))
    assert (loaded.name, loaded.source) == ("my-model", str(tmp_path / "my-model"))


def test_weights_are_found_in_a_subfolder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "artefacts" / "weights")
    (tmp_path / "code").mkdir()
    assert load(tmp_path).source == str(tmp_path / "artefacts" / "weights")


def test_two_models_in_one_folder_are_not_guessed_between(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a")
    save_checkpoint(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"several models: a, b\nhint: set option.model_id"):
        load(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load(tmp_path)


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model folder"):
        load(tmp_path / "missing")


@pytest.mark.parametrize(
    ("option", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_on_a_cpu_the_dtype_is_float32_unless_the_option_says_otherwise(
    tmp_path: Path, option: str, expected: torch.dtype
) -> None:
    assert load(save_checkpoint(tmp_path), dtype=option).model.dtype == expected


@pytest.mark.gpu
def test_on_a_gpu_the_dtype_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    config = Config(model_id=str(save_checkpoint(tmp_path)))
    loaded = load_model(config, device=torch.device("cuda", 0), attn_implementation="sdpa")
    assert (loaded.model.dtype, loaded.model.device) == (torch.bfloat16, torch.device("cuda", 0))


def test_the_attention_implementation_is_the_one_asked_for(tmp_path: Path) -> None:
    config = Config(model_id=str(save_checkpoint(tmp_path)))
    loaded = load_model(config, device=torch.device("cpu"), attn_implementation="eager")
    assert loaded.model.config._attn_implementation == "eager"


def test_the_logits_are_those_of_plain_transformers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, dtype="float32")
    token_ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        plain = AutoModelForCausalLM.from_pretrained(folder)(token_ids).logits
        assert torch.equal(load(folder).model(token_ids).logits, plain)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot load .*safetensors"):
        load(tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_filled_with_random_ones(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no_such_type"}'),
        ("model.safetensors", "broken"),
        ("tokenizer.json", "broken"),
    ],
)
def test_a_broken_file_is_a_config_error_of_one_line(tmp_path: Path, name: str, content: str) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="cannot load") as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message


def test_code_that_comes_with_the_model_is_not_run(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    config = (tmp_path / "config.json").read_text()
    config = config.replace('"model_type": "llama"', '"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}')
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="cannot load"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("stored", "expected"), [(7, (7,)), ([7, 9], (7, 9))])
def test_the_end_of_sequence_is_that_of_the_generation_config(
    tmp_path: Path, stored: int | list[int], expected: tuple[int, ...]
) -> None:
    save_checkpoint(tmp_path)
    GenerationConfig(eos_token_id=stored).save_pretrained(tmp_path)
    assert load(tmp_path).eos_token_ids == expected


def test_without_a_generation_config_it_is_that_of_the_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, eos_token_id=[4, 5])
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).eos_token_ids == (4, 5)


def test_without_either_it_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).eos_token_ids == (2,)


def test_max_model_len_is_the_smaller_of_option_and_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert load(tmp_path).max_model_len == 64
    assert load(tmp_path, max_model_len=48).max_model_len == 48
    with pytest.raises(ConfigError, match=r"option\.max_model_len is 65, allowed is at most 64"):
        load(tmp_path, max_model_len=65)


def test_a_refused_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma2")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert", is_decoder=False)
    with pytest.raises(ConfigError, match="the model type bert cannot be served: its attention looks ahead"):
        load(tmp_path)


SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 16}),
    ("gemma", {}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("gpt2", {}),
    ("olmo2", {}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("gemma2", {"attn_logit_softcapping": None}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "encoder-decoder"),
    ("bart", {}, "encoder-decoder"),
    ("vit", {}, "no causal language model"),
    ("gemma2", {}, "attn_logit_softcapping"),
    ("bloom", {}, "ALiBi"),
    ("mpt", {}, "ALiBi"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("falcon", {}, "attention interface"),
    ("mamba", {}, "recurrent|linear_attention"),
    ("rwkv", {}, "recurrent"),
    ("jamba", {}, "linear_attention"),
    ("bamba", {}, "linear_attention"),
    ("recurrent_gemma", {}, "linear_attention"),
    ("qwen3_next", {}, "linear_attention"),
    ("zamba2", {}, "hybrid"),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
    ("llama4_text", {}, "chunked_attention"),
    ("xlnet", {}, "attention interface"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
]


@pytest.mark.parametrize(("model_type", "extra"), SERVED, ids=str)
def test_a_supported_model_passes(model_type: str, extra: dict[str, Any]) -> None:
    check_supported(make_config(model_type, **extra), max_model_len=64)


@pytest.mark.parametrize(("model_type", "extra", "reason"), REFUSED, ids=str)
def test_an_unsupported_model_is_refused_by_name(model_type: str, extra: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(model_type, **extra)
    with pytest.raises(ConfigError, match=f"the model type {model_type} cannot be served: .*({reason})"):
        check_supported(config, max_model_len=64)


@pytest.mark.parametrize(
    ("model_type", "rope", "limit"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),
        ("phi3", {"rope_type": "longrope", "rope_theta": 1e4, **LONG_FACTORS}, 32),
    ],
)
def test_rotary_schemes_that_depend_on_the_length_are_served_only_within_one_regime(
    model_type: str, rope: dict[str, Any], limit: int
) -> None:
    extra = {"original_max_position_embeddings": 32} if model_type == "phi3" else {}
    config = make_config(model_type, rope_parameters=rope, **extra)
    check_supported(config, max_model_len=limit)
    with pytest.raises(ConfigError, match=f"hint: set option.max_model_len to at most {limit}"):
        check_supported(config, max_model_len=limit + 1)


@pytest.fixture
def num_threads_restored() -> Any:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_the_number_of_threads_is_the_one_asked_for(num_threads_restored: int) -> None:
    assert configure_threads(3) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("content", "expected"), [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 4)]
)
def test_by_default_no_more_threads_run_than_the_container_has_cpus(
    tmp_path: Path, num_threads_restored: int, content: str, expected: int
) -> None:
    torch.set_num_threads(4)
    (tmp_path / "cpu.max").write_text(content)
    assert configure_threads(None, cgroup=tmp_path / "cpu.max") == expected


def test_without_a_control_group_torch_chooses(tmp_path: Path, num_threads_restored: int) -> None:
    assert configure_threads(None, cgroup=tmp_path / "missing") == num_threads_restored


def test_the_tokenizer_is_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(demo_model_path())
    assert load(save_checkpoint(tmp_path)).tokenizer.encode("Hello 12") == tuple(plain("Hello 12")["input_ids"])
