"""Tests that need the built image run under tests/image/run.sh; elsewhere they are not collected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from image.containers import IMAGE

collect_ignore = [] if IMAGE else ["test_built.py", "test_running.py", "test_page.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model as a checkpoint folder that anyone may read. Its tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=256, max_position_embeddings=4096, eos_token_id=None, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in (folder, *folder.parents[:2], *folder.iterdir()):
        path.chmod(0o755)
    return folder


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    """A model folder that a test may add to."""
    tmp_path.chmod(0o755)
    return Path(shutil.copytree(model, tmp_path / "model"))
