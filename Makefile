# `make demo` and `make test` set up all they need: a .venv and the packages of pyproject.toml.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/cellica demo demo --force

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "cellica needs Python 3.11, 3.12 or 3.13 with the venv module: install one, or say 'make PYTHON=/path/to/python3'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
