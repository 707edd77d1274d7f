#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command of a few minutes: the tests marked gpu, a decode step on each
# attention backend, and the time to the first token with and without reuse. One table on stdout, progress on stderr.
# Exit code 1: a test failed.
#
# Usage: bench/gpu_check.sh [python]
# For a look at the script itself without a GPU: DEVICE=cpu PREFIX=64 SEQUENCES=2 REQUESTS=2 bench/gpu_check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
device=${DEVICE:-cuda} dtype=${DTYPE:-bfloat16} model=${MODEL:-demo}
prefix=${PREFIX:-2048} sequences=${SEQUENCES:-32} requests=${REQUESTS:-16}
export OPTION_DEVICE=$device # of the server that `bench http` starts
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

decode() { # backend: shared and unshared step
  echo "decode step on $1" >&2
  "$python" -m kvreuse.cli.main bench decode --attention-backend "$1" --device "$device" --dtype "$dtype" \
    --model "$model" --sequences "$sequences" --prefix-tokens "$prefix" --json "$results/decode-$1.json" >&2
}

first_token() { # true or false: reuse; the first request of the template is not counted
  echo "time to first token, reuse $1" >&2
  OPTION_KV_CACHE_REUSE=$1 "$python" -m kvreuse.cli.main bench http --model "$model" --dtype "$dtype" \
    --prefix-tokens "$prefix" --own-tokens 32 --templates 1 --concurrencies 1 --requests "$requests" \
    --max-new-tokens 4 --json "$results/http-$1.json" >&2
}

status=0
"$python" -m pytest -q -m gpu tests/engine >&2 || status=$? # the figures are wanted all the same
case $device in cpu) backends="cpu reference" ;; *) backends="cuda reference" ;; esac
for backend in $backends; do decode "$backend"; done
for reuse in false true; do first_token "$reuse"; done

"$python" - "$results" "$device" <<'PYTHON'
import json
import platform
import sys
from pathlib import Path

import torch

folder, device = Path(sys.argv[1]), sys.argv[2]
name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
row = "{:<44}{:>14}{:>14}{:>9}".format
print(row("", "without reuse", "with reuse", "better"))


def show(what, without, with_reuse):
    print(row(what, f"{without:.2f} ms", f"{with_reuse:.2f} ms", f"{without / with_reuse:.1f} x"))


for file in sorted(folder.glob("decode-*.json")):
    found = json.loads(file.read_text())
    what = f"decode step, {found['sequences']} on {found['prefix_tokens']}, {file.stem.removeprefix('decode-')}"
    show(what, found["unshared_step_ms"], found["shared_step_ms"])
cold, hit = (json.loads((folder / f"http-{reuse}.json").read_text())["levels"][0] for reuse in ("false", "true"))
show("time to first token, one at a time", cold["ttft_p50_ms"], hit["ttft_p50_ms"])
PYTHON
exit "$status"
