# make setup   make .venv and install everything
# make serve   start the server on 127.0.0.1:8000; flags: make serve ARGS="--port 8001"
# make test    run the tests; a part of them: make test ARGS="tests/kvcache -k prefix"
# make lint    ruff, mypy and the import rules
#
# WORKERS      processes that run the tests, 2 by default; 0 runs them in one (for a debugger)
# TORCH_INDEX  another wheel index for torch. On Linux pip's default is the CUDA build (gigabytes); for the CPU build:
#              make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
# PYTHON       the Python that makes .venv, 3.11 or newer

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
endif
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.truedraft-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, %s is %d.%d" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/python || { echo "Making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV) || { \
		rm -rf $(VENV); echo "make: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; }
	@echo "Installing; the first time this downloads a few hundred megabytes (gigabytes with torch's CUDA build)"
	$(PIP) install -q "pip>=24.2" setuptools $(CONSTRAINTS)
ifneq ($(TORCH_INDEX),)
	$(PIP) install torch $(CONSTRAINTS) --no-deps --index-url $(TORCH_INDEX)
endif
	$(PIP) install --no-build-isolation $(CONSTRAINTS) -e ".[dev]" --progress-bar on
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/truedraft serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
