"""One table of collections and models: every pair trained or read, evaluated, and kept in one file of results.

A run writes the file after every pair, and leaves out the pairs that the file has already: a run that was cut off goes
on. What a row tells of is in its key, a digest of the collection's kernels and configurations, the model, its bytes
where it is a file, the split and the seed; a row whose collection changed is made again.
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

from tilewise._files import read_input, read_json_input, write_atomic
from tilewise._wording import with_interval
from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.evaluate import evaluate
from tilewise.costmodel.models.files import without_nans
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.shipped import shipped_file, shipped_names
from tilewise.costmodel.models.trained import model_path
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError

SHIPPED = "shipped"
METRICS = ("top1", "top5", "top10", "opa", "tau")
_MOST_MODEL_BYTES = 1 << 30
Row = dict[str, Any]


def fill_board(
    path: Path,
    collections: Sequence[str],
    models: Sequence[str],
    *,
    split: str = "test",
    seed: int = 0,
    runs: Path | None = None,
    cache_dir: Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    **settings: Any,
) -> list[Row]:
    """Add to the board in `path` what it lacks of `collections` and `models`, and give all its rows.

    A model is a name to train with every default (`TileRanker`, `GBDT`, `EarlyJoinSAGE`, `auto`, …), a model file, or
    "shipped" for the one that came with the collection. Trained models go into `runs`, where training is resumed.
    Beside each collection's models stand what they must beat: a formula where there is one, the default, chance.
    """
    rows = read_board(path)
    _check_names(models)
    left_out: TilewiseError | None = None
    for name in collections:
        data = load_dataset(name, cache_dir=cache_dir, limit=limit, progress=False)
        for model in (*models, "baselines"):
            key = _key(data, model, name, split, seed, settings)
            if any(row["key"] == key for row in rows):
                continue
            say(f"{name}: {model}")
            try:
                found = _rows(data, name, model, split, seed, runs or path.parent / "board_runs", settings)
            except TilewiseError as error:
                say(f"{name}: {model} is left out: {error}")
                left_out = error
                continue
            places = {(row["collection"], row["model"], row["split"]) for row in found}
            rows = [row for row in rows if (row["collection"], row["model"], row["split"]) not in places]
            rows += [row | {"key": key} for row in found]
            write_atomic(path, json.dumps({"board": rows}, indent=1) + "\n")
    if left_out is not None and not rows:
        raise ConfigurationError(f"Nothing could be evaluated: {left_out}")
    return rows


def _check_names(models: Sequence[str]) -> None:
    """A name that no model has is said before any work."""
    for model in models:
        if model in (SHIPPED, "auto", "GBDT") or Path(model).expanduser().exists():
            continue
        from tilewise.costmodel.models.torch import model_class

        model_class(model)


def _rows(data: Dataset, name: str, model: str, split: str, seed: int, runs: Path, settings: Any) -> list[Row]:
    if model == "baselines":
        table = evaluate({}, data, split, seed=seed)
    else:
        table = evaluate({model: _model(data, name, model, seed, runs, settings)}, data, split, baselines=False)
    shown: list[Row] = [
        {
            "collection": name,
            "model": Path(row.name).name if row.name == model else row.name,
            "split": split,
            "kernels": table.kernels,
            "seed": seed,
            "metrics": {m: asdict(row.metrics[m]) for m in METRICS if m in row.metrics},
        }
        for row in table.rows
    ]
    cleaned: list[Row] = without_nans(shown)
    return cleaned


def _model(data: Dataset, name: str, model: str, seed: int, runs: Path, settings: dict[str, Any]) -> Any:
    file = _file(name, model)
    if file is not None:
        return load_scorer(file)
    from tilewise.costmodel.train.auto import train_auto
    from tilewise.costmodel.train.loop import train

    folder = runs / f"{Path(name).name}-{model}-{seed}"
    if model == "auto":
        return train_auto(data, out_dir=folder, seed=seed, **settings)
    return train(data, model, out_dir=folder, seed=seed, **settings)


def _file(name: str, model: str) -> Path | None:
    """The file that a model is read from; None where it is to be trained."""
    if model == SHIPPED:
        return shipped_file(name)
    path = Path(model).expanduser()
    return model_path(path) if path.exists() else None


def _key(data: Dataset, model: str, name: str, split: str, seed: int, settings: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for part in (data.train, data.valid, data.split(split)):
        digest.update(json.dumps([part.names, part.offsets("configs").tolist()]).encode())
    digest.update(json.dumps([model, split, seed, settings, data.schema.config_features], sort_keys=True).encode())
    known = model != SHIPPED or name in shipped_names()
    file = _file(name, model) if known else None
    if file is not None:
        digest.update(read_input(file, _MOST_MODEL_BYTES))
    return digest.hexdigest()[:16]


def read_board(path: Path) -> list[Row]:
    """The rows of a board; none where there is no file yet."""
    if not os.path.lexists(path):
        return []
    content = read_json_input(path)
    rows = content.get("board") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise FileFormatError(f"{path} is not a board of tilewise; give another file.")
    return rows


def _is_row(row: Any) -> bool:
    words = ("collection", "model", "split", "key")
    if not isinstance(row, dict) or not all(isinstance(row.get(word), str) for word in words):
        return False
    metrics = row.get("metrics")
    if not isinstance(row.get("kernels"), int) or not isinstance(metrics, dict):
        return False
    return all(isinstance(value, dict) and set(value) == {"mean", "low", "high"} for value in metrics.values())


def board_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line of cells for each row, the best of a collection first."""
    ordered = sorted(rows, key=lambda row: (row["collection"], row["split"], _mean(row, "top5"), row["model"]))
    return [
        (
            row["collection"],
            row["model"],
            f"{row['kernels']} {row['split']}",
            *(_cell(row, metric) for metric in ("top1", "top5", "top10", "opa")),
        )
        for row in ordered
    ]


HEADINGS = ("collection", "model", "kernels", "top-1 error", "top-5 error", "top-10 error", "ordered pairs")


def _mean(row: Row, metric: str) -> float:
    value = row["metrics"].get(metric, {}).get("mean")
    return float(value) if isinstance(value, int | float) else float("inf")


def _cell(row: Row, metric: str) -> str:
    values = row["metrics"].get(metric, {})
    if not all(isinstance(values.get(name), int | float) for name in ("mean", "low", "high")):
        return ""
    mean, low, high = (f"{100 * values[name]:.2f}" for name in ("mean", "low", "high"))
    return with_interval(f"{mean} %", low, high)
