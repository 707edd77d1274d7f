"""A model folder that brings code: none of it runs unless the operator said so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from kvreuse.config import Config
from kvreuse.engine.loader import load_model
from kvreuse.errors import ConfigError


def load(folder: Path, *, trust_remote_code: bool) -> None:
    config = Config(model_id=str(folder), trust_remote_code=trust_remote_code)
    load_model(config, device=torch.device("cpu"), attn_implementation="sdpa")


def test_code_beside_the_weights_does_not_run_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where Transformers copies such code to: not into the home folder of whoever runs the tests.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    witness = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(witness)!r}).touch()\nraise SystemExit\n")
    kinds = {kind: "evil.Evil" for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": kinds}))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, trust_remote_code=False)
    assert not witness.exists()
    assert len(caught.value.message.splitlines()[0]) < 500
    with pytest.raises(SystemExit):  # what it would have done
        load(tmp_path, trust_remote_code=True)
    assert witness.exists()
