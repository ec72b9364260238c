# Every target sets up what it needs: on a fresh machine `make train` and `make test` are enough.
NEW_ENOUGH := -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do $$each $(NEW_ENOUGH) && echo $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
MESH ?= pp2 dp2 tp2
RESULTS := $(CURDIR)/runs/matrix.jsonl

.PHONY: help setup train test slow check docs pictures results matrix architectures clusters support bench chaos gpu clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## build .venv with everything in it

# torch first and alone, by the pinned version: a plain `torch` could bring gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, about a minute) ..."
	@test -x $(BIN)/python || $(or $(PYTHON),false) $(NEW_ENOUGH) || { echo "error: python: is missing or too old (need Python 3.11 or newer). Fix: install it, then make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }
	@$(BIN)/python $(NEW_ENOUGH) || { echo "error: $(VENV): has an old Python (need 3.11 or newer). Fix: rm -r $(VENV), then make $(or $(MAKECMDGOALS),setup)"; exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell cat constraints.txt | grep -v '^#') 2>&1 | grep -v "is ignored: it is neither" || true
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" 2>&1 | grep -v "is ignored: it is neither" || true
	@$(BIN)/python -c "import torch, weft" && $(BIN)/python -m compileall -qq $(VENV)/lib || true
	@$(BIN)/python -c "import torch, weft, pytest" && touch $@

train: OUT := runs/train-$(shell date +%Y%m%d-%H%M%S)
train: $(STAMP)  ## the main job: a small LLaMA 3 on 8 ranks (or MESH="cp2 dp2"), then the proof, then what it writes
	@$(BIN)/weft train --mesh "$(MESH)" --sample 400 --save.every 100 --out $(OUT) $(ARGS)
	@echo
	@$(BIN)/weft prove $(OUT) --first 20
	@echo
	@echo "Try next:"
	@echo "  more of what it has learned"
	@echo "    $(BIN)/weft generate $(OUT) --prompt 'def '"
	@echo "  go on, on another layout"
	@echo "    $(BIN)/weft train --out $(OUT) --resume auto --mesh dp2 --steps 300"
	@echo "  for transformers"
	@echo "    $(BIN)/weft export $(OUT) llama-py/"
	@echo "  another layout, the same numbers"
	@echo "    make train MESH=\"cp2 tp2 dp2\""
	@echo "  who does what, and why, without starting it"
	@echo "    $(BIN)/weft explain --mesh \"pp4 dp2\""
	@echo "  every tensor against one device"
	@echo "    $(BIN)/weft prove --mesh \"pp2 dp2 tp2\""
	@echo "  every key"
	@echo "    $(BIN)/weft train --help"

test: $(STAMP)  ## all tests, 8 to 16 minutes on 2 idle cores
	@$(BIN)/python -m compileall -qq -j 0 src
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not cluster" $(ARGS)

check: $(STAMP)  ## style, types, layers
	@$(BIN)/ruff format --check src tests examples
	@$(BIN)/ruff check src tests examples benchmarks
	@$(BIN)/lint-imports
	@$(BIN)/mypy
	@MYPYPATH=src:examples $(BIN)/mypy --explicit-package-bases examples

docs: pictures  ## the documentation as HTML in build/site; warnings are errors
	@log=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build 2>&1) || { echo "$$log" | grep -v '^INFO'; exit 1; }
	@echo "open build/site/index.html"

pictures: $(STAMP)  ## the pictures of the pages, drawn by weft; RECORD=1: from a new run of train and prove
	@$(if $(RECORD),PYTHONPATH=. $(BIN)/python -m tests.docs.terminal_recording)
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.docs.pictures >/dev/null

results: $(STAMP)  ## docs/results.md: four small public results, on one device and on layouts (ONLY=mnist: one of them)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.results $(ONLY)

bench: $(STAMP)  ## speed against torch's own, and seconds to the first step
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rivals
	@$(BIN)/python -m benchmarks.throughput
	@$(BIN)/python benchmarks/startup.py

gpu: $(STAMP)  ## all checks on one GPU, under 25 minutes; REHEARSE=1: tiny, on the CPU
	@$(BIN)/python -m benchmarks.gpu $(if $(REHEARSE),--rehearse)

matrix: $(STAMP)  ## the whole sweep of layouts x schedules x models against one device; writes docs/support.md (hours)
	@mkdir -p runs && rm -f $(RESULTS)
	@OMP_NUM_THREADS=1 WEFT_MATRIX_RESULTS=$(RESULTS) $(BIN)/python -m pytest -n 2 -m slow tests/matrix $(ARGS); \
		code=$$?; $(MAKE) --no-print-directory support; exit $$code

slow: $(STAMP)  ## the slow tests besides the matrix: 200 kills in the middle of a save, random cuts, adapters on 120 layouts, more pages, layouts, faults and examples of property tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --hypothesis-profile thorough -m "(slow or hypothesis) and not cluster" --ignore tests/matrix tests $(ARGS)

clusters: $(STAMP)  ## real Slurm, Ray and torchrun clusters on this machine (root; installs slurm-wlm, munge, ray)
	@which slurmd munged >/dev/null 2>&1 || apt-get install -y --no-install-recommends slurm-wlm munge
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[launchers]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"  # SkyPilot asks for an older click than typer; newer packages stay
	@mkdir -p runs
	@OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -m pytest -m cluster -o junit_family=xunit1 --junitxml=runs/clusters.xml tests/clusters $(ARGS)

chaos: $(STAMP)  ## 500 faults of 19 kinds injected on 8 layouts, compared with runs without faults (an hour; ARGS="--faults 40": minutes)
	@OMP_NUM_THREADS=1 nice -n 10 $(BIN)/weft chaos --faults 500 --seed 8 $(ARGS)

support: $(STAMP)  ## docs/support.md from the last results of make matrix
	@PYTHONPATH=. $(BIN)/python -m tests.matrix.support $(RESULTS)

architectures: $(STAMP)  ## every decoder of transformers on six layouts against its own class; writes docs/architectures.md (hours; ARGS=--missing: what has no result)
	@OMP_NUM_THREADS=1 PYTHONPATH=. nice -n 10 $(BIN)/python -m benchmarks.architectures $(ARGS)

programs: $(STAMP)  ## public programs of other people on 16 layouts against one device; writes docs/programs.md (half an hour)
	@OMP_NUM_THREADS=1 PYTHONPATH=. nice -n 10 $(BIN)/python -W ignore -m tests.programs_of_others.outcomes $(ARGS)
	@PYTHONPATH=. $(BIN)/python -m tests.programs_of_others.page

clean:  ## remove what the targets made
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache
