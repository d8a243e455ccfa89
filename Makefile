# What people and CI call. Every target sets up what it needs; a second run skips that.
# `sh scripts/make TARGET` does the same on a machine that has no make yet.

PYTHON := .venv/bin/python
# Thousands of processes import the checkout: they keep its bytecode, whatever the caller's shell says.
export PYTHONDONTWRITEBYTECODE :=
# Test processes side by side: those that compute, one a core, as each imports all that tests use; and
# those that wait, each for a Slurm of its own (tests/lanes.py).
CORES := $(shell nproc)
COMPUTE ?= $(CORES)
WAIT ?= $(shell expr 2 \* $(CORES))
# Without tests, which pytest compiles by itself.
COMPILE = $(PYTHON) -m compileall -q -j 2 -x '/test_[^/]*$$' hpctrain tests bench
LANES = $(PYTHON) tests/lanes.py --compute $(COMPUTE) --wait $(WAIT)
.DEFAULT_GOAL := help
# Faults of `make chaos`, and the storm: the same seed gives the same faults at the same steps.
N ?= 100
NIGHTLY_N ?= 50
# Releases that `make test-slurms` runs on; Debian's packages of them are fetched into .slurm.
SLURMS ?= 22.05 24.11 26.05
SEED ?= 1
.PHONY: help install install-tests demo test nightly quick unit lint megatron-core-newest golden reliability test-slurms chaos many-ranks bench bench-planner house screens gpu sandbox-down clean

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install:  ## Slurm and munge from the distribution, .venv with pinned packages, .venv/bin/hpctrain
	@sh scripts/setup

install-tests:
	@sh scripts/setup --tests

demo: install  ## Train, preempt, resume and finish a real Megatron job on a real Slurm
	@$(PYTHON) scripts/demo.py

test: install-tests  ## The tests of every landing, in two lanes; docs/tests.md says which
	@$(COMPILE)
	@$(LANES)

nightly: install-tests  ## All tests: variants, newest releases, emulated GPU, vLLM, Prometheus, chaos, mutants
	@$(COMPILE)
	@$(LANES) --nightly
	@$(MAKE) megatron-core-newest
	@$(MAKE) chaos N=$(NIGHTLY_N)

quick: install  ## [SINCE=REV]: what a change reaches by imports, the nearest tests first; 60 s
	@$(PYTHON) tests/quick.py $(if $(SINCE),--since $(SINCE))

unit: install-tests  ## The fast tests only
	@$(PYTHON) -m pytest tests/unit tests/golden tests/sites tests/test_house.py

megatron-core-newest: install  ## The tests of megatron-core with its newest release
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.venv/megatron-lm $(PYTHON) -m pytest -n $(COMPUTE) \
		--dist worksteal tests/engines --ignore-glob='*/test_deepspeed_*' \
		--ignore-glob='*/test_megatron_lm_*' --ignore-glob='*/test_native_*'

lint: install  ## Style, types, architecture contracts, shell scripts
	@$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports --config setup.cfg --no-cache
	@.venv/bin/shellcheck --external-sources scripts/setup scripts/make \
		scripts/apptainer-from-debian scripts/haproxy-from-debian scripts/serving-environment \
		hpctrain/sandbox/debian-packages.bash \
		hpctrain/sandbox/slurm-from-debian hpctrain/sandbox/prometheus-from-debian .ci/run

golden: install  ## Write the golden scripts and transcripts anew; review the diff
	@$(PYTHON) -m pytest tests/golden tests/sites --write-golden

reliability: install  ## All faults on a real Slurm, into docs/reliability.md
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WAIT) --dist worksteal \
		--nightly tests/slurm/faults --write-reliability

test-slurms: install  ## The rehearsals and the demo on each of SLURMS, into docs/slurm-versions.md
	@$(PYTHON) scripts/test_slurms.py --workers $(WAIT) $(SLURMS)

chaos: install  ## N=100 faults of both tables at random, three runs at a time, and three questions
	@$(PYTHON) -m bench.chaos --strikes $(N) --trainer-strikes $$(($(N) / 5)) --seed $(SEED)

many-ranks: install  ## 512 ranks on 64 nodes of a real Slurm, four faults; writes docs/scale.md
	@$(PYTHON) -m bench.many_ranks --write

bench-planner: install  ## RUNS=FILE.csv [OOM=FILE.csv]: the planner, Calculon and SimuMax on the same rows
	@$(PYTHON) bench/planner_accuracy.py --runs $(RUNS) $(if $(OOM),--oom $(OOM)) --split 0.7
	@$(PYTHON) -m bench.peers --runs $(RUNS)

bench: install  ## Benchmarks and their tests; each prints ratios against a peer in the same run
	@$(PYTHON) -m pytest -q bench/tests
	@$(PYTHON) bench/login_node.py
	@$(PYTHON) -m bench.overhead
	@$(PYTHON) -m bench.overhead.messages
	@$(PYTHON) bench/planner_search.py
	@$(PYTHON) -m bench.digests_while_loading
	@$(PYTHON) -m bench.initial_weights
	@$(PYTHON) -m bench.recovery
	@$(PYTHON) -m bench.supervisor_cost
	@$(PYTHON) -m bench.footprint

house: install  ## Measures of the code base; draws docs/rooms.md
	@$(PYTHON) -m bench.house --pictures

screens: install  ## Pictures of what people see on a terminal, into docs/images
	@$(PYTHON) -m bench.screens

# The user's own Python, which sees the GPUs. Nothing is installed by this target.
gpu:  ## Rungs on real GPUs (docs/gpu.md): RUNG=1..6 GPUS=8 PROFILE=NAME SPEC=FILE PYTHON=python3
	@$(PYTHON) -m bench.gpu $(if $(RUNG),--rung $(RUNG)) $(if $(GPUS),--gpus $(GPUS)) \
		$(if $(PROFILE),--profile $(PROFILE)) $(if $(SPEC),--spec $(SPEC)) $(GPU_OPTIONS)

sandbox-down: install  ## Take down the sandbox of an interrupted demo
	@.venv/bin/hpctrain sandbox down --directory .demo/sandbox

clean:  ## Remove everything that the targets above have made
	rm -rf .venv .demo .slurm .pytest_cache .mypy_cache .ruff_cache data
