# `make demo` and `make test` start from nothing but Python: each makes .venv, installs what it needs, does its job.
# The newest jax is for Python 3.12 and newer, which are looked for first: on PATH, and among pyenv's.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
find-python = $(shell for each in $(foreach v,$(1),python$(v) $(wildcard $(PYENV)/$(v).*/bin/python)) python3; do "$$each" -c '' 2>/dev/null && echo "$$each" && exit; done)
PYTHON ?= $(call find-python,3.12 3.13)
VENV ?= .venv
# Two workers: each loads its own torch and jax, and the runners have two cores. A file's tests share opened models and
# compiled programs, so a file goes to one worker.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin

# Tests start a hundred processes, and pytest rewrites every test file: without bytecode, each parses all of it again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt

.PHONY: demo bench performance test test-thorough test-all test-versions test-oldest test-core test-shard test-ray test-serve native-table test-comfyui pages aten-operators torchax-vs-flax porting-table lint clean

PROMPT ?= a red circle moving right on a black background

demo: $(VENV)/.installed
	@mkdir -p outputs
	$(BIN)/comfy-tpu generate "$(PROMPT)" --output outputs/demo.mp4 --contact-sheet outputs/demo.png
	@echo 'the same frames side by side: outputs/demo.png'

# Beside diffusers on this machine: a small model on a CPU, the first published one on a GPU. Results worth keeping go to
# benchmarks/results/, by the name of the device.
RESULTS ?= outputs/bench.json

bench: $(VENV)/.installed-dev
	@mkdir -p $(dir $(RESULTS))
	$(BIN)/comfy-tpu bench --json $(RESULTS)

# The page is made of the results that are kept, and of nothing else.
performance: $(VENV)/.installed-dev
	$(BIN)/comfy-tpu bench report benchmarks/results/*.json --output docs/performance.md --languages en,zh-CN

# 8 minutes on two cores, and no more. ruff, mypy and the layer contracts run inside, from tests/test_architecture.py.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# Only what is marked thorough: further sizes, meshes and families, and whole processes. CI runs it after `make test`.
test-thorough: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m 'thorough and not slow and not gpu and not tpu and not comfyui'

# Also what is marked thorough, slow, gpu, tpu or comfyui. Tests of a device that is not there skip themselves;
# JAX_PLATFORMS=cuda,cpu make test-all runs on the GPU.
test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m ''

# The pack in a real ComfyUI: COMFYUI_PATH is the checkout, COMFYUI_PYTHON a Python with its requirements and ours.
# One worker: the tests share a server, and two servers would compile everything twice.
COMFYUI_TESTS ?= -m comfyui

test-comfyui: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[comfy]'
	$(BIN)/python -m pytest $(COMFYUI_TESTS) -rs

# Batches on Ray and on an S3 server, the slow ones too, which every other target skips: about half an hour. `make test`
# does without these packages, which are large.
test-ray: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[ray]' s3fs 'moto[s3,server]'
	$(BIN)/python -m pytest -m 'slow or not slow' tests/jobs tests/hosts -rs

# The server with all its tests, the slow ones too: 50 kills, 5,000 requests made from its schema, real servers. About a
# quarter of an hour.
test-serve: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[ray]' schemathesis opentelemetry-sdk
	$(BIN)/python -m pytest -m 'slow or not slow' tests/serving tests/jobs/test_served_ledger.py -rs

# A core of the tests on Python 3.11 with the oldest jax, in the versions of constraints.txt: `make test` has the newest.
# And the tests of the generated pages, which were made with that set.
PAGE_TESTS := tests/bench/test_report.py tests/bench/test_vae_report.py tests/bridge/test_aten_operators.py tests/porting/test_table.py

test-oldest:
	$(MAKE) test-core VENV=build/oldest PYTHON="$(call find-python,3.11)"

test-core: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $$($(BIN)/python -c 'from tools.version_tests.__main__ import CORE; print(*CORE)') $(PAGE_TESTS)

# One of 32 parts of the slow tests, Ray, S3 and kills among them. CI takes another in every run.
SHARD ?= 0/32

test-shard: $(VENV)/.installed-dev
	@$(INSTALL) -e '.[ray]' s3fs 'moto[s3,server]' schemathesis opentelemetry-sdk
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m 'slow and not gpu and not comfyui' --shard $(SHARD)

# A core of the tests on Python 3.11, 3.12 and 3.13, each with the oldest and the newest versions that pyproject.toml allows.
# Hours and gigabytes; the result is in the README's table and known to the doctor.
test-versions: $(VENV)/.installed-dev
	$(BIN)/python -m tools.version_tests
	$(MAKE) pages

# Writes the tables of docs/native.md. Run with the Python of a ComfyUI, as test-comfyui is. Two workers, an architecture
# to each: one process would run out of mappings (vm.max_map_count) for the hundreds of programs, which XLA dies of.
native-table:
	$(PYTHON) -m pytest -m comfyui tests/native -n 2 --dist loadgroup --native-table docs/native.md

# The English locale, the help pages of the family nodes, the tables of models and the record of nodes (new ones are
# added), from the family cards and locales/*/help.json. tests/test_pages.py fails when one of them is stale.
pages: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tools.pages.parameters
	JAX_PLATFORMS=cpu $(BIN)/python -m tools.pages

# docs/aten-operators.md, from the installed torchax and small models of every family; nothing is compiled.
aten-operators: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tools.aten_operators docs/aten-operators.md

# The tables and plots of docs/torchax-vs-flax.md, from benchmarks/vae. Measured anew with
# `python -m benchmarks.vae --json benchmarks/vae/cpu.json`.
torchax-vs-flax: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.vae.pages

# docs/porting-table.md: diffusers' models, each small, tried on the CPU. Minutes.
porting-table: $(VENV)/.installed-dev
	$(BIN)/python -m tools.porting_table docs/porting-table.md

lint: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/test_architecture.py

clean:
	rm -rf .venv build/oldest .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	$(make-venv)
	@echo 'installing comfy-tpu into $(VENV)'
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(make-venv)
	@echo 'installing comfy-tpu and the development tools into $(VENV)'
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

# pip is the last thing that venv puts in place: without it the directory is the rest of an interrupted attempt.
define make-venv
@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"comfy-tpu needs Python 3.11 or newer, $(PYTHON) is {v.major}.{v.minor}; name another, make PYTHON=python3.12, or let uv bring one: uv venv --seed --python 3.12 $(VENV)")'
@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
endef
