# `make help` lists the targets. Everything happens in .venv; nothing outside of this folder is changed.

PYTHON      ?= python3# the interpreter that makes the environment, 3.11 or newer
TESTED      := $(patsubst torch==%,%,$(filter torch==%,$(shell cat constraints.txt)))
TORCH       ?= $(TESTED)# the version of torch to install
VERSIONS    ?= 2.11.0 $(TESTED) 2.15.0# those of test-versions
TORCH_INDEX ?=# where to get torch alone, such as https://download.pytorch.org/whl/cpu
VENV_ARGS   ?=# --system-site-packages uses the torch that PYTHON already has
PYTEST_ARGS ?=# such as "-k budget", "tests/test_config.py"
NIGHTLY     ?= https://download.pytorch.org/whl/nightly/cpu# where test-nightly gets torch
TRITON      ?= 3.7.0# its version where torch brings none, for test-cuda-codegen
WORKERS     ?= 2# processes that share the tests; each may take a GiB of memory
TIMEOUT     ?= 600# seconds for one test
SHARD       ?=# a part of test-full and durations, such as 1/4
DEMO_ARGS   ?=
BENCH_ARGS  ?=
N           ?= 5000# random models that "make fuzz" trains
FUZZ_ARGS   ?=# such as "--seed 7 --workers 4 --inductor-share 0.1"

VERSION_TESTS := -q --full tests/_torch/test_torch_pipeline.py tests/_torch/test_version.py tests/planning/test_joint_planning.py tests/inductor/test_inductor_guard.py

VENV := .venv$(if $(filter-out $(TESTED),$(TORCH)),-$(TORCH))
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check
PINS := $(VENV)/constraints.txt
STACKS := $(VENV)-stacks
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout=$(TIMEOUT)
FULL := --full $(if $(SHARD),--shard $(SHARD))
REUSE := $(findstring --system-site-packages,$(VENV_ARGS))

.DELETE_ON_ERROR:
.PHONY: help layers docs demo test test-full test-cuda-codegen test-browser test-stacks test-nightly durations test-versions fuzz bench dev lint types wheel-test dist clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' Makefile
	@echo
	@awk -F '[?]=|#' '/^[A-Z_]+ +[?]=/{gsub(/ /, "", $$1); printf "  %-16s %s\n", $$1 "=", $$3}' Makefile

demo: $(VENV)/.installed  ## train a small GPT on real text with and without a budget, and compare
	$(VENV)/bin/compile-remat demo $(DEMO_ARGS)

test: $(VENV)/.installed  ## run the tests that are short, and a proof of each promise (10 minutes)
	$(PYTEST) $(PYTEST_ARGS)

test-full: $(VENV)/.installed  ## run every case with every compiler and budget (hours; SHARD=1/4 for a part)
	$(PYTEST) $(FULL) $(PYTEST_ARGS)

test-cuda-codegen: $(VENV)/.triton  ## check Triton code for an H100 that is not there (g++; downloads triton, 200 MB)
	PYTHONPATH=$(abspath $(VENV))/triton $(PYTEST) --full --timeout=1200 tests/cuda_codegen $(PYTEST_ARGS)

test-browser: $(VENV)/.installed  ## run the tests of pages in a headless chromium (skipped where there is none)
	$(PY) -m pytest -rs --full --timeout=$(TIMEOUT) tests/browser $(PYTEST_ARGS)

test-stacks: $(VENV)/.installed  ## train with transformers, trl, peft, accelerate, lightning, timm, diffusers in .venv-stacks
	@$(MAKE) --no-print-directory $(STACKS)/.installed || echo "$(STACKS) cannot be made; tests of what is not there are skipped"
	@test -e $(STACKS)/.installed && py=$(STACKS)/bin/python || py=$(PY); \
	$$py -m pytest -rs --full --timeout=1200 tests/stacks tests/forecast/mesh/test_tensor_parallel.py $(PYTEST_ARGS)

durations: $(VENV)/.installed  ## run test-full, and write what each test takes to tests/durations.txt once all parts have run
	$(PYTEST) $(FULL) --write-durations $(PYTEST_ARGS)

fuzz: $(VENV)/.installed  ## train N random models under random plans; failures, shrunk, go to fuzz_failures.txt
	$(PY) -m tests.fuzz --examples $(N) $(FUZZ_ARGS)

test-versions:  ## what may differ between versions of torch, on each of VERSIONS
	@set -e; for torch in $(VERSIONS); do \
	  echo "torch $$torch"; \
	  $(MAKE) --no-print-directory test TORCH=$$torch PYTEST_ARGS="$(or $(PYTEST_ARGS),$(VERSION_TESTS))"; \
	done

