# `make demo` and `make test` set everything up first: once, into .venv, redone when a pinned version changes.

.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$name >/dev/null 2>&1 && \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; done)
# one more than two cores: tests wait for processes, servers and locks
TESTS_AT_ONCE ?= 3
# the tests start hundreds of processes: each module is compiled once, whatever the caller has set
test test-all deploy-local: export PYTHONDONTWRITEBYTECODE =

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

.PHONY: demo
demo: .venv/.installed ## A year of flights through the whole pipeline, checked against DuckDB
	@$(BIN)/dormouse demo

.PHONY: test
test: .venv/.installed ## All tests but the slow tier
	@$(BIN)/python -m pytest -m "not slow" -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder

.PHONY: test-all
test-all: .venv/.installed ## All tests
	@$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder

.PHONY: deploy-local
deploy-local: .venv/.installed ## Deploy into an emulator on this machine, use it, destroy it; five minutes
	@$(BIN)/python -m tests.deploy_local

.PHONY: emr-package
emr-package: .venv/.installed ## The archive that Spark on EMR runs, into build/emr (ARCHITECTURE=x86_64 for Intel)
	@$(BIN)/python -m emr.build --architecture $(or $(ARCHITECTURE),arm64)

.PHONY: query-image
query-image: .venv/.installed ## What the image of the query service is built from, into build/query-image
	@$(BIN)/python -m query_image.build

.PHONY: lint
lint: .venv/.installed ## ruff, mypy --strict, and vulture for what nothing uses
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy --strict
	@$(BIN)/vulture

.PHONY: format
format: .venv/.installed ## Format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: lambdas
lambdas: .venv/.installed ## Build the code of the lambdas into build/lambdas
	@$(BIN)/python -m lambdas.build

.PHONY: docs
docs: .venv/.installed ## Write the reference of a deployment's settings and the picture of its stacks anew
	@$(BIN)/python -m dormouse.settings.reference
	@$(BIN)/python -m stacks.diagram

.PHONY: requirements
requirements: .venv/.installed ## Pin the newest versions that pyproject.toml allows
	@$(PIP) uv
	@$(BIN)/uv pip compile --quiet --upgrade --all-extras --no-header --no-annotate --python-version 3.11 \
		--output-file requirements.txt pyproject.toml

.PHONY: clean
clean: ## Remove .venv and what tests and tools left
	@rm -rf .venv .venv-emulator node_modules cdk.out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A finished set-up is brought up to date in place; one that was interrupted has no stamp, and starts again.
.venv/.installed: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Dormouse needs Python 3.11 or later on the PATH; none was found" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make a virtual environment: install its venv package" \
			"(on Debian and Ubuntu: apt install $(notdir $(PYTHON))-venv)" >&2; exit 1; }
	@echo "Setting up .venv (once, about two minutes)…"
	@test -e $@ || rm -rf .venv
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@$(BIN)/python -m pip uninstall -qqy dormouse && rm -rf dormouse.egg-info  # what it was called once
	@$(PIP) --no-deps --editable .
	@touch $@
