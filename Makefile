# Every target sets up what it needs by itself (scripts/setup.sh).
SHELL := /bin/bash
PYTEST := .venv/bin/python -m pytest
# Test files run beside each other; each file's tests in one process, because they share servers.
WORKERS ?= 2
BESIDE := -n $(WORKERS) --dist loadfile
# One more than cores: half of the fast tests' time they wait, for disks, for other processes, for a pause to end.
FAST_WORKERS ?= 3
FAST := -n $(FAST_WORKERS) --dist loadfile
# What tests/thorough.py leaves out is for test-all.
SOON := not thorough
COVERAGE := --cov --cov-report=term:skip-covered
MODEL ?=
DEMO_ARGUMENTS ?=
RELEASE ?=
# Of make prove-runs.
RUNS ?= 200
# Of make trouble.
ENGINES ?= redis mooncake object
# Of make decode-throughput.
MODELS ?= llama gemma4 qwen3_next
# The tests start hundreds of processes that import the same modules: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-fast coverage test-release releases test-gpu test-radosgw lint docs clean
.PHONY: setup setup-docs setup-test setup-test-all kills guards-campaign trouble soak
.PHONY: conversations damages dying-devices power-loss sanitize wheels
.PHONY: decode-throughput pull-or-recompute trouble-table prove-runs

help:
	@echo "make demo       a real SGLang server is killed and goes on from disk (MODEL=path for your own model)"
	@echo "make test       what every change must pass: lint, fast tests, real processes, a real SGLang server for each promise"
	@echo "make test-all   every test, and which lines of the package the fast ones ran; an hour"
	@echo "make test-fast  the tests that need no server and no other process, two minutes on two cores"
	@echo "make coverage   all fast tests, and which lines of the package they ran"
	@echo "make test-release RELEASE=0.5.24  everything that needs no server, and a file tier under real servers, with that SGLang"
	@echo "make releases   the tests of storage with every tested SGLang, 40 minutes; writes the table in README.md"
	@echo "make test-radosgw  the object tier against Ceph's S3 gateway (Debian: ceph-mon ceph-osd ceph-common radosgw)"
	@echo "make test-gpu   copy engines on a real NVIDIA GPU, races and compute-sanitizer included; says so without one"
	@echo "make lint       ruff and mypy"
	@echo "make kills      the long campaigns: processes killed at random moments, also in containers and stopped; 55 minutes"
	@echo "make guards-campaign  thousands of schedules of faults over guarded tiers; writes build/reports/guards.md"
	@echo "make trouble    pools killed, frozen, full, slow and cut off under two real servers, 8 minutes each (ENGINES=redis); writes build/reports/"
	@echo "make trouble-table  what each open storage backend does to a page in trouble, as root, half an hour; writes docs/trouble.md"
	@echo "make conversations  50 at once on a real pair, cut off and retracted: no memory and no page is lost, 5 minutes"
	@echo "make prove-runs  hicache-ext prove over and over without a fault, others asking meanwhile: no alarm; then one whole run (RUNS=200); writes build/reports/prove.md"
	@echo "make soak       the file tier under load with a failing disk, 20 minutes, in containers and stopped, 20 more, and on page files, 7"
	@echo "make damages    files of a tier damaged at random 1,000 times, its index 20,000 times, 30 minutes; writes build/reports/damages.md"
	@echo "make dying-devices  devices that die under a tier, ext4 and XFS, as root, 10 minutes; writes build/reports/dying-devices.md"
	@echo "make power-loss the power cut 300 times, ext4 and XFS, as root, 22 minutes; writes build/reports/power-loss*.md"
	@echo "make decode-throughput  a real pair: decoding with and without the decode writer, 10 minutes each (MODELS=llama); writes build/reports/"
	@echo "make pull-or-recompute  real servers over a tier that slows step by step, 8 minutes; writes build/reports/"
	@echo "make sanitize   the native core with AddressSanitizer, UBSan and ThreadSanitizer, 20 minutes"
	@echo "make wheels     wheels for x86-64 and ARM64 in dist/, compiled by zig"
	@echo "make docs       the documentation as a site in build/site; every broken link and anchor fails it"
	@echo "make clean      remove .venv and what tests and builds made"

setup:
	@scripts/setup.sh demo

setup-docs:
	@scripts/setup.sh docs

setup-test:
	@scripts/setup.sh test

setup-test-all:
	@scripts/setup.sh test-all

demo: setup
	@.venv/bin/hicache-ext demo $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGUMENTS)

test: lint
	$(PYTEST) $(BESIDE) -m "$(SOON)" --durations=20

test-all: setup-test-all lint coverage
	$(PYTEST) $(BESIDE) -m slow --durations=100

test-fast: setup-test
	$(PYTEST) $(FAST) -m "not slow and not patient and $(SOON)"

coverage: setup-test
	$(PYTEST) $(FAST) -m "not slow" $(COVERAGE)