# With the range of versions lifted, tests say what is new; the copy keeps the checkout as it is.
test-nightly: .venv-nightly/.installed  ## torch's nightly build: plain Inductor trains as for users; then the version tests, in a copy that takes any torch
	.venv-nightly/bin/python examples/train.py --device cpu --toy --steps 2
	.venv-nightly/bin/python -m pytest --timeout=$(TIMEOUT) -q --full tests/_torch/test_version.py -k "not the_torch_that_runs"
	rm -rf build/nightly
	mkdir -p build/nightly
	git ls-files | tar -cf - -T - | tar -xf - -C build/nightly
	cd build/nightly && sed -i.bak -E 's/^(SUPPORTED = .*), \([0-9]+, [0-9]+\)\)$$/\1, (99, 0))/' compile_remat/_torch/version.py && \
	../../.venv-nightly/bin/python -m pytest --timeout=$(TIMEOUT) $(filter-out tests/_torch/test_version.py,$(VERSION_TESTS))

bench: $(VENV)/.installed  ## measure the figures of docs/results/
	$(PY) -m benchmarks $(BENCH_ARGS)

dev: $(VENV)/.dev  ## add the tools for working on the code to .venv

lint: $(VENV)/.dev  ## check style, format and prose
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -q --noconftest tests/test_prose.py

# Checkers see compile_remat, passes and cost_models as they are imported: links, in the places that a wheel has.
.PHONY: build/tree
build/tree:
	rm -rf $@
	mkdir -p $@/compile_remat
	@ln -s $(addprefix $(CURDIR)/,$(wildcard compile_remat/*) passes cost_models) $@/compile_remat

types: $(VENV)/.dev build/tree  ## check types
	cd build/tree && $(abspath $(PY)) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p compile_remat

layers: $(VENV)/.installed build/tree  ## check which room imports which, where private names of torch stand, and what modules are called
	$(PY) -m ruff check --select TID .
	cd build/tree && PYTHONPATH=. $(abspath $(VENV))/bin/lint-imports --no-cache --no-logo --config ../../pyproject.toml
	$(PY) -m pytest -q tests/test_architecture.py

wheel-test: $(VENV)/.installed  ## build the wheel and run the tests against it instead of the checkout
	rm -rf build dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) install --quiet --no-deps --target build/wheel dist/*.whl
	PYTHONPATH=build/wheel $(PY) -P -c 'import compile_remat as c; assert "build/wheel" in c.__file__, c.__file__'
	PYTHONPATH=build/wheel $(PY) -P -m pytest -o pythonpath= -n $(WORKERS) --dist worksteal --timeout=$(TIMEOUT) $(PYTEST_ARGS)

dist: $(VENV)/.dist  ## build sdist and wheel, check them, the workflows and templates, and install the wheel in an empty environment
	rm -rf build dist
	$(PY) -m build --no-isolation --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/memory.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(MAKE) --no-print-directory VENV=build/empty build/empty/constraints.txt
	build/empty/bin/python -m pip --disable-pip-version-check install --quiet -c build/empty/constraints.txt "$$(echo dist/*.whl)[cli]"
	cd build && empty/bin/compile-remat doctor

docs: $(VENV)/.docs  ## build the manual of docs/ into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

clean:  ## remove what builds and tools left behind
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## and the environments
	rm -rf .venv .venv-*

# torch comes first and exactly pinned: left to an open range, pip may fetch gigabytes of another build.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(if $(REUSE),$(PY) -c 'import torch' 2>/dev/null || )$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	@touch $@

# The same pins with the torch that is there; beside another torch than the tested one, its own dependencies are free.
$(PINS): $(VENV)/.torch
	@have=$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))') && \
	sed -E "s/^torch==.*/torch==$$have/" constraints.txt >$@ && \
	case $$have in $(TESTED)|$(TESTED)+*) ;; *) sed -i.bak -E '/^(networkx|sympy)==/d' $@;; esac

$(VENV)/.installed: $(PINS) pyproject.toml
	$(PIP) install --quiet -c $(PINS) 'hatchling>=1.27' editables
	$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[cli,plot,test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@

# In a folder of its own: torch for CPUs behaves otherwise where it finds triton.
$(VENV)/.triton: $(VENV)/.installed
	$(PY) -c 'import triton' 2>/dev/null || $(PIP) install --quiet --no-deps --target $(VENV)/triton triton==$(TRITON)
	@touch $@

# It sees the packages of .venv, torch among them, and has the others beside it: nothing that tests skip gets into .venv.
$(STACKS)/.installed: $(VENV)/.installed
	$(PY) -m venv $(VENV_ARGS) $(STACKS)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	$(PY) -c "$$where" >"$$($(STACKS)/bin/python -c "$$where")/beside.pth"
	$(STACKS)/bin/python -m pip --disable-pip-version-check install --quiet -c $(PINS) --no-build-isolation -e '.[stacks]'
	@touch $@

# No pins: the build of today with the newest of everything else.
.venv-nightly/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/pip install --quiet --pre torch --index-url $(NIGHTLY)
	.venv-nightly/bin/pip install --quiet 'hatchling>=1.27' editables $$(.venv-nightly/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*(n for n in p['dependencies'] + p['optional-dependencies']['test'] if not n.startswith('torch')))")
	.venv-nightly/bin/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dist: $(VENV)/.installed
	$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[dist]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[docs]'
	@touch $@
