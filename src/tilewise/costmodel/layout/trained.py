"""Trained layout models: scoring, files with weights, scaling and record, and evaluation by Kendall's tau.

Configurations are scored in chunks and segment by segment, so that a graph with 40,000 nodes or 100,000 configurations
needs little memory; scores depend on the chunks by rounding only.

In an evaluation every graph has the same weight, however many configurations it has. A graph whose configurations all
take the same time has no order to predict and is left out of the mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.course.predictions import read_predictions
from tilewise.costmodel.data.kernel import ranking
from tilewise.costmodel.data.shards import track
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.costmodel.layout.segments import GraphSegment, Scaling, split_graph
from tilewise.costmodel.layout.train import fixed_sample
from tilewise.costmodel.metrics import Estimate, bootstrap, kendall_tau
from tilewise.costmodel.models.file_writer import write_tensors
from tilewise.costmodel.models.files import model_path, read_tensors, report_misfit
from tilewise.costmodel.models.trained import restored_module
from tilewise.costmodel.training.loop import METRICS, kernel_metrics
from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean

if TYPE_CHECKING:
    from tilewise.costmodel.layout.models import LayoutModel

FORMAT = "tilewise-layout-model-1"
CHUNK_CONFIGS = 64  # configurations per chunk; changes memory only

Table = dict[str, dict[str, Estimate]]


@dataclass(eq=False)
class TrainedLayoutModel:
    """A layout model ready to score; `record` contains its settings and learning curve."""

    module: LayoutModel
    scaling: Scaling
    record: dict[str, Any]

    def score(self, graph: LayoutGraph, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Score all configurations, or those of the given rows, as (K,); lower is faster."""
        with report_misfit(str(self.record["model"])):
            segments = split_graph(graph, self.scaling, self.record["hops"], self.record["segment_nodes"])
            return score_graph(self.module, graph, segments, rows)

    def save(self, path: str | Path) -> None:
        """Write the model to a safetensors file."""
        tensors = {f"weight.{k}": v.detach().cpu().numpy() for k, v in self.module.state_dict().items()}
        tensors |= {f"scale.{k}": v for k, v in self.scaling.tensors().items()}
        write_tensors(Path(path), tensors, self.record | {"format": FORMAT})


def score_graph(
    module: LayoutModel, graph: LayoutGraph, segments: Sequence[GraphSegment], rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float32]:
    """Score all configurations of a graph, or `rows` of them, in chunks of bounded memory: (K,)."""
    import torch

    rows = np.arange(graph.n_configs) if rows is None else rows
    scores = np.empty(len(rows), np.float32)
    with torch.inference_mode():
        for start in range(0, len(rows), CHUNK_CONFIGS):
            chunk = graph.config_feat[rows[start : start + CHUNK_CONFIGS]]
            # The encoding of a graph is the sum over its segments, of which one at a time is in memory.
            pooled: Any = 0
            for segment in segments:
                pooled = pooled + module.encode(segment, module.tensor(chunk[:, segment.columns]))
            scores[start : start + CHUNK_CONFIGS] = module.score(pooled).float().cpu().numpy()
    return scores


def build_layout_model(name: str, node_width: int, kwargs: Mapping[str, Any]) -> tuple[LayoutModel, dict[str, Any]]:
    """Build an untrained model; return it and its arguments, completed by the defaults.

    A model file stores the completed arguments, so that it stays valid if a default changes.
    """
    from tilewise.costmodel.layout.models import MODELS
    from tilewise.costmodel.models.torch import constructor_defaults

    if name not in MODELS:
        raise ConfigurationError(f"There is no layout model {name!r}; {did_you_mean(name, MODELS)}")
    defaults = constructor_defaults(MODELS[name])
    arguments = defaults | dict(kwargs)
    try:
        # The arguments may come from an untrusted file: check type and size before anything is allocated.
        for key, value in arguments.items():
            if type(value) is not int or not 1 <= value <= 4096:
                raise ValueError(f"{key} must be an integer from 1 to 4096")
        return MODELS[name](node_width, **arguments), arguments
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{name} cannot be built with {json.dumps(dict(kwargs))}: {reason}.") from error


def load_layout_model(path: str | Path, device: str = "cpu") -> TrainedLayoutModel:
    """Load the layout model in a file, or in the folder of a training run."""

    file = model_path(path)
    tensors, record = read_tensors(file)
    name, kwargs = record.get("model"), record.get("model_kwargs")
    # A file may come from anyone: check every entry of its record before it is used.
    numbers = [record.get(key) for key in ("hops", "segment_nodes")]
    if record.get("format") != FORMAT or not isinstance(name, str) or not isinstance(kwargs, dict):
        raise FileFormatError(f"{file} is not a layout model of this version of tilewise; train it again.")
    if any(type(number) is not int or not 0 <= number < 1 << 31 for number in numbers) or not numbers[1]:
        raise FileFormatError(f"{file} does not state how it splits graphs; train it again.")
    scaling = Scaling.restore({k.removeprefix("scale."): v for k, v in tensors.items() if k.startswith("scale.")})
    weights = {k.removeprefix("weight."): v for k, v in tensors.items() if k.startswith("weight.")}
    error = FileFormatError(f"The weights in {file} do not fit the model {name[:80]}.")
    module = restored_module(weights, kwargs, lambda: build_layout_model(name, scaling.width, kwargs)[0], error)
    return TrainedLayoutModel(module.eval().to(device), scaling, record)


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
