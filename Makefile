# Everything a fresh machine needs is python3 (3.11 or newer) and make.
.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow check format bench docs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS := 1

help:
	@echo "make demo       train a small Llama on real text with two processes, then let it write"
	@echo "make test       checks and the fast tests"
	@echo "make test-slow  full matrices, fuzzing and chaos"
	@echo "make check      format, lint, types, spelling, import arrow"
	@echo "make format     rewrite files in the project's format"
	@echo "make bench      every benchmark"
	@echo "make docs       check that links and commands in the docs hold"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/penteract data build --source stdlib --tokenizer bytes --output demo/stdlib --workers 2
	$(BIN)/penteract train configs/demo.toml --nproc 2
	$(BIN)/penteract generate demo/run/checkpoints --prompt "def main(" --max-tokens 400
	@echo
	@echo "metrics: demo/run/metrics.jsonl   checkpoints: demo/run/checkpoints"
	@echo "Run it again to continue; 'rm -r demo' starts afresh."

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m pytest tests/test_import_arrow.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

bench: bench-install
	for script in benchmarks/*.py; do \
		$(BIN)/python $$script || [ $$? = 2 ] || exit 1; done  # 2: a peer is not installed

.PHONY: bench-install
bench-install: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'

docs: $(STAMP)
	$(BIN)/python -m pytest tests/test_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info demo runs
