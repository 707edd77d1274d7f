"""Installs what a handler needs: the requirements.txt beside it, into a folder of this process.

Knows pip. Whatever is installed already keeps its version, because the server runs on it.
"""

from __future__ import annotations

import importlib
import logging
import site
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from kvreuse.errors import ConfigError

__all__ = ["install_requirements"]

_PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", "--no-input", "-q")
_LOG = logging.getLogger(__name__)


def install_requirements(code_dir: Path) -> None:
    """Install `code_dir`/requirements.txt, if there is one, and make it importable. Paths in it are relative to it.

    Nothing outside the folder for temporary files is written. Raises ConfigError when pip refuses.
    """
    file = code_dir / "requirements.txt"
    if not file.is_file():
        return
    prefix = Path(tempfile.mkdtemp(prefix="kvreuse-requirements-"))
    present = prefix / "present.txt"
    present.write_text("".join(f"{found.name}=={found.version}\n" for found in metadata.distributions()))
    _LOG.info("installing %s", file)
    where = ("--prefix", prefix, "--constraint", present, "--requirement", file.absolute())
    done = subprocess.run([*_PIP, *where], cwd=code_dir, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        faults = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise ConfigError(f"{file} cannot be installed: {faults[0] if faults else f'pip ended with {done.returncode}'}")
    scheme = sysconfig.get_preferred_scheme("prefix")
    for name in ("purelib", "platlib"):
        site.addsitedir(sysconfig.get_path(name, scheme, vars={"base": str(prefix), "platbase": str(prefix)}))
    importlib.invalidate_caches()
