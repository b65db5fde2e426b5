# Two commands need nothing before them: `make run` and `make test`. Each makes .venv, installs what it needs, and goes;
# a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
BUILD_TOOLS := scikit-build-core nanobind numpy cmake ninja
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(shell find native -name '*.cpp' -o -name '*.h')
HAVE_CXX := $(shell command -v $${CXX:-c++} 2>/dev/null || command -v g++ 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: run test test-slow test-docs test-pages bench docs lint format sanitize check-arm clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

run: $(VENV)/.core  ## install and show what tilewise does on this machine
	$(BIN)/tilewise tour

test: $(VENV)/.test  ## install and run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.test  ## the checks that take minutes
	$(BIN)/python -m pytest -m slow

test-docs: $(VENV)/.test  ## run every command line of README and docs as typed
	$(BIN)/python -m pytest -m slow tests/docs/test_commands.py

test-pages: $(VENV)/.test  ## the tour's report and every page of the site in Chromium, wide and narrow, light and dark
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "make test-pages needs Chromium: apt-get install chromium"; exit 2; }
	$(BIN)/python -m pytest -m 'slow or not slow' tests/docs/test_browser.py

bench: $(VENV)/.bench  ## every optimization beside its peers; tables and JSON in benchmarks/results
	$(BIN)/python -m benchmarks && $(BIN)/python -m benchmarks.tables

docs: $(VENV)/.test  ## the documentation as a site in build/site
	$(BIN)/python -m mkdocs build --strict --quiet && echo "open build/site/index.html"

lint: $(VENV)/.test  ## ruff and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.test  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

sanitize: $(VENV)/.tools  ## native kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON -DTILEWISE_SANITIZE=ON > build-sanitize.log && rm build-sanitize.log
	$(BIN)/ninja -C build/sanitize && build/sanitize/kernel_tests

check-arm: $(VENV)/.tools  ## cross-compile the portable kernels for arm64 and run their tests under qemu-user
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || { \
	  echo "make check-arm needs Debian's g++-aarch64-linux-gnu and qemu-user-static: apt-get install them first"; exit 2; }
	$(BIN)/cmake -S . -B build/arm64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_EXE_LINKER_FLAGS=-static -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON > /dev/null
	$(BIN)/ninja -C build/arm64 && qemu-aarch64-static build/arm64/kernel_tests

clean:  ## remove everything that the other targets made
	rm -rf build dist $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis src/tilewise/_native*.so

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilewise needs Python 3.11 or newer; set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.tools: $(VENV)/.python constraints.txt
	$(PIP) install -c constraints.txt $(BUILD_TOOLS)
	@touch $@

$(VENV)/.core: $(VENV)/.tools $(NATIVE)
ifeq ($(HAVE_CXX),)
	@echo "No C++ compiler was found (c++ or g++), so tilewise installs without its compiled kernels and uses the slower NumPy paths."
	TILEWISE_PURE=1 $(PIP) install -c constraints.txt --no-build-isolation -e .
else
	$(PIP) install -c constraints.txt --no-build-isolation -e .
endif
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[train,server,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[bench]'
	@touch $@

-include course/handin.mk
-include server.mk
