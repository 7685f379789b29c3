# Every target sets itself up: a clean clone needs only Python 3.11 and pip.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.ready
INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt

.PHONY: setup demo test test-slow lint clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# Pip comes first: an old one cannot be trusted with new metadata. The reference package `dflash` pins
# other versions of what we use, so it comes without its dependencies.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/it")'
	@echo "Installing the pinned packages into .venv (a few minutes, 2 GB) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) --editable '.[test,lint]'
	$(INSTALL) --no-deps dflash==0.1.0
	@touch $@

demo: setup
	$(BIN)/python jobs/demo.py

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv *.egg-info build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache dflash-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
