"""The board: one file of results with a row for every (collection, model) pair.

Models are trained or loaded and passed to `evaluate`. The file is written after every pair, and pairs that it already
has are skipped, so an interrupted run continues. A row's key is a digest of the collection's kernels and
configurations, the model (with its bytes if it is a file), the split, the seed and the settings; a row with another key
is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise._files import read_input, read_json_input
from tilewise._wording import with_interval
from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.evaluation import Evaluation, evaluate
from tilewise.costmodel.models.file_writer import without_nans
from tilewise.costmodel.models.files import model_path, shipped_file, shipped_names
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.ranking import Model
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError

SHIPPED = "shipped"
BASELINES = "baselines"  # pseudo-model whose rows are the baselines of `evaluate`
METRICS = ("top1", "top5", "top10", "opa", "tau")
HEADINGS = ("collection", "model", "kernels", "top-1 error", "top-5 error", "top-10 error", "ordered pairs")
_MAX_MODEL_BYTES = 1 << 30
BoardRow = dict[str, Any]


def fill_board(
    path: Path,
    collections: Sequence[str],
    models: Sequence[str],
    *,
    split: str = "test",
    seed: int = 0,
    runs: Path | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    **settings: Any,
) -> list[BoardRow]:
    """Evaluate every pair of `collections` and `models` that the board file `path` lacks; return all its rows.

    A model is a name to train with default settings (`TileRanker`, `GBDT`, `EarlyJoinSAGE`, `auto`, …), a model file,
    or "shipped" for the one that comes with the collection. Trained models are saved in `runs`, where training can be
    resumed. Every collection also gets rows for the baselines.
    """
    rows = read_board(path)
    _check_names(models)
    last_error: TilewiseError | None = None
    for collection in collections:
        data = load_dataset(collection, progress=False)
        for model in (*models, BASELINES):
            key = _row_key(data, model, collection, split, seed, settings)
            if any(row["key"] == key for row in rows):
                continue
            say(f"{collection}: {model}")
            try:
                if model == BASELINES:
                    table = evaluate({}, data, split, seed=seed)
                else:
                    folder = (runs or path.parent / "board_runs") / f"{Path(collection).name}-{model}-{seed}"
                    scorer = _load_or_train(data, collection, model, folder, seed=seed, **settings)
                    table = evaluate({model: scorer}, data, split, baselines=False)
            except TilewiseError as error:
                say(f"{collection}: {model} is skipped: {error}")
                last_error = error
                continue
            # Rows of an older key are replaced; the file is written after every pair.
            new_rows = _board_rows(table, collection, seed, key)
            replaced = {_identity(row) for row in new_rows}
            rows = [row for row in rows if _identity(row) not in replaced] + new_rows
            write_atomic(path, json.dumps({"board": rows}, indent=1) + "\n")
    if last_error is not None and not rows:
        raise ConfigurationError(f"Nothing could be evaluated: {last_error}")
    return rows


def _check_names(models: Sequence[str]) -> None:
    """Raise ConfigurationError for an unknown model name, before any training starts."""
    for model in models:
        # These need no torch; all other names are torch classes.
        if model in (SHIPPED, "auto", "GBDT") or Path(model).expanduser().exists():
            continue
        from tilewise.costmodel.models.torch import model_class

        model_class(model)


def _load_or_train(data: Dataset, collection: str, model: str, folder: Path, **settings: Any) -> Model:
    """Load a model if its name is a file or "shipped"; otherwise train the named model in `folder`."""
    file = _model_file(collection, model)
    if file is not None:
        return load_scorer(file)
    from tilewise.costmodel.training.auto import train_auto
    from tilewise.costmodel.training.loop import train

    if model == "auto":
        return train_auto(data, out_dir=folder, **settings)
    return train(data, model, out_dir=folder, **settings)


def _model_file(collection: str, model: str) -> Path | None:
    """Return the file of a model that exists already; None if the name is one to train."""
    if model == SHIPPED:
        return shipped_file(collection)
    path = Path(model).expanduser()
    return model_path(path) if path.exists() else None


def _board_rows(table: Evaluation, collection: str, seed: int, key: str) -> list[BoardRow]:
    """Convert an evaluation to board rows; `key` identifies the data and settings they were computed from."""
    rows: list[BoardRow] = without_nans(
        [
            {
                "collection": collection,
                "model": Path(row.name).name,
                "split": table.split,
                "kernels": table.kernels,
                "seed": seed,
                "metrics": {m: asdict(row.metrics[m]) for m in METRICS if m in row.metrics},
                "key": key,
            }
            for row in table.rows
        ]
    )
    return rows


def _identity(row: BoardRow) -> tuple[str, str, str]:
    """Return the (collection, model, split) of a row, which is unique within a board."""
    return row["collection"], row["model"], row["split"]


def _row_key(data: Dataset, model: str, collection: str, split: str, seed: int, settings: dict[str, Any]) -> str:
    """Hash everything that a row's numbers depend on, so that an outdated row is recomputed."""
    # Names and sizes stand for the data: hashing a whole collection would take longer than scoring it.
    digest = hashlib.sha256()
    for part in (data.train, data.valid, data.split(split)):
        digest.update(json.dumps([part.names, part.offsets("configs").tolist()]).encode())
    digest.update(json.dumps([model, split, seed, settings, data.schema.config_features], sort_keys=True).encode())
    # A shipped model that does not exist is reported by the evaluation, not by the key.
    exists = model != SHIPPED or collection in shipped_names()
    file = _model_file(collection, model) if exists else None
    if file is not None:
        digest.update(read_input(file, _MAX_MODEL_BYTES))
    return digest.hexdigest()[:16]


def read_board(path: Path) -> list[BoardRow]:
    """Read the rows of a board; empty if there is no file yet."""
    if not os.path.lexists(path):
        return []
    content = read_json_input(path)
    rows = content.get("board") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise FileFormatError(f"{path} is not a board of tilewise; give another file.")
    return rows


def _is_row(row: Any) -> bool:
    """Tell whether a parsed JSON value has the keys and types of a `BoardRow`."""
    texts = ("collection", "model", "split", "key")
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in texts):
        return False
    metrics = row.get("metrics")
    if not isinstance(row.get("kernels"), int) or not isinstance(metrics, dict):
        return False
    return all(isinstance(value, dict) and set(value) == {"mean", "low", "high"} for value in metrics.values())


def board_lines(rows: Iterable[BoardRow]) -> list[tuple[str, ...]]:
    """Format each row as table cells, the best of a collection first."""
    ordered = sorted(rows, key=lambda row: (row["collection"], row["split"], _metric_mean(row, "top5"), row["model"]))
    return [
        (
            row["collection"],
            row["model"],
            f"{row['kernels']} {row['split']}",
            *(_cell(row, metric) for metric in ("top1", "top5", "top10", "opa")),
        )
        for row in ordered
    ]


def _metric_mean(row: BoardRow, metric: str) -> float:
    """Return a row's mean of a metric; infinity if it is undefined, so that sorting puts the row last."""
    value = row["metrics"].get(metric, {}).get("mean")
    return float(value) if isinstance(value, int | float) else float("inf")


def _cell(row: BoardRow, metric: str) -> str:
    """Format a row's metric, a fraction, as per cent with its interval; empty if it is undefined."""
    values = row["metrics"].get(metric, {})
    if not all(isinstance(values.get(name), int | float) for name in ("mean", "low", "high")):
        return ""
    mean, low, high = (f"{100 * values[name]:.2f}" for name in ("mean", "low", "high"))
    return with_interval(f"{mean} %", low, high)
