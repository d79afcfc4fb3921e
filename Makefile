# make serve   a chat server with JETSPEC and a real small model, on any machine
# make test    the whole test suite (starts real servers on the CPU)
# make lint    ruff and mypy

PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
BIN := $(VENV)/bin

.PHONY: serve test lint

serve: $(VENV)/.installed
	$(BIN)/jetspec serve --port $(PORT)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
