"""`make bench`: every measurement of this machine, kvreuse's own and the peers', on one page with plots.

    python -m bench.run
    python -m bench.run --only peers,decode --results build/bench
    python -m bench.run --render

Knows parts, files and what the machine is. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.parts import PARTS, ROOT, commands, load_results, run_command
from bench.peers.process import interrupted_by_sigterm
from bench.render import write_page
from kvreuse.ops.bench.report import environment

__all__ = ["main", "make_parser"]

_FACTS = "facts"  # what is known of the run; beside the results, but none of them
_FAULTS = "faults"


def main(argv: list[str] | None = None) -> int:
    """0 when every part succeeded, 1 when one failed: the page says which."""
    args = make_parser().parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    if not args.render:
        _measure(args)
    results = load_results(args.results)
    facts, faults = results.pop(_FACTS, {}), results.pop(_FAULTS, {})
    write_page(results, facts=facts, faults=faults, page=args.page)
    print(f"wrote {args.page}", file=sys.stderr)
    return 1 if faults else 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_names, default=PARTS, metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, default=ROOT / "build/bench", metavar="DIR", help="keeps all figures")
    parser.add_argument("--page", type=Path, default=ROOT / "bench/RESULTS.md", metavar="FILE", help="is written")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page from --results")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of every model (1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for repeating the peers (60)")
    parser.add_argument("--quick", action="store_true", help="small peers and suffix parts, to see that all works")
    parser.add_argument(
        "--traces", type=Path, default=ROOT.parent / "shared/data/traces", metavar="DIR", help="of the policy part"
    )
    return parser


def _measure(args: argparse.Namespace) -> None:
    """Parts that were not asked for keep what they have from before."""
    faults = load_results(args.results).get(_FAULTS, {})
    _keep(args.results, _FACTS, _facts(args.threads))
    for part in args.only:
        named = commands(part, num_threads=args.threads, traces=args.traces, minutes=args.minutes, is_quick=args.quick)
        for name, arguments in named.items():
            began_at = time.monotonic()
            fault = run_command(name, arguments, folder=args.results, num_threads=args.threads)
            print(f"{name}: {fault or 'done'} ({time.monotonic() - began_at:.0f} s)", file=sys.stderr)
            faults = {key: value for key, value in faults.items() if key != name} | ({name: fault} if fault else {})
            _keep(args.results, _FAULTS, faults)


def _keep(folder: Path, name: str, figures: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


def _facts(num_threads: int) -> dict[str, Any]:
    known = environment()
    names = ("kvreuse", "torch", "transformers", "python")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu(),
        "num_cpus": known["num_cpus"],
        "num_threads": num_threads,
        "versions": ", ".join(f"{name} {known[name]}" for name in names),
    }


def _commit() -> str:
    """Its short name, with a mark when files differ from it; empty outside a repository."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    """The model, and of its abilities those that decide about speed in float32 and bfloat16."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    abilities = [
        name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in fields.get("flags", "").split()
    ]
    return f"{fields.get('model name', platform.machine())} ({', '.join(abilities)})"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, n=1, cutoff=0.0)
            raise argparse.ArgumentTypeError(f"there is no part '{name}', did you mean {near[0]}?")
    return names


if __name__ == "__main__":
    interrupted_by_sigterm()
    sys.exit(main())
