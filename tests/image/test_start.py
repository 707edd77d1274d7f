"""What the start of the process leaves as it found it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("wish", ["enable", "disable"])
def test_the_garbage_collector_is_as_the_user_wants_it_after_the_engine_was_imported(wish: str) -> None:
    code = (
        f"import gc; gc.{wish}(); from kvreuse.server import handler; handler._import_engine(); print(gc.isenabled())"
    )
    env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{wish == 'enable'}\n"
