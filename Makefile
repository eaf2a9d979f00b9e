# graphkeep's everyday commands. `make` alone lists them.
#
# Why torch is pinned in constraints-dev.txt: a plain `torch` takes the newest release, on Linux a CUDA build of several
# gigabytes, and "bit for bit as eager PyTorch" has to be tested against one known torch. Nothing here needs a GPU.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-browser soak check docs fmt bench clean

help: ## list these commands
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F@ '{ printf "%-19s %s\n", $$1, $$2 }'

demo: $(STAMP) ## run the demo
	@$(PY) -m graphkeep demo

test: $(STAMP) ## run the tests
	@$(PY) -m pytest -n 2 --dist loadfile

test-browser: $(STAMP) ## run the tests of the report's page in chromium
	@$(PY) -m pytest tests/browser

soak: $(STAMP) ## run 20,000 steps with every verb and exceptions at random points, in two processes
	@OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 tests/soak.py 20000

check: $(STAMP) ## lint, formatting and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# The path is for ruff, which wraps the signatures; the variable silences the theme's notice about a successor of mkdocs.
# No --quiet: mkdocs then counts no warnings, and --strict passes whatever is broken.
docs: $(STAMP) ## build the documentation in site/, and check its links
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "graphkeep: the documentation is in site/index.html"

fmt: $(STAMP) ## format, and mend what the linter can mend
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

bench: $(STAMP) ## run the benchmarks (20 to 25 minutes), and write docs/benchmarks/
	@if [ -f benchmarks/run.py ]; then $(PY) -m benchmarks.run; else echo "no benchmarks/run.py: nothing to run"; fi

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.*
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is newer than what says which packages are needed, so all of this runs once.
# The two variables hand the pins to the isolated build as well, which `-c` does not reach: the first is read there by pip
# up to 25.2, the second from 25.3 on.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned development packages need Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "graphkeep: installing into $(VENV) (once; the first time takes a minute)"
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints-dev.txt PIP_BUILD_CONSTRAINT=constraints-dev.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(PY) -m pip install -qq -c constraints-dev.txt -e '.[dev]'
	@touch $@
