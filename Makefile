# make train       sets up .venv, trains on the copy task, prints the result
# make compare     trains every mechanism on the copy task, with equal parameter counts
# make bench       measures time and memory of every mechanism at several lengths
# make compiled    compiles every mechanism for an H100, without one
# make describe DESCRIBE="--config=configs/copy.py --target=h100:8"
#                  prints what each of eight devices would store and send in a step
# make lint        sets up .venv, runs the linter, the type checker and import checks
# make test        runs lint and the test suite
# make test-of NAME=delta     runs all tests of a mechanism
# make test-of PART=training  runs the tests of a folder of tests/ or projects/
# make test-all    runs all tests, also the slowest, with the compiler options of
#                  users; then planted faults, and five minutes of random faults
# make docs        builds the site into docs/_build/html, executes changed notebooks
# make docs-check  builds the site with only the first two notebooks, checks links
# make format      formats code and sorts imports

VENV := .venv
PYTHON := $(VENV)/bin/python
CONFIG ?= configs/copy.py
WORKDIR ?= runs/copy
PYTEST := -n auto --no-loadscope-reorder

.PHONY: train compare bench compiled describe lint test test-of test-all docs docs-check \
  format setup

setup: $(VENV)/.installed

# uv takes seconds. pip is used if uv cannot be installed or finds no package index.
install = $(PYTHON) -m uv pip install --quiet --python $(PYTHON) $(1) || \
  $(PYTHON) -m pip install --quiet --disable-pip-version-check $(1)

$(VENV)/.installed: requirements.txt
	@echo "setting up $(VENV) (half a minute, once)"
	@python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check uv || true
	@$(call install,-r requirements.txt)
	@$(call install,--no-deps -e .)
	@touch $@

train: setup
	$(PYTHON) train.py --config=$(CONFIG) --workdir=$(WORKDIR)

compare: setup
	$(PYTHON) compare.py --config=configs/compare/copy.py --workdir=runs/compare

bench: setup
	$(PYTHON) -m benchmarks.scaling

# Compilers for other devices, which need a newer Python and JAX.
DEVICES := .venv-devices
$(DEVICES)/.installed:
	python3.12 -m venv $(DEVICES)
	$(DEVICES)/bin/python -m pip install --quiet jax==0.11.2 libtpu \
	  jax-cuda12-plugin==0.11.2 jax-cuda12-pjrt==0.11.2 nvidia-cuda-nvcc-cu12 \
	  ".[lab]"
	@touch $@

compiled: $(DEVICES)/.installed
	$(DEVICES)/bin/python -m benchmarks.compiled $(COMPILED)

describe: $(DEVICES)/.installed
	$(DEVICES)/bin/python -m training.commands.describe $(DESCRIBE)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/lint-imports --no-cache --no-logo

test: lint
	$(PYTHON) -m pytest $(PYTEST) -m "not thorough"

OF = $(if $(NAME),--of=$(NAME) tests/attention tests/verification/peers,$(if $(PART),\
  $(wildcard tests/$(PART) projects/$(PART)/tests)))

test-of: setup
	@test -n "$(strip $(OF))" || { echo "test-of: expected NAME=delta, a mechanism," \
	  "or PART=training, a folder of tests/ or projects/"; exit 2; }
	$(PYTHON) -m pytest $(PYTEST) $(if $(NAME),,-m "not thorough") $(OF)

test-all: lint
	COMPILE=fully $(PYTHON) -m pytest $(PYTEST)
	$(PYTHON) -m tests.verification.mutants --workers=2
	$(PYTHON) -m tests.verification.campaign --minutes=5

$(VENV)/.docs-installed: docs/requirements.txt $(VENV)/.installed
	@$(call install,-r $<)
	@touch $@

# Warnings are errors. `docs.check_site` checks every link between pages.
SITE := docs/_build/html

docs: $(VENV)/.docs-installed
	$(PYTHON) -m sphinx -E -W --keep-going -b html docs $(SITE)
	$(PYTHON) -m docs.check_site $(SITE)

docs-check: $(VENV)/.docs-installed
	NOTEBOOKS=first $(PYTHON) -m sphinx -E -W --keep-going -b html docs $(SITE)
	$(PYTHON) -m docs.check_site $(SITE)

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
