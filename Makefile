# Every target sets up what it needs: on a fresh machine `make train` and `make test` are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
MESH ?= pp2 dp2 tp2
export OMP_NUM_THREADS ?= 1

.PHONY: help setup train test check matrix bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## build .venv with everything in it

# torch first and alone, by the pinned version: a plain `torch` could bring gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell cat constraints.txt | grep -v '^#') 2>&1 | grep -v "is ignored: it is neither" || true
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" 2>&1 | grep -v "is ignored: it is neither" || true
	@$(BIN)/python -c "import torch, weft" && $(BIN)/python -m compileall -q $(VENV)/lib || true
	@$(BIN)/python -c "import torch, weft, pytest" && touch $@

train: $(STAMP)  ## the main job: the embedded default on 8 ranks, then proof against one process, then a sample
	@$(BIN)/weft train --mesh "$(MESH)" --prove 20 $(ARGS)

test: $(STAMP)  ## all tests, under 10 minutes on 2 cores
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

check: $(STAMP)  ## style, types, layers
	@$(BIN)/ruff format --check src tests
	@$(BIN)/ruff check src tests
	@$(BIN)/lint-imports
	@$(BIN)/mypy

matrix: $(STAMP)  ## the whole sweep of layouts x schedules x models against one device
	@$(BIN)/python -m pytest -n 2 -m slow tests/matrix $(ARGS)

clean:  ## remove what the targets made
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
