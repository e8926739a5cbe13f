# `make demo` and `make test` set everything up by themselves (scripts/setup.sh).
SHELL := /bin/bash
PYTEST := .venv/bin/python -m pytest
MODEL ?=
DEMO_ARGUMENTS ?=

.PHONY: help demo test test-fast lint setup setup-test kills soak clean

help:
	@echo "make demo       a real SGLang server restores a conversation from disk (MODEL=path for your own model)"
	@echo "make test       everything: lint, fast tests, real processes, real SGLang servers"
	@echo "make test-fast  the tests that need no server, under two minutes"
	@echo "make lint       ruff and mypy"
	@echo "make kills      the long campaigns: processes killed at random moments; writes docs/reports/kills*.md"
	@echo "make soak       the file tier under load with a failing disk, 20 minutes; writes docs/reports/soak.md"
	@echo "make clean      remove .venv and everything the demo made"

setup:
	@scripts/setup.sh demo

setup-test:
	@scripts/setup.sh test

demo: setup
	@.venv/bin/hicache-ext demo $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGUMENTS)

test: lint
	$(PYTEST) -m "not slow" --cov --cov-report=
	$(PYTEST) -m slow --cov --cov-append --cov-report=term:skip-covered

test-fast: setup-test
	$(PYTEST) -m "not slow"

lint: setup-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

kills: setup-test
	.venv/bin/python -m tests.campaigns.kill_writers --kills 200 --seed 1 --report docs/reports/kills.md
	.venv/bin/python -m tests.campaigns.kill_slabs --kills 1000 --seed 1 --report docs/reports/kills-slab.md

soak: setup-test
	.venv/bin/python -m tests.campaigns.soak --seconds 1200 --seed 1 --report docs/reports/soak.md

clean:
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
