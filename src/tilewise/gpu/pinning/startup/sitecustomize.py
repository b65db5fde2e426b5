"""Pin every Python process that `tilewise run-pinned` starts: this folder is in front of their PYTHONPATH.

Python imports the first module of this name at its start, so the next one, which the user may have, is run from here.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent.resolve()

with contextlib.suppress(ImportError):  # a child may be another Python, which has no tilewise
    import tilewise  # noqa: F401  (reads TILEWISE_PIN)

_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if Path(path).resolve() != _FOLDER]
)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
