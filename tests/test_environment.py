"""What is taken from the process environment beside the options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells how memory is mapped")
@pytest.mark.parametrize(("wish", "is_huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_large_tensors_ask_for_large_pages_unless_the_user_wants_otherwise(wish: dict[str, str], is_huge: bool) -> None:
    code = """
import kvreuse.config as c; c.set_torch_defaults()
import torch
x = torch.empty(2**26, dtype=torch.uint8)
flags = [line for line in open("/proc/self/smaps") if line.startswith("VmFlags")]
print(any(" hg" in line for line in flags))
"""
    env = {"PYTHONPATH": str(ROOT / "src"), **wish}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(is_huge)


def test_reading_the_configuration_changes_no_environment() -> None:
    before = dict(os.environ)
    load_config()
    assert dict(os.environ) == before
