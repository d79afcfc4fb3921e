# make serve   a chat server with JETSPEC and a real small model, on any machine
# make test    the test suite (starts real servers on the CPU)
# make test-wide   more configurations of those servers (schedules, heads, ranks)
# make lint    ruff and mypy

PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
BIN := $(VENV)/bin

.PHONY: serve test test-wide lint

serve: $(VENV)/.installed
	$(BIN)/jetspec serve --port $(PORT)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-wide: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --wide

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