test-release: setup-test
	@[ -n "$(RELEASE)" ] || { echo "name a release: make test-release RELEASE=0.5.24"; exit 2; }
	.venv/bin/python -m tests.releases.run $(RELEASE) --tests everything servers pairs

releases: setup-test
	.venv/bin/python -m tests.releases.run --tests storage servers pairs --write

test-radosgw: setup-test
	$(PYTEST) tests/storage/remote/object/radosgw_suite.py

test-gpu: setup-test
	.venv/bin/python -m tests.campaigns.gpu_kernels
	@if command -v compute-sanitizer >/dev/null; then \
	  for tool in memcheck racecheck initcheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 9 .venv/bin/python -m tests.campaigns.gpu_kernels --small || exit 1; \
	  done; \
	else echo "compute-sanitizer is not installed (it comes with the CUDA toolkit): its checks did not run"; fi

lint: setup-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy -p benchmarks -p tests.rigs -p tests.campaigns -p tests.e2e

kills: setup-test
	.venv/bin/python -m tests.campaigns.kills --layout pages --kills 200 --seed 1 --report build/reports/kills.md
	.venv/bin/python -m tests.campaigns.kills --layout pages --kills 200 --seed 2 --namespaces --stops --report build/reports/kills-pods.md
	.venv/bin/python -m tests.campaigns.kills --kills 1000 --seed 1 --report build/reports/kills-slab.md
	.venv/bin/python -m tests.campaigns.kills --kills 1000 --seed 2 --namespaces --report build/reports/kills-slab-namespaces.md
	.venv/bin/python -m tests.campaigns.kills --kills 1000 --seed 3 --namespaces --stops --report build/reports/kills-slab-pods.md
	.venv/bin/python -m tests.campaigns.kills --layout pages --kills 200 --seed 7 --transforms --report build/reports/kills-transforms.md
	.venv/bin/python -m tests.campaigns.kills --kills 500 --seed 6 --transforms --report build/reports/kills-slab-transforms.md

guards-campaign: setup-test
	.venv/bin/python -m tests.campaigns.guard_schedules --schedules 4000 --seed 1 --report build/reports/guards.md

conversations: setup-test
	HICACHE_EXT_CONVERSATIONS=50 $(PYTEST) tests/e2e/test_pd_pair.py -k many_conversations

prove-runs: setup-test
	.venv/bin/python -m tests.campaigns.prove_runs --runs $(RUNS) --report build/reports/prove.md

trouble: setup-test
	@for engine in $(ENGINES); do \
	  .venv/bin/python -m tests.campaigns.pool_trouble --engine $$engine --report build/reports/pool-trouble-$$engine.md || exit 1; \
	done

trouble-table: setup-test
	.venv/bin/python -m pip --disable-pip-version-check -q install --no-deps --target build/rivals/packages -r benchmarks/trouble/rivals.txt
	.venv/bin/python -m benchmarks.trouble --json docs/reports/trouble.json --report docs/trouble.md

soak: setup-test
	.venv/bin/python -m tests.campaigns.soak --seconds 1200 --seed 1 --report build/reports/soak.md
	.venv/bin/python -m tests.campaigns.soak --seconds 1200 --seed 2 --namespaces --stops --report build/reports/soak-pods.md
	.venv/bin/python -m tests.campaigns.soak --seconds 400 --seed 3 --namespaces --stops --layout pages --report build/reports/soak-pages.md

damages: setup-test
	.venv/bin/python -m tests.campaigns.damages --damages 1000 --seed 1 --report build/reports/damages.md
	.venv/bin/python -m tests.campaigns.scribbles --rounds 20000 --seed 1

dying-devices: setup-test-all
	.venv/bin/python -m tests.campaigns.dying_devices --runs 25 --seed 1 --report build/reports/dying-devices.md

power-loss: setup-test-all
	.venv/bin/python -m tests.campaigns.power_loss --cuts 50 --seed 1 --report build/reports/power-loss.md
	.venv/bin/python -m tests.campaigns.power_loss --cuts 25 --seed 2 --transforms --report build/reports/power-loss-transforms.md

decode-throughput: setup-test
	@for model in $(MODELS); do \
	  .venv/bin/python -m tests.campaigns.decode_throughput --model $$model --minutes 8 \
	    --report build/reports/decode-throughput-$$model.md || exit 1; \
	done

pull-or-recompute: setup-test
	.venv/bin/python -m tests.campaigns.pull_or_recompute --minutes 7 --report build/reports/pull-or-recompute.md

sanitize: setup-test
	.venv/bin/python -m tests.native.sanitized

wheels: setup-test
	.venv/bin/python -m pip --disable-pip-version-check -q install ziglang==0.13.0
	.venv/bin/python -m scripts.wheels

docs: setup-docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "open build/site/index.html; with search: .venv/bin/python -m http.server -d build/site"

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
