# Tests of the board under load, with killed processes, fuzzing and a real browser. Needs root for apt-get if PostgreSQL or Chromium is
# missing.
.PHONY: test-server test-arena bars test-grading lite test-fleet test-fleet-campaign fleet-bars
GRADING := .venv-grading

test-server: $(VENV)/.server  ## test the leaderboard: load with killed processes on SQLite and PostgreSQL, API fuzzing, pages in Chromium
	$(BIN)/python -m pytest -m slow tests/bench -s

# Two hundred honest entries on this machine, a fifth of them as on others; then every cheat. About twenty minutes.
HONEST := $(BIN)/python -m pytest -m slow tests/bench/test_honest_entries.py -s
test-arena: $(VENV)/.test  ## test the competition: 200 honest entries are scored and none refused, every cheat is refused
	$(HONEST)
	TILEWISE_ISA=$(AVX2) TILEWISE_MACHINE=l1=32K,l2=512K,l3=32M $(HONEST) -k '[0] or [100]'
	TILEWISE_ISA=portable TILEWISE_MACHINE=l2=256K,l3=0,cores=1 $(HONEST) -k '[20] or [120]'
	$(BIN)/python -m pytest -m slow tests/bench/test_cheats.py

bars: $(VENV)/.server  ## measure the leaderboard: pages of 20,000 entries, health under hostile clients, time to shut down
	$(BIN)/python -m tests.bench.bars

test-fleet: $(VENV)/.fleet  ## test stores in PostgreSQL, the service under load, campaigns and sweeps on Ray with killed processes
	$(BIN)/python -m pytest -m 'slow or not slow' tests/fleet tests/store/test_shared_store.py -s

test-fleet-campaign: $(VENV)/.fleet  ## 300 kernels on three nodes while a node, the driver and PostgreSQL are killed; compared with one process
	$(BIN)/python -m tests.fleet.campaign

fleet-bars: $(VENV)/.fleet  ## measure the service on one core: choices per second, cached and new, and their p99
	$(BIN)/python -m tests.fleet.bars

# Graders and Jupyter need many packages that tilewise does not, so they have a separate environment.
test-grading: $(GRADING)/.graders  ## test otter-grader and nbgrader in a dry run, and lesson 1 in Chromium with a Jupyter server
	PYTHONPATH=. $(GRADING)/bin/python -m pytest -m slow tests/learn/grading tests/learn/test_lesson_in_browser.py -s

# PYODIDE, the archive of a full Pyodide release (a file or a URL), makes the site self-contained; otherwise pages download Pyodide.
lite: $(GRADING)/.graders  ## build the lessons as a JupyterLite site in build/lite: Python in the browser, nothing to install
	rm -rf build/lite build/lite-wheel
	TILEWISE_PURE=1 $(GRADING)/bin/python -m pip -q wheel --no-deps --no-build-isolation -w build/lite-wheel .
	cd build && ../$(GRADING)/bin/jupyter lite build --contents ../docs/learn/notebooks --output-dir lite \
	  $(foreach w,lite-wheel/*.whl,--piplite-wheels $(w)) $(if $(PYODIDE),--pyodide $(PYODIDE)) && echo "serve it: python -m http.server -d build/lite"

$(GRADING)/.graders: pyproject.toml
	$(PYTHON) -m venv $(GRADING)
	$(GRADING)/bin/python -m pip -qq --disable-pip-version-check install $(BUILD_TOOLS) otter-grader nbgrader notebook pytest hypothesis \
	  jupyterlite-core jupyterlite-pyodide-kernel
	$(GRADING)/bin/python -m pip -qq --disable-pip-version-check install --no-build-isolation -e . $(ADD_ONS)
	@touch $@

$(VENV)/.fleet: $(VENV)/.server
	$(PIP) install -c constraints.txt --no-build-isolation -e 'packages/tilewise-fleet[ray]'
	@touch $@

$(VENV)/.server: $(VENV)/.test
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && command -v chromium >/dev/null || { \
	  apt-get update -q && apt-get install -qy postgresql chromium; }
	$(PIP) install -c constraints.txt schemathesis
	@touch $@
