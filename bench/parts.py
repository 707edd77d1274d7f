"""What the whole comparison consists of: the commands of each part, and running one of them.

Knows commands and files of figures. Knows nothing of what the figures mean.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DTYPES", "PARTS", "ROOT", "TRACES", "commands", "load_results", "run_command"]

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "bfloat16")
TRACES = {
    "mooncake_conversation": ("mooncake_conversation_trace.jsonl.gz", (512_000, 2_000_000, 8_000_000)),
    "tau_bench": ("tau_airline_qwen3_blk16.jsonl.gz", (8_000, 16_000, 32_000)),
}
PARTS = ("peers", "suffix", "decode", "templates", "restart", "precision", "policy", "store", "growth", "http")
_BENCH = ("-m", "kvreuse.cli.main", "bench")


def commands(part: str, *, num_threads: int, traces: Path, minutes: float, is_quick: bool) -> dict[str, list[str]]:
    """Result name -> arguments of Python. Each result is a file that `--json` names."""
    threads, quick = ["--threads", str(num_threads)], ["--quick"] if is_quick else []
    if part == "peers":
        return {"peers": ["-m", "bench.peers.compare", *threads, *quick, "--minutes", str(minutes)]}
    if part == "suffix":
        return {f"suffix-{dtype}": ["-m", "bench.suffix", *threads, *quick, "--dtype", dtype] for dtype in DTYPES}
    if part == "decode":
        return {f"decode-{dtype}": [*_BENCH, "decode", *threads, "--dtype", dtype] for dtype in DTYPES}
    if part == "growth":
        return {"growth": [*_BENCH, "growth", *threads]}
    if part == "policy":
        return {
            f"policy-{name}-{capacity}": [
                *(*_BENCH, "policy", "--trace", str(traces / file), "--capacity-tokens", str(capacity)),
            ]
            for name, (file, capacities) in TRACES.items()
            for capacity in capacities
        }
    return {part: [*_BENCH, part]}


def run_command(name: str, arguments: Sequence[str], *, folder: Path, num_threads: int) -> str | None:
    """Run it; its figures go to NAME.json, what it says to NAME.log. None, or the sentence it failed with.

    The figures of a measurement that found wrong answers are there nevertheless.
    """
    figures, log = folder / f"{name}.json", folder / f"{name}.log"
    figures.unlink(missing_ok=True)
    exit_code = _run([sys.executable, *arguments, "--json", str(figures)], log=log, num_threads=num_threads)
    if exit_code == 0:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not line.startswith("hint: ")]
    return lines[-1].rpartition("error: ")[2] if lines else f"ended with exit code {exit_code}"


def _run(command: Sequence[str], *, log: Path, num_threads: int) -> int:
    """In a process group of its own: an interrupt reaches it once, and it stops its servers in good order."""
    variables = {**os.environ, **_environment(num_threads)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def load_results(folder: Path) -> dict[str, Any]:
    """Result name -> figures, of all files that hold some."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.stat().st_size}


def _environment(num_threads: int) -> Mapping[str, str]:
    threads = str(num_threads)
    return {"OMP_NUM_THREADS": threads, "OPTION_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
