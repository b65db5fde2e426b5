"""The trained models that come with the package, one per embedded collection, read by the NumPy scorer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewise.costmodel.dataset import load_dataset
from tilewise.costmodel.evaluate import evaluate
from tilewise.costmodel.gbdt import GBDT
from tilewise.costmodel.scorer import Scorer, load_scorer
from tilewise.errors import UnavailableError


def shipped_file(collection: str) -> Path:
    """Where the model of a collection lies; an error with the names there are, where there is none."""
    folder = Path(str(files("tilewise.costmodel") / "shipped_models"))
    path = folder / f"{collection}.safetensors"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.safetensors"))) or "none yet"
        raise UnavailableError(f"no trained model is shipped for {collection!r}; there are: {known}")
    return path


def shipped_scorer(collection: str) -> Scorer | GBDT:
    """The shipped model of a collection, such as "h200"."""
    return load_scorer(shipped_file(collection))


def tour_of_the_shipped_model(collection: str = "h200") -> tuple[dict[str, Any], list[str]]:
    """How well the shipped model ranks the held-out kernels of its collection, beside simple choices."""
    scorer, dataset = shipped_scorer(collection), load_dataset(collection)
    table = evaluate({"shipped model": scorer}, dataset, "test")
    shown = [row for row in table.rows if row.name != "analytical"]  # worse than chance here; `tiles evaluate` shows it
    facts = {row.name: {k: row.metrics[k].mean for k in ("top1", "top5")} for row in shown}
    lines = [
        f"{len(dataset.test)} held-out kernels measured on an {collection.upper()}, "
        f"{dataset.test.n_configs:,} configurations; how much slower than the best is",
        f"{'':24s} {'the first choice':>18s} {'the best of five':>18s}",
    ]
    lines += [f"{name:24s} {100 * m['top1']:16.1f} % {100 * m['top5']:16.1f} %" for name, m in facts.items()]
    return facts, lines
