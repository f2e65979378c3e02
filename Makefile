# shardvit: one command each for the demo, the tests and the checks. Every target does its own set-up.
#
# Needs Python 3.11, 3.12 or 3.13, make, bash and a C compiler. The packages go into .venv, in the versions that
# constraints.txt gives; a stamp in .venv makes the next call free until pyproject.toml or constraints.txt changes.
#
# New versions: make a fresh environment, `pip install -e .[test,dev]` in it without constraints, and put what
# `pip freeze --all` prints (less pip and shardvit) below the comment of constraints.txt.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test gpu faults soak check format docs clean

VENV := .venv
DATA ?= digits
ARGS ?=

ifdef PYTHON
# An environment that already has torch. Nothing is installed into it and nothing is replaced: it may have a torch that
# was built for its GPU, or no network. What it lacks is told, with the pip command that adds just that. (A .venv on
# top of it with --system-site-packages was the other way: it misses torch whenever PYTHON is itself a virtual
# environment, and needs a network all the same.) The packages of this repository are imported from the folder itself.
PY := $(PYTHON)
BASE := missing-base
ALL := missing-all
GPU := missing-gpu
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(CURDIR)/$(VENV)/bin/python
BASE := $(VENV)/.stamp-base
ALL := $(VENV)/.stamp-all
GPU := $(ALL)
# DeepSpeed calls ninja by its bare name.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif

help: ## show this list
	@echo "make TARGET [DATA=...] [ARGS=...] [PYTHON=/path/to/a/python/that/has/torch]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "Examples: make demo DATA=fashion-mnist    make test ARGS='-m slow'    make test ARGS=tests/model"

demo: $(BASE) ## pack, pre-train, swap the head, fine-tune, report: all on real images (DATA=digits, fashion-mnist or cifar10)
	@$(PY) -m shardvit.launch.cli demo --data $(DATA) $(ARGS)

test: $(ALL) ## run the tests in two processes, without those marked slow or faults (ARGS go to pytest; ARGS='-n 0': in one)
	@$(PY) -m pytest -n 2 --dist loadfile --once-more -m "not slow and not faults" $(ARGS)

gpu: $(GPU) ## try all that a GPU can get wrong: gpu-report.html (30 minutes; ARGS='--device cpu' or '--only suite'; docs/gpu.md)
	@$(PY) -m shardvit.launch.bench.acceptance $(ARGS)

faults: $(ALL) ## try every fault on real processes and print what became of each (26 to 41 minutes on 2 cores; ARGS='--faults-table FILE')
	@$(PY) -m pytest tests/faults $(ARGS)

soak: $(ALL) ## disturb one run every 30 s at random and compare it with an undisturbed one (ARGS='--minutes 20 --seed 0 --record FILE')
	@$(PY) -m tests.faults.soak $(ARGS)

check: $(ALL) ## format, lint, spelling, import rules, types
	@bash .ci/check $(PY)

format: $(ALL) ## rewrite the files in the project's format, with the repairs that ruff is sure of
	@$(PY) -m ruff check --fix --exit-zero --quiet .
	@$(PY) -m ruff format .

docs: $(ALL) ## build the documentation as a site, build/site/index.html; a broken link or anchor fails, nothing is fetched
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file .ci/site/mkdocs.yml

clean: ## remove .venv and all caches (never runs/ or your shards)
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find data_shards launch model pipeline shardvit tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up ---------------------------------------------------------------------------------------------------------

.PHONY: missing-base missing-all missing-gpu installed
installed: $(ALL)
missing-base:
	@$(PY) .ci/missing_packages.py
missing-all:
	@$(PY) .ci/missing_packages.py test dev
missing-gpu:
	@$(PY) .ci/missing_packages.py || echo "shardvit: going on; lines that need them will say so" >&2

$(VENV)/.stamp-base: pyproject.toml constraints.txt
	@bash .ci/install "$(VENV)" "." "installing torch, DeepSpeed, MLflow and the rest into $(VENV) (once: 2 to 5 minutes, 6.5 GB)"
	@touch $@

$(VENV)/.stamp-all: $(VENV)/.stamp-base
	@bash .ci/install "$(VENV)" ".[test,dev]" "adding what the tests and checks need (once: a minute, 0.8 GB)"
	@touch $@
