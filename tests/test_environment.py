"""What is taken from the process environment beside the options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvreuse.config import load_config, user_cache_dir

ROOT = Path(__file__).parents[1]


def test_the_cache_folder_follows_the_xdg_rule(tmp_path: Path) -> None:
    assert user_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvreuse"
    assert user_cache_dir({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "kvreuse"


def test_idle_openmp_threads_sleep_unless_the_user_wants_otherwise() -> None:
    code = "import kvreuse.config as c; c.set_torch_defaults(); import torch"
    for wish, shown in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        env = {"OMP_DISPLAY_ENV": "TRUE", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **wish}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert f"OMP_WAIT_POLICY = '{shown}'" in done.stderr


def test_reading_the_configuration_changes_no_environment() -> None:
    before = dict(os.environ)
    load_config()
    assert dict(os.environ) == before
