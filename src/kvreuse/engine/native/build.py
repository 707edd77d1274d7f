"""Compile the kernels: `python build.py FOLDER` makes a library for each kind of processor.

Knows the compiler and the sources beside it. Needs nothing but the standard library: the image's build runs it alone.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["VARIANTS", "compile_variant", "library_name"]

_HERE = Path(__file__).parent
_SOURCES = ("kernels.cpp", "attention.h", "vectors.h")
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
# Best first. The last one is for every processor.
VARIANTS = {
    "avx512-bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "plain": (),
}


def library_name(variant: str) -> str:
    """The file name of a variant made from these sources: other sources, another name."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, VARIANTS[variant])).encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    return f"kernels-{variant}-{digest.hexdigest()[:12]}.so"


def compile_variant(variant: str, folder: Path) -> str | None:
    """Compile a variant into `folder`, some seconds; None, or in a sentence why that did not go.

    OpenMP is not linked: whoever loads the library has torch's loaded, so that both share their threads. Several
    processes may do it at once.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++)"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as temp:
            compiled, linked = Path(temp) / "kernels.o", Path(temp) / "kernels.so"
            flags = [*_FLAGS, *VARIANTS[variant]]
            for command in (
                [compiler, *flags, "-c", str(_HERE / "kernels.cpp"), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=120)
            linked.rename(folder / library_name(variant))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {(error.stderr.strip() or str(error)).splitlines()[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"they cannot be compiled: {error}"
    return None


def _main(folder: Path) -> None:
    for variant in VARIANTS if platform.machine() == "x86_64" else ["plain"]:
        fault = compile_variant(variant, folder)
        if fault is not None:
            sys.exit(f"{variant}: {fault}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
