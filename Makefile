# Everything runs from .venv, which `make install` makes with Python 3.11 or newer.
PYTHON ?= python3
PORT ?= 3000
WORKERS ?= 3
BIN := .venv/bin
STAMP := .venv/.installed
ARCHIVE := .venv/spark-classes.jsa

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast check ui soak compat bench docs diagrams pictures clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Compiled here, not at the first start: with PYTHONDONTWRITEBYTECODE set, every start would compile.
install: $(STAMP) ## Make .venv with everything that is needed here
	@$(BIN)/python -m compileall -q opendataflow_dagster

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, \
	$(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11 install" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dagster-spark,serve,java,dev]'
	@touch $@

demo: install ## See a month of chunks run, fail and catch up, by Spark and Dagster, on SQLite
	@$(BIN)/odf demo

# Whole files, in the order of tests/conftest.py: the long ones aren't among the last. What they write is in memory,
# where there are 8 GB for it: on a disk, every commit of a test's database waits.
define PYTEST
	@memory=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8000000 { print $$6 }'); \
	folder=$$(mktemp -d "$${memory:-$${TMPDIR:-/tmp}}/odf-tests.XXXX") || exit; chmod 755 "$$folder"; \
	trap 'rm -rf "$$folder"' EXIT; trap : INT TERM; \
	TMPDIR=$$folder $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(if $(SHUFFLE),--shuffle=$(SHUFFLE))
endef

test: install $(ARCHIVE) ## Run the tests, on SQLite and on a PostgreSQL of their own; WORKERS=3 SHUFFLE=seed
	$(PYTEST)

test-fast: install ## Run the tests that start no Spark, no PostgreSQL and no Dagster
	$(PYTEST) -m "not soak and not servers"

# Tests start Spark a hundred times: with this, each start takes half the time.
$(ARCHIVE): $(STAMP)
	@$(BIN)/python -m tests.support.spark_archive

check: install ## Check style, format, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

ui: install ## Open the demo's data in Dagster's UI; PORT=3000
	@env PORT=$(PORT) definitions/ui.sh

soak: install ## Run the tests that take minutes
	$(BIN)/python -m pytest -m soak

compat: install ## Run the mirror's tests on the newest Dagster and three older minors, 10 minutes
	$(BIN)/python -m tests.support.dagster_versions $(VERSIONS)

bench: install ## Run all benchmarks, 40 minutes, and write what they say to docs/benchmarks.md
	$(BIN)/python benchmarks/all.py --record

docs: install ## Write the pages that are made from the code, and build the site into build/site
	$(BIN)/python docs/commands.py > docs/commands.md
	$(BIN)/python docs/reference.py > docs/reference.md
	$(BIN)/odf schema > opendataflow_dagster/flow/flow.schema.json
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'Read it: $(BIN)/python -m http.server --directory build/site 8000'

diagrams: install ## Draw the diagrams of the documents again: needs Chromium and a network
	PYTHONPATH=. $(BIN)/python docs/diagrams.py

pictures: install ## Take the pictures of Dagster and of the terminal again: needs Chromium; look at each
	$(BIN)/python docs/terminal.py
	$(BIN)/python -m pytest -m pictures tests/e2e/test_pictures.py

clean: ## Remove what make and the tools made; .dataflow/ stays, it is data
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
