# Every target sets up what it needs: on a machine with only Python and make, `make demo` or `make test` is enough.

# The first of these that is 3.11 or newer makes the environment.
PYTHON  ?= python3 python3.13 python3.12 python3.11
VENV    ?= .venv
WORKDIR ?= runs/demo
# More arguments for pytest (make test), for make mutants or for the resolver (make lock).
ARGS    ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip
STAMP := $(VENV)/.installed
# Sphinx is in an environment of its own: the tests have warnings as errors, and need none of its packages.
DOCS  := $(VENV)-docs

is_new_enough = -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
found_python  = $(or $(shell for python in $(PYTHON); do $$python $(is_new_enough) && echo $$python && break; done), \
                     $(error none of '$(PYTHON)' is Python 3.11 or newer; name one: make PYTHON=/path/to/python3.12))

# Held-out sentences of the built-in grammar: a question, a counter, a number, two kinds of clauses.
define DEMO_SENTENCES
my aunt found the banana that taro 's friend bought yesterday .
how many glasses of milk did they drink ?
she did not go to school because she was sick .
the dog that the girl saw ate two apples .
did yumi break ken 's bicycle on thursday ?
endef
export DEMO_SENTENCES

.PHONY: help setup test test-all mutants lint check demo smoke colab colab-outputs docs lock

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## make .venv from requirements.lock (once; every other target does it too)

$(STAMP): requirements.lock pyproject.toml
	@echo "Installing the locked packages into $(VENV) (once, some minutes)" && $(found_python) -m venv $(VENV)
	@$(PIP) install -qq --require-hashes -r requirements.lock
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

test: setup  ## run the quick tests; what needs PyTorch, transformers, Keras or ../shared/data skips without it
	@$(BIN)/pytest -n 2 --dist worksteal --durations=20 -m "not slow and not nightly" $(ARGS)

test-all: setup  ## run all tests, notebooks and interrupted trainings too
	@$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

mutants: setup  ## break the library at sampled places, and report what the tests miss (ARGS="--only=^nn/ --count=20")
	@$(BIN)/python -m tests.mutation $(ARGS)

lint: setup  ## check format, style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

check: lint test  ## lint, then test: what a change must pass

demo: setup  ## train on the built-in grammar, translate, draw attention, score (4 minutes)
	@$(BIN)/tfx-jax train --config=experiments/transformer_demo.py --workdir=$(WORKDIR)
	@$(BIN)/tfx-jax average --workdir=$(WORKDIR)
	@echo "$$DEMO_SENTENCES" > $(WORKDIR)/sentences.en
	@$(BIN)/tfx-jax translate --workdir=$(WORKDIR) --step=average < $(WORKDIR)/sentences.en > $(WORKDIR)/sentences.ja
	@paste $(WORKDIR)/sentences.en $(WORKDIR)/sentences.ja
	@$(BIN)/tfx-jax attend --workdir=$(WORKDIR) --step=average --source="$$(head -n 1 $(WORKDIR)/sentences.en)" \
	  --output=$(WORKDIR)/attention.png
	@$(BIN)/tfx-jax evaluate --workdir=$(WORKDIR) --step=average

smoke: setup  ## train every experiment's test variant through the command line
	@rm -rf runs/smoke
	@$(BIN)/python -m tests.experiments.smoke runs/smoke

colab: setup  ## make the notebooks from their py:percent sources; outputs stay where no code changed
	@$(BIN)/python -m tests.colab.execute

colab-outputs: setup  ## run notebooks at full size and store what they show (ARGS=colab/translation.ipynb)
	@$(BIN)/python -m tests.colab.execute $(or $(ARGS),$(wildcard colab/*.ipynb))

$(DOCS)/.installed: docs/requirements.lock
	@$(found_python) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --require-hashes -r docs/requirements.lock
	@touch $@

docs: setup $(DOCS)/.installed  ## build the site in docs/_build/html, and check its links and that it requests nothing
	@JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m docs.site write docs/_build/source
	@$(DOCS)/bin/sphinx-build -q -W --keep-going -j 2 -c docs/site docs/_build/source docs/_build/html
	@$(BIN)/python -m docs.site check docs/_build/html

lock:  ## resolve both requirements.lock again; ARGS=--upgrade takes newer releases
	@$(found_python) -m venv --clear .venv-lock && .venv-lock/bin/pip install --quiet uv
	@UV_CUSTOM_COMPILE_COMMAND="make lock" .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --python-version 3.11 --extra dev $(ARGS) pyproject.toml \
	  --output-file requirements.lock
	@UV_CUSTOM_COMPILE_COMMAND="make lock" .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --python-version 3.11 --group docs --constraint requirements.lock $(ARGS) \
	  --output-file docs/requirements.lock
	@rm -rf .venv-lock
