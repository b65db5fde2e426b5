"""Where TensorFlow lives: an environment of its own, because it needs older libraries than the rest of tilewise.

`make keras-env` builds it as ``.venv-keras`` in the checkout. A command that needs TensorFlow and runs elsewhere hands
itself over to that environment's Python.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

from tilewise.errors import UnavailableError

_HERE = Path(__file__).resolve().parent


def keras_python() -> Path:
    """The Python of the Keras environment: ``$TILEWISE_KERAS_PYTHON``, else the checkout's own."""
    chosen = os.environ.get("TILEWISE_KERAS_PYTHON")
    python = Path(chosen) if chosen else _HERE.parent / ".venv-keras" / "bin" / "python"
    if not python.is_file():
        raise UnavailableError(f"There is no TensorFlow environment at {python}; build it with `make keras-env`.")
    return python


def has_tensorflow() -> bool:
    """Whether this Python can do the work itself."""
    return importlib.util.find_spec("tensorflow_gnn") is not None


def quiet_tensorflow() -> None:
    """Keep TensorFlow's start-up notices out of the output; call before it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if importlib.util.find_spec("absl") is not None:
        import absl.logging  # which sets its own level when it is imported

        absl.logging.set_verbosity(absl.logging.ERROR)
    for library in ("tensorflow", "keras", "tensorflow_gnn", "tensorflow_ranking", "google"):
        warnings.filterwarnings("ignore", module=rf"{library}(\..*)?$")
    warnings.filterwarnings("ignore", message="Encoding a StructuredValue")  # the grader imports TF-GNN, as it must


def hand_over(*more: str) -> int:
    """Run this very command, with `more` arguments, in the Keras environment and give its exit code."""
    import tilewise

    source = str(Path(tilewise.__file__).resolve().parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([str(keras_python()), *sys.argv, *more], env=environment, check=False).returncode
