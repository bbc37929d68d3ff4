# One line each; every target makes its own virtual environment first, or refreshes it when pyproject.toml or
# constraints.txt changed. `make PYTHON=/path/to/python3.12 test` chooses the interpreter, `VENV=` the folder.

VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# The ranks of a test share the machine's few cores, so that threads within a rank only get in each other's way.
# A hundred processes import the package: they find its bytecode, whatever the caller's shell says of it.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# Files of tests that run at a time: a test of ranks leaves a core idle while its processes start. Planted faults likewise.
WORKERS ?= 2
AT_A_TIME := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-all test-long fuzz faults models flows drawn blocks compile kills soak cluster gpu lint format matrix wheel clean FORCE

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

train: $(STAMP)  ## train on this machine; ARGS="..." are Hydra overrides
	$(BIN)/lightning-sp-train $(ARGS)

test: lint  ## lint, then every test but the slow ones; ARGS="..." go to pytest, WORKERS=2
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" $(AT_A_TIME) $(ARGS)

test-all: lint  ## lint, then every test
	$(TEST_ENV) $(BIN)/python -m pytest $(AT_A_TIME) $(ARGS)

test-long: $(STAMP)  ## the tests that draw their cases (Hypothesis), with many more of them
	$(TEST_ENV) $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=long --timeout 3600 $(ARGS)

fuzz: $(STAMP)  ## damaged files and options of any value, drawn for an hour; ARGS="--minutes 5"
	$(TEST_ENV) $(BIN)/python -m tools.fuzz $(ARGS)

faults: $(STAMP)  ## put each fault of others back and see a test fail; ARGS="lse --resume .cache/faults.json"
	$(TEST_ENV) $(BIN)/python -m tests.faults --workers $(WORKERS) $(ARGS)

models: $(STAMP)  ## try the models of transformers, write docs/models.md; ARGS="bert llama" renews their rows
	$(TEST_ENV) $(BIN)/python -m tools.models --workers $(WORKERS) $(ARGS)

flows: $(STAMP)  ## try what users do around a model, write docs/flows.md; ARGS="dpo lora" renews their rows
	$(TEST_ENV) $(BIN)/python -m tools.flows --workers $(WORKERS) $(ARGS)

drawn: $(STAMP)  ## small models that are drawn, each exact or refused by name; ARGS="--models 20 --seed 7000"
	$(TEST_ENV) $(BIN)/python -m tools.drawn_models $(ARGS)

blocks: $(STAMP)  ## models of x-transformers, LitGPT and torchtune, each library in a folder of its own, in the global view
	$(TEST_ENV) $(BIN)/python -m tools.library_blocks $(ARGS)

compile: $(STAMP)  ## torch.compile with Inductor, through the Trainer; needs a C++ compiler
	$(TEST_ENV) $(BIN)/python -m pytest tests/trainer/compile/test_compile.py $(ARGS)

kills: $(STAMP)  ## 200 runs killed at random moments and resumed, some on other degrees; goes on where it was cut off
	$(TEST_ENV) $(BIN)/python -m tools.kills $(ARGS)

soak: $(STAMP)  ## 2,000 steps with evaluations, checkpoints and resumes: does memory grow? ARGS="--steps 400"
	$(TEST_ENV) $(BIN)/python -m tools.soak $(ARGS)

cluster: $(STAMP)  ## 2 and 4 nodes as network namespaces, by torchrun and SLURM; needs root, ip and tc
	$(TEST_ENV) $(BIN)/python -m pytest tests/cluster $(ARGS)

# Without an environment: a lent machine has torch, lightning and pytest, and no package index.
gpu:  ## all that wants one GPU, in 25 minutes, resumable; PYTHON=python3, ARGS="right profile", ARGS="--device cpu --tiny"
	$(or $(PYTHON),python3) -m benchmarks.gpu $(ARGS)

lint: $(STAMP)  ## ruff, mypy --strict, import layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(STAMP)  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: $(STAMP)  ## the suite under the oldest and the newest versions; ARGS="oldest" chooses
	$(TEST_ENV) $(BIN)/python -m tools.matrix --workers $(WORKERS) $(ARGS)

wheel: $(STAMP)  ## build the wheel, install it outside this folder, try it there
	$(BIN)/python -m tools.wheel_elsewhere $(ARGS)

clean:  ## remove the environments and what tools left
	rm -rf $(VENV) .venv-matrix .venv-peers .venv-blocks build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The first interpreter that runs, is new enough, and can make environments: a shim of a version manager may not run,
# a distribution's python3 may come without ensurepip.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3.10 python3)
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))

$(STAMP): pyproject.toml constraints.txt tools/bootstrap.py $(if $(PYTHON),FORCE)
	@for python in $(CANDIDATES); do \
	  if "$$python" -c '$(PROBE)' >/dev/null 2>&1; then \
	    exec "$$python" -m tools.bootstrap --venv "$(VENV)" $(if $(PYTHON),--same-python); \
	  fi; \
	done; \
	echo "lightning_sp needs Python 3.10 or newer with the modules venv and ensurepip; tried: $(CANDIDATES)." >&2; \
	echo "Install one (Debian and Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1

FORCE:
