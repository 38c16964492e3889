# Every target makes its own virtual environment first: there is no other set-up step.
ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
PYTHON ?= python3
VENV ?= $(ROOT)/.venv
BIN := $(abspath $(VENV))/bin
SERVING := $(abspath $(VENV))/.serving
INSTALLED := $(abspath $(VENV))/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Ray tests share one worker (xdist group "ray"), others a module each, in the order in which
# tests/conftest.py puts them; a core is left for replicas
PYTEST_ARGS ?= -n $(shell $(PYTHON) -c 'import os; print(min(6, max(2, os.cpu_count() - 1)))') \
	--dist loadgroup --no-loadscope-reorder
# which tenth of the slow tests `make test-slice` takes: each commit the next
SLICE ?= $(shell git -C $(ROOT) rev-list --count HEAD)
MINUTES ?= 12
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv serve test test-all test-slice check format bench bench-gpu clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(ROOT)/Makefile | expand -t 18

venv: $(INSTALLED) ## make .venv and install everything into it, for tests and benchmarks too

# what serving needs
$(SERVING): $(ROOT)/pyproject.toml $(ROOT)/constraints.txt
	@echo 'Installing what serving needs into $(VENV): 2.0 GB, some two minutes.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	cd $(ROOT) && $(PIP) -e . -c constraints.txt
	touch $@

# the rest: tests, checks, benchmarks, training, plots
$(INSTALLED): $(SERVING)
	@echo 'Adding what tests, training and plots need: 1.2 GB more.'
	cd $(ROOT) && $(PIP) -e '.[dev]' -c constraints.txt
	# the older client that the API is tested with, beside the current one
	$(PIP) --no-deps --target $(VENV)/openai-1 --upgrade openai==1.109.1 distro==1.9.0
	touch $@

# exec: a shell in between would keep make's SIGTERM to itself, and leave the service running
serve: $(SERVING) ## start the service on this machine (ARGS="..." is passed on)
	cd $(ROOT) && exec $(BIN)/ray-cluster serve $(ARGS)

test: $(INSTALLED) ## run the tests that are not marked slow
	cd $(ROOT) && $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS) $(ARGS)

test-all: $(INSTALLED) ## run every test
	cd $(ROOT) && $(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

test-slice: $(INSTALLED) ## run a tenth of the slow tests (SLICE=number), for MINUTES=12 at most
	cd $(ROOT) && $(BIN)/python -m pytest --slow-slice $(SLICE)/10 --end-after $(MINUTES) \
		--hypothesis-profile thorough --timeout 600 $(PYTEST_ARGS) $(ARGS)

check: $(INSTALLED) ## formatting, lint, types (of the page too, where npm is), architecture
	cd $(ROOT) && $(BIN)/ruff format --check .
	cd $(ROOT) && $(BIN)/ruff check .
	cd $(ROOT) && $(BIN)/mypy
	$(ROOT)/tests/page/check
	cd $(ROOT) && $(BIN)/python -m pytest -q tests/test_architecture.py

format: $(INSTALLED) ## format and apply safe lint fixes
	cd $(ROOT) && $(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(INSTALLED) ## run the benchmarks (ARGS="..." is passed on)
	cd $(ROOT) && $(BIN)/python -m benchmarks.run $(ARGS)

bench-gpu: $(INSTALLED) ## measure a GPU in some 8 minutes, several in 18 (ARGS="..." is passed on)
	cd $(ROOT) && $(BIN)/python -m benchmarks.gpu $(ARGS)

clean: ## remove the virtual environment, caches and build products
	cd $(ROOT) && rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
