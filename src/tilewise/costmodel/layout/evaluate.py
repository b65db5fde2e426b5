"""Evaluates layout models and prediction files by Kendall's tau, the competition's metric, with its interval.

Every graph has the same weight, however many configurations it has. A graph whose configurations all take the same time
has no order to predict and is left out of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.course.predictions import read_predictions
from tilewise.costmodel.data.kernel import ranking
from tilewise.costmodel.data.shards import track
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.costmodel.layout.train import fixed_sample
from tilewise.costmodel.layout.trained import TrainedLayoutModel
from tilewise.costmodel.metrics import Estimate, bootstrap, kendall_tau
from tilewise.costmodel.training.loop import METRICS, kernel_metrics
from tilewise.errors import ConfigurationError, FileFormatError

Table = dict[str, dict[str, Estimate]]


def evaluate_layouts(
    models: Mapping[str, TrainedLayoutModel],
    graphs: Sequence[LayoutGraph],
    *,
    max_configs: int | None = None,
    seed: int = 0,
) -> Table:
    """Compute every metric of every model, and of a random order, on at most `max_configs` configurations per graph."""
    if not graphs or not all(graph.labelled for graph in graphs):
        raise ConfigurationError("The split has no runtimes to evaluate on.")
    rng = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*models, "chance")}
    for graph in track(graphs, "evaluating", len(graphs)):
        # All models and all runs see the same sample, so that differences between them are paired.
        sample = fixed_sample(graph.n_configs, graph.n_configs if max_configs is None else max_configs)
        target = graph.target(sample)
        for name, model in models.items():
            rows[name].append(kernel_metrics(target, model.score(graph, sample)))
        rows["chance"].append(kernel_metrics(target, rng.random(len(sample))))
    return {
        name: {key: bootstrap([row[key] for row in graph_rows], seed=seed) for key in METRICS}
        for name, graph_rows in rows.items()
    }


def rank_layouts(model: TrainedLayoutModel, graphs: Sequence[LayoutGraph]) -> dict[str, npt.NDArray[Any]]:
    """Rank all configurations of each graph from the fastest predicted to the slowest; return them by graph name."""
    return {graph.name: ranking(model.score(graph)) for graph in track(graphs, "ranking", len(graphs))}


def score_rankings(path: Path, collection: str, graphs: Sequence[LayoutGraph]) -> dict[str, float]:
    """Compute Kendall's tau of each graph's row in a predictions file."""
    rows, taus = read_predictions(path), {}
    for graph in graphs:
        row = rows.get(f"layout:{collection}:{graph.name}")
        if row is None:
            raise FileFormatError(f"{path} has no row for layout:{collection}:{graph.name}.")
        if len(row) != graph.n_configs or len(set(row)) != len(row) or max(row) >= graph.n_configs:
            raise FileFormatError(
                f"{path}: {graph.name} has {graph.n_configs} configurations; its row must list each of them once."
            )
        # A row lists configurations from best to worst; tau compares the rank of each configuration.
        rank = np.empty(len(row), np.int64)
        rank[row] = np.arange(len(row))
        taus[graph.name] = kendall_tau(graph.target(), rank)
    return taus
