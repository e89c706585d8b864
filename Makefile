# `make demo` and `make test` make .venv by themselves; nothing but Python 3.11+ and the network is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
# Tests start hundreds of processes: what they import is compiled once.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov

.PHONY: install demo test test-all test-lowest test-highest lint docs bench release clean

install: $(READY)

$(DEMO): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, a minute or two):"
	@echo "  1/3  a virtual environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "  2/3  torch, the largest part, and uv, which installs the rest"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch uv
	@echo "  3/3  what the demonstration needs: tables, queries, the ledger, reports"
	@$(UV) --editable ".[demo]"
	@touch $@

$(READY): $(DEMO)
	@echo "  and what tests, linters and documentation need"
	@$(UV) --compile-bytecode --editable ".[all,dev]"
	@touch $@

$(PEERS): $(READY)
	$(UV) --editable ".[all,dev,peers]"
	touch $@

demo: $(DEMO)
	$(BIN)/terrine demo --out demo

test: $(READY)  # everything but the slow tests, and which lines they ran
	$(PYTEST) -m "not slow"

test-all: $(PEERS)  # everything, on more examples, and beside the peers
	TERRINE_EXAMPLES=4 $(PYTEST)

test-lowest: $(DEMO)  # the oldest versions that pyproject.toml allows
	$(BIN)/python tests/other_versions.py lowest

test-highest: $(DEMO)  # the newest versions there are
	$(BIN)/python tests/other_versions.py highest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; for the search: $(BIN)/python -m http.server -d site"

bench: $(PEERS)
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/pate_analysis.py
	$(BIN)/python benchmarks/sgd.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/queries.py
	$(BIN)/python benchmarks/federated.py cost

release: $(READY)  # wheel and sdist in dist/, checked as a user would meet them
	$(BIN)/python tests/release.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis demo build dist site
