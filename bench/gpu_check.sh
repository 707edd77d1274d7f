#!/usr/bin/env bash
# Everything that needs a CUDA device, in one short command: parity tests, then a decode step, shared and unshared.
# Usage: bench/gpu_check.sh [python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name(), torch.version.cuda)'
"$python" -m pytest -q -m gpu tests
for dtype in bfloat16 float32; do
  "$python" -m kvreuse.cli.main bench decode --device cuda --dtype "$dtype" --sequences 32 --prefix-tokens 2048
done
