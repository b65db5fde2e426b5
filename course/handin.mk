# The Keras hand-in: TensorFlow 2.15 needs Python 3.11 and older libraries than the rest, so it has its own environment.
KERAS_VENV := .venv-keras
KERAS_PYTHON ?= python3.11
KERAS_PACKAGES := tensorflow==2.15.1 tensorflow-gnn==1.0.3 'tensorflow-ranking>=0.5,<0.6' 'numpy<2' safetensors typer rich pytest hypothesis

.PHONY: keras-env handin test-keras

keras-env: $(KERAS_VENV)/.ready  ## build the TensorFlow environment of the hand-in

handin: $(KERAS_VENV)/.ready  ## write handin/ for a trained run: make handin MODEL=model_<hash>
	@test -n "$(MODEL)" || { echo "Say which run: make handin MODEL=~/out/tpugraphs_tiles/model_<hash>"; exit 2; }
	PYTHONPATH=$(abspath src) $(KERAS_VENV)/bin/python course/handin.py $(MODEL)

test-keras: $(KERAS_VENV)/.ready $(VENV)/.test  ## the grader's steps on hand-ins of every model
	TILEWISE_PYTHON=$(abspath $(BIN))/python PYTHONPATH=$(abspath src) $(KERAS_VENV)/bin/python -m pytest -m '' tests/course/test_keras.py

$(KERAS_VENV)/.ready: constraints-keras.txt
	@command -v $(KERAS_PYTHON) >/dev/null || { echo "The Keras hand-in needs Python 3.11; set KERAS_PYTHON=..."; exit 2; }
	$(KERAS_PYTHON) -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/python -m pip --disable-pip-version-check -q install -c constraints-keras.txt $(KERAS_PACKAGES)
	@touch $@
