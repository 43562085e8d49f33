# Everything a contributor needs. The first target sets up an environment of its own in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := 2.13.0

.PHONY: setup demo test check clean

setup: $(VENV)/installed

# torch comes first and pinned: nixl asks for any torch, and the newest one brings gigabytes of CUDA along.
$(VENV)/installed: pyproject.toml requirements/lock.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements/lock.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/kvd demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache out
