# `make` alone prints what there is. Everything runs in .venv, which is made on first use.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native
# Many tests wait for processes and timers, so one worker more than there are cores keeps them busy.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)

.PHONY: help setup native check databases java test snippets demo sim chaos spark-crash spark-cluster interop bench mutants planted fuzz docs lock clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install what is locked (every target does this by itself)

$(READY): pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "escrowmq needs Python 3.11 or newer; say which with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(NATIVE): $(READY) native/Cargo.toml native/Cargo.lock $(wildcard native/src/*.rs)
	@.ci/native $(BIN)/python
	@touch $@

native: $(NATIVE)  ## build the native module, if cargo is there (targets that run a broker do this by themselves)

check: $(READY)  ## style, types, import contracts, changelog against version; the native module, if cargo is there
	@.ci/native $(BIN)/python check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports

databases:  ## PostgreSQL from Debian's package, for tests; with mariadb-server: DATABASES="postgresql mariadb-server"
	@.ci/databases $(DATABASES)

java:  ## Java 17 or newer for Spark: the machine's own, else Debian's package
	@.ci/java

test: $(NATIVE) databases java  ## every test that CI runs
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not nightly"

snippets: $(NATIVE) java  ## every code block of the documentation, also of the pages about Spark, which `make test` leaves out
	$(BIN)/pytest -v tests/e2e/test_docs_snippets.py

demo: $(NATIVE) java  ## Bob pays Smith while processes are killed; Spark proves that both banks agree
	$(BIN)/python -m examples.bank

# Besides the simulations, the files of tests/unit and tests/e2e that have a nightly test; tests/test_house.py checks that none is missing.
LONG_TESTS := tests/unit/store/test_flipped_bits.py tests/e2e/broker/test_crowds.py tests/e2e/broker/test_flow_control.py tests/e2e/broker/test_greedy_clients.py \
	tests/e2e/sql/test_crashes.py tests/e2e/pipeline/test_reconcile.py tests/e2e/test_chaos.py tests/e2e/test_docs_snippets.py

sim: $(NATIVE)  ## long: every fault position, every flipped bit, many seeds, fuzzing, 10,000 topics, a ledger of 1,000,000 (SEEDS=… makes it longer)
	ESCROWMQ_SEEDS=$(or $(SEEDS),2000) HYPOTHESIS_PROFILE=long $(BIN)/pytest -n auto --timeout 0 tests/property tests/simulation $(LONG_TESTS)

chaos: $(NATIVE)  ## kill, freeze, cut off and fill up a broker at work, account for every message (MINUTES=…, SEED=…; KILLS=200 only kills; FLUSH=sync, async, both; REQUEST_PATH=native, python)
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),2) $(if $(SEED),--seed $(SEED)) $(if $(KILLS),--kills $(KILLS)) $(if $(FLUSH),--flush $(FLUSH)) $(if $(REQUEST_PATH),--request-path $(REQUEST_PATH))

spark-crash: $(NATIVE) java  ## kill Spark and the broker at every step of a write, count the rows (RUNS=…, SEED=…, FOREACH_BATCH=1)
	$(BIN)/python -m tests.spark_crash --runs $(or $(RUNS),45) --seed $(or $(SEED),1) $(if $(FOREACH_BATCH),--foreach-batch)

spark-cluster: $(NATIVE) java  ## every pipeline on a Spark master with two workers
	$(BIN)/pytest -v tests/e2e/spark/test_cluster.py

interop: $(NATIVE)  ## both directions against Apache RocketMQ 4.9.7 and 5.5.0 (needs Java and Maven)
	$(BIN)/pytest -v --timeout 900 tests/interop tests/articles

bench: $(NATIVE)  ## figures as ratios in one run, kept in bench/results/; PARTS="broker broker-tx escrow ..."
	$(BIN)/python -m bench $(PARTS)

mutants: $(READY)  ## plant small mistakes in a copy of src, list those that no test notices (COUNT=…, SEED=…, PACKAGES="store escrow", TESTS="tests/unit …")
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),50) --seed $(or $(SEED),1) $(addprefix --package ,$(PACKAGES)) $(if $(TESTS),--tests $(TESTS))

planted: $(READY)  ## plant the mistakes of tests/planted_native in a copy of the native path; all must be found (needs cargo)
	$(BIN)/python -m tests.planted_native

fuzz: $(READY)  ## fuzz the native module, each target for MINUTES=… [5]; needs a nightly Rust and cargo-fuzz
	@.ci/native $(BIN)/python fuzz $(or $(MINUTES),5)

docs: $(READY)  ## write the generated parts of docs/: tables, API reference
	$(BIN)/python -m docs.generate

lock:  ## resolve the development dependencies again
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url -o requirements/dev.txt pyproject.toml requirements/dev.in

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) native/target .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .mutants
