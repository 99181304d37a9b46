# The two commands that do everything: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATASET := datasets/stdlib-text
ARGS ?=
# Many tests wait for processes to start or to be found dead: two at a time fill two cores.
JOBS ?= 2

.PHONY: help setup train test check unit soak bench docs clean

help:  ## Show this help
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## Create .venv and install everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf]'
	touch $(STAMP)

$(DATASET)/dataset.json: | $(STAMP)
	$(BIN)/elastic-trainer make-dataset stdlib-text --out $(DATASET)

train: $(STAMP) $(DATASET)/dataset.json  ## Train a small GPT on Python's standard library
	$(BIN)/elastic-trainer train gpt $(ARGS)

test: check unit  ## Run every check and test

check: $(STAMP)  ## Lint, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)  ## Run the tests
	$(BIN)/pytest -m "not soak" -n $(JOBS) --dist loadfile --durations 25 --durations-min 5 $(ARGS)

soak: $(STAMP)  ## Run the long tests
	$(BIN)/pytest -m soak $(ARGS)

bench: $(STAMP)  ## Run the benchmarks, one JSON object each
	for b in vs_torch_pipelining async_vs_sync control_overhead startup recovery balance; do \
	  $(BIN)/python benchmarks/$$b.py --json || exit 1; done

docs: $(STAMP)  ## Generate docs/configuration.md
	$(BIN)/python -m elastic_trainer.config > docs/configuration.md

clean:  ## Remove caches and the environment, keep runs and datasets
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
