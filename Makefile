# Every target makes .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers

.PHONY: install demo test lint docs bench clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	touch $@

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev,peers]"
	touch $@

demo: $(READY)
	$(BIN)/terrine compare --noise 4 --rate 0.01 --delta 1e-5 --epochs 400 --plot demo/accountants.png
	$(BIN)/terrine demo --out demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(PEERS)
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/pate_analysis.py
	$(BIN)/python benchmarks/sgd.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/queries.py
	$(BIN)/python benchmarks/federated.py cost

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis demo build dist site
