"""The trained models that come with the package, one per embedded collection, read by the NumPy scorer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.gbdt import GBDT
from tilewise.costmodel.models.scorer import Scorer, load_scorer
from tilewise.errors import UnavailableError

_FOLDER = Path(str(files("tilewise.costmodel") / "shipped_models"))


def shipped_names() -> list[str]:
    """The collections that a trained model is shipped for."""
    return sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


def shipped_file(collection: str) -> Path:
    """Where the model of a collection lies; an error with the names there are, where there is none."""
    path = _FOLDER / f"{collection}.safetensors"
    if not path.is_file():
        known = ", ".join(shipped_names()) or "none yet"
        raise UnavailableError(f"no trained model is shipped for {collection!r}; there are: {known}")
    return path


def shipped_scorer(collection: str) -> Scorer | GBDT | Blend:
    """The shipped model of a collection, such as "h200"."""
    return load_scorer(shipped_file(collection))
