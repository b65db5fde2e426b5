# The board under load, kills, fuzzing and a real browser. Needs root for apt-get where PostgreSQL or Chromium is missing.
.PHONY: test-server

test-server: $(VENV)/.server  ## the leaderboard: load with kills on SQLite and PostgreSQL, API fuzzing, pages in Chromium
	$(BIN)/python -m pytest -m slow tests/bench -s

$(VENV)/.server: $(VENV)/.test
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && command -v chromium >/dev/null || { \
	  apt-get update -q && apt-get install -qy postgresql chromium; }
	$(PIP) install -c constraints.txt schemathesis
	@touch $@
