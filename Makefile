# Everything happens in one virtual environment; VENV=PATH names another.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROMPT ?= If the file does not exist,

.PHONY: help quickstart demo test test-slow test-thorough docs wheels triton vllm verify-gpu cuda-device lint types contracts check clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

quickstart: $(VENV)/.runtime  ## Build recipes/quickstart.yaml and generate from the artifact
	artifact=$$($(BIN)/llmforge build recipes/quickstart.yaml | tee /dev/stderr | tail -n 1); \
	echo; echo "\$$ llmforge run $$artifact \"$(PROMPT)\" --max-tokens 64"; \
	$(BIN)/llmforge run "$$artifact" "$(PROMPT)" --max-tokens 64; \
	echo; echo "The report: $$artifact/report/report.html"

demo: $(VENV)/.runtime  ## A real chat model (a download of 93 MB): init, build, run, gate, triton, serve, a conversation
	$(PIP) install --quiet -c constraints.txt -e '.[build,cpu,serve]'
	tests/demo.sh "$(abspath $(BIN))" build/demo

# Hundreds of tests start an interpreter, which takes .5 CPU s longer (1.9 s, 1.4) where no bytecode of llmforge is kept.
test test-thorough test-slow: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.dev  ## Run the tests, less those that take minutes
	$(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0 --durations 20

test-thorough: $(VENV)/.dev  ## Run what takes longer on more models, more kills, more threads: CI does, after the tests
	$(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0 --durations 10 -m 'thorough and not slow and not gpu'

test-slow: $(VENV)/.dev  ## Run the tests that take minutes
	$(BIN)/python -m pytest -m 'slow and not gpu'

wheels: $(VENV)/.dev  ## Build the sdist and a wheel for each processor, into dist/ (docs/release.md)
	$(BIN)/python -m release.wheels

triton: $(VENV)/.dev  ## Prepare the Triton server that tests start, in the user's cache (tests/servers/triton_env.py)
	$(BIN)/python tests/servers/triton_env.py

vllm: $(VENV)/.dev  ## Prepare vLLM for CPUs in build/runtimes, for `--runtime vllm=PYTHON` (docs/other-runtimes.md)
	$(BIN)/python -m tests.models.runtimes vllm build/runtimes

verify-gpu: cuda-device $(VENV)/.gpu  ## Verify everything on this machine's CUDA GPU, VENV=.venv-gpu, in LEASE=40m if given
	$(BIN)/python -m benchmarks.verify_gpu $(if $(LEASE),--lease $(LEASE))

cuda-device:
	@command -v nvidia-smi >/dev/null || \
	  { echo "error: this needs a CUDA device, and there is no NVIDIA driver here (no nvidia-smi)" >&2; exit 8; }

docs: $(VENV)/.docs  ## Build the documentation in build/site; every link and anchor is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

lint: $(VENV)/.dev  ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Check types
	$(BIN)/mypy

contracts: $(VENV)/.dev  ## Check that imports point downward
	$(BIN)/lint-imports

check: lint types contracts docs test test-thorough  ## Run all that CI runs

clean:  ## Delete caches and build outputs; the environment and artifacts stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find llmforge passes targets recipes tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "llmforge needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is not. Try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv "$(VENV)"

# torch is by far the largest package: its own step, so that a broken download shows where it broke.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	touch $@

KERNELS := $(wildcard llmforge/native/*.[ch] llmforge/native/*.inc llmforge/quantization/rounding/*.[ch])

$(VENV)/.runtime: pyproject.toml constraints.txt $(KERNELS) $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[build,cpu]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(KERNELS) $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[cpu,dev]'
	touch $@ $(VENV)/.runtime

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@

# Both packages of ONNX Runtime are one module: an environment has the one for CPUs or the one for GPUs.
$(VENV)/.gpu: pyproject.toml constraints.txt $(KERNELS) $(VENV)/.torch
	@test ! -e $(VENV)/.runtime || \
	  { echo "$(VENV) has the onnxruntime for CPUs; take another environment: make verify-gpu VENV=.venv-gpu" >&2; exit 1; }
	$(PIP) install -c constraints.txt -e '.[cuda,tensorrt-rtx,tensorrt,dev]' nvtx
	touch $@
