"""How good layout models and their predictions are: Kendall's tau, the competition's metric, with its interval.

A graph counts once however many configurations it has; one whose configurations all take the same time has no order to
find and is left out of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.course.predictions import read_predictions
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.costmodel.layout.train import spread
from tilewise.costmodel.layout.trained import TrainedLayouts
from tilewise.costmodel.metrics import Estimate, bootstrap, kendall_tau, ranking
from tilewise.costmodel.train.loop import METRICS, kernel_metrics
from tilewise.errors import ConfigurationError, FileFormatError

Table = dict[str, dict[str, Estimate]]


def evaluate_layouts(
    models: Mapping[str, TrainedLayouts], graphs: Sequence[LayoutGraph], *, most: int | None = None, seed: int = 0
) -> Table:
    """Every metric of every model, and of chance, over all configurations of each graph or `most` of them."""
    if not graphs or not all(graph.labelled for graph in graphs):
        raise ConfigurationError("The split has no runtimes to evaluate on.")
    rng = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*models, "chance")}
    for graph in track(graphs, "evaluating", len(graphs)):
        some = spread(graph.n_configs, graph.n_configs if most is None else most)
        target = graph.target(some)
        for name, model in models.items():
            rows[name].append(kernel_metrics(target, model.score(graph, some)))
        rows["chance"].append(kernel_metrics(target, rng.random(len(some))))
    return {
        name: {key: bootstrap([row[key] for row in found], seed=seed) for key in METRICS}
        for name, found in rows.items()
    }


def rank_layouts(model: TrainedLayouts, graphs: Sequence[LayoutGraph]) -> dict[str, npt.NDArray[Any]]:
    """All configurations of each graph, by its name, from the fastest predicted to the slowest."""
    return {graph.name: ranking(model.score(graph)) for graph in track(graphs, "ranking", len(graphs))}


def score_rankings(path: Path, collection: str, graphs: Sequence[LayoutGraph]) -> dict[str, float]:
    """Kendall's tau of each graph's row in a file of predictions."""
    rows, found = read_predictions(path), {}
    for graph in graphs:
        row = rows.get(f"layout:{collection}:{graph.name}")
        if row is None:
            raise FileFormatError(f"{path} has no row for layout:{collection}:{graph.name}.")
        if len(row) != graph.n_configs or len(set(row)) != len(row) or max(row) >= graph.n_configs:
            raise FileFormatError(f"{path}: {graph.name} has {graph.n_configs} configurations; its row must hold each.")
        place = np.empty(len(row), np.int64)
        place[row] = np.arange(len(row))
        found[graph.name] = kendall_tau(graph.target(), place)
    return found
