# Everything runs in .venv. The package itself accepts a range of torch (pyproject.toml);
# the version pinned here is the one that these commands are tested with.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
BENCH_DIR ?= bench-results

.PHONY: setup test test-all check lint bench demo clean

$(VENV)/.ready: pyproject.toml requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[hf,plot,dev]"
	$(BIN)/pip install --quiet --no-deps -r requirements-demo.txt
	touch $@

setup: $(VENV)/.ready

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m "long or not long"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The book and the pretrained weights come from the package index, see requirements-demo.txt.
demo: setup
	$(BIN)/smart-infinity train --model smollm2-135m --devices demo/device0 demo/device1 \
		--steps 20 --batch-size 1 --seq-len 128 --lr 2e-5 --output demo/run --fresh

bench: setup
	mkdir -p $(BENCH_DIR)/device0
	$(BIN)/smart-infinity bench kernel --json $(BENCH_DIR)/kernel.json
	$(BIN)/smart-infinity bench update --params 200_000_000 --devices $(BENCH_DIR)/device0 \
		--json $(BENCH_DIR)/update.json

clean:
	rm -rf $(VENV) demo $(BENCH_DIR) build dist
