"""Shipped models: the trained models in the package, one per embedded collection, loaded by the NumPy scorer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.errors import UnavailableError

_FOLDER = Path(str(files("tilewise.costmodel") / "shipped_models"))


def shipped_names() -> list[str]:
    """List the collections that have a shipped model."""
    return sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


def shipped_file(collection: str) -> Path:
    """Return the file of a collection's model; the error for an unknown name lists the existing ones."""
    path = _FOLDER / f"{collection}.safetensors"
    if not path.is_file():
        names = ", ".join(shipped_names()) or "none yet"
        raise UnavailableError(f"no trained model is shipped for {collection!r}; there are: {names}")
    return path


def shipped_scorer(collection: str) -> Scorer | GBDT | Blend:
    """Load the shipped model of a collection, such as "h200"."""
    return load_scorer(shipped_file(collection))
