"""The blocks of the page on the image, run with the built image: on another port and without a GPU."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from image.containers import ENGINE, IMAGE, run
from image.test_pages import blocks

# The engine under the name that the page uses.
DOCKER = f"""#!{sys.executable}
import os, sys
own = {{"run": ["run", "--no-healthcheck"], "kvreuse": ["{IMAGE}"], "-p": ["--network", "host"]}}
own |= {{word: [] for word in ("8080:8080", "--gpus", "all")}}
os.execvp("{ENGINE}", ["{ENGINE}", *(new for word in sys.argv[1:] for new in own.get(word, [word]))])
"""


def test_the_blocks_of_the_page_run(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = f"kvreuse-{port}"
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    start, ask, stream, stop, bill = (
        block.replace("localhost:8080", f"127.0.0.1:{port}")
        .replace("--name kvreuse", f"--name {name} -e SAGEMAKER_BIND_TO_PORT={port}")
        .replace("docker stop -t 30 kvreuse", f"docker stop -t 30 {name}")
        .replace("docker rm kvreuse", f"docker rm {name}")
        for block in blocks("image.md", "sh")[2:]
    )
    said = []
    try:
        for block in (start, ask, stream, stop, bill):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=tmp_path,
                env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                check=True,
                timeout=180,
            )
            said.append(done.stdout)
    finally:
        run("rm", "-f", name)
    assert '"cached_tokens"' in said[1]
    assert said[2].startswith("data: ")
    assert '"bomFormat": "CycloneDX"' in said[4]
