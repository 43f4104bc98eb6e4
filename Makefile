# One door for people and for CI. `make serve` and `make test` do everything that a fresh clone needs.

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
MODEL := smollm2-135m-instruct

BIN := .venv/bin
RUN := .venv/.installed-run
DEV := .venv/.installed-dev
LMCACHE := .venv-lmcache/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help serve model test lint type fmt bench gpu-check kernels-table lmcache-check clean

help:  ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "  make %-13s %s\n", $$1, $$2}'

serve: $(RUN)  ## Install, fetch the demo model, and serve two demo tenants (ARGS="--port 8001": options of `lamina serve`)
	@$(BIN)/lamina models pull $(MODEL)
	@exec $(BIN)/lamina serve --demo $(ARGS)

model: $(RUN)  ## Fetch the demo model into the user's cache folder
	$(BIN)/lamina models pull $(MODEL)

# Two workers of one thread each; whole files, the long ones first. Passive waits: spinning OpenMP threads starve the
# servers that tests start beside them.
test: lint type model  ## Everything that CI checks (ARGS: options of pytest)
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(DEV)  ## Style, formatting, and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Two workers, as for the tests: from an empty cache, CI's, one takes minutes.
type: $(DEV)  ## Types
	$(BIN)/mypy -n 2

fmt: $(DEV)  ## Format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) model  ## Every figure that has to be reached: the KV tiers', then against peers (ARGS=--quick: a short look)
	@$(BIN)/python benchmarks/kv.py $(ARGS); missed=$$?; $(BIN)/python benchmarks/cpu.py $(ARGS) && exit $$missed

gpu-check: $(DEV)  ## Every kernel and the engine on this machine's GPU, under 8 minutes; without one, a small run on the CPU
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

kernels-table: $(DEV)  ## Compile every kernel for four chips and write the table that CI compares with
	env -u TRITON_INTERPRET $(BIN)/python -m lamina_kernels.gpu.aot --update --all $(ARGS)

# An environment of its own, because lmcache pins older packages. Not compiled: of its 2 GB little is ever imported.
lmcache-check: $(LMCACHE)  ## The LMCache tier against LMCache itself and its server, in an environment of its own
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 .venv-lmcache/bin/pytest tests/interop $(ARGS)

clean:  ## Remove everything that was made here; the user's cache and data folders stay
	rm -rf .venv .venv-lmcache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was made from, so an installation is repeated when pins or dependencies change.
$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[demo]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(RUN)

$(LMCACHE): pyproject.toml constraints.txt constraints-lmcache.txt
	$(PYTHON) -m venv .venv-lmcache
	awk -F == '!seen[$$1]++' constraints-lmcache.txt constraints.txt > .venv-lmcache/constraints.txt
	.venv-lmcache/bin/python -m pip install --disable-pip-version-check --no-compile -c .venv-lmcache/constraints.txt \
		$(PIP_FLAGS) -e '.[lmcache]' httpx pytest pytest-asyncio pytest-timeout
	@touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
