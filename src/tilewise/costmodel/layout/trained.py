"""A trained layout model: weights, scaling and record in one safetensors file, and what is done with it.

Configurations are scored in chunks, a segment at a time, so that neither a graph of 40,000 nodes nor one of 100,000
configurations needs much memory. Every chunk has the same reference configurations in front (see `models`), so chunks
change nothing but rounding.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.costmodel.layout.segments import Scaling, Segment, cut
from tilewise.costmodel.layout.train import configurations, spread
from tilewise.costmodel.models.files import read_tensors, write_tensors
from tilewise.costmodel.models.trained import check_weights, model_path, report_misfit
from tilewise.errors import ConfigurationError, FileFormatError, did_you_mean

if TYPE_CHECKING:
    from tilewise.costmodel.layout.models import LayoutModel

FORMAT = "tilewise-layout-model-1"
REFERENCES = 32
AT_ONCE = 64  # configurations of a chunk, beside the references


@dataclass(eq=False)
class TrainedLayouts:
    """A layout model ready to score; `record` holds its settings and its learning curve."""

    module: LayoutModel
    scaling: Scaling
    record: dict[str, Any]

    def score(self, graph: LayoutGraph, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """One score per configuration (or per row asked for), lower is faster."""
        with report_misfit(str(self.record["model"])):
            segments = cut(graph, self.scaling, self.record["hops"], self.record["segment_nodes"])
            return score_graph(self.module, graph, segments, rows)

    def save(self, path: str | Path) -> None:
        tensors = {f"weight.{k}": v.detach().cpu().numpy() for k, v in self.module.state_dict().items()}
        tensors |= {f"scale.{k}": v for k, v in self.scaling.tensors().items()}
        write_tensors(Path(path), tensors, self.record | {"format": FORMAT})


def score_graph(
    module: LayoutModel, graph: LayoutGraph, segments: Sequence[Segment], rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float32]:
    """(K,) scores of those rows, or of all."""
    import torch

    rows = np.arange(graph.n_configs) if rows is None else rows
    references = configurations(graph, spread(graph.n_configs, REFERENCES))
    scores = np.empty(len(rows), np.float32)
    with torch.inference_mode():
        for start in range(0, len(rows), AT_ONCE):
            chunk = configurations(graph, rows[start : start + AT_ONCE])
            config = np.concatenate([references, chunk])
            pooled: Any = 0
            for segment in segments:
                pooled = pooled + module.encode(segment, module.tensor(config[:, segment.columns]), len(references))
            found = module.score(pooled, len(references))[len(references) :]
            scores[start : start + AT_ONCE] = found.float().cpu().numpy()
    return scores


def build_layout_model(name: str, node_width: int, kwargs: Mapping[str, Any]) -> tuple[LayoutModel, dict[str, Any]]:
    """An untrained model, and its arguments with the defaults: a file must build the same after those have changed."""
    from tilewise.costmodel.layout.models import MODELS

    if name not in MODELS:
        raise ConfigurationError(f"There is no layout model {name!r}; {did_you_mean(name, MODELS)}")
    known = {p.name: p.default for p in inspect.signature(MODELS[name]).parameters.values() if p.name != "node_width"}
    given = known | dict(kwargs)
    try:
        for key, value in given.items():
            if isinstance(known.get(key), bool) is not isinstance(value, bool):
                raise ValueError(f"{key} is a switch or a number, and was given as the other")
            if not isinstance(value, bool) and (type(value) is not int or not 1 <= value <= 4096):
                raise ValueError("its numbers are whole ones from 1 to 4096")
        return MODELS[name](node_width, **given), given
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{name} cannot be built with {json.dumps(dict(kwargs))}: {why}.") from error


def load_layout_model(path: str | Path, device: str = "cpu") -> TrainedLayouts:
    """The layout model in a file, or in the folder of a training run."""
    import torch

    found = model_path(path)
    tensors, record = read_tensors(found)
    name, kwargs = record.get("model"), record.get("model_kwargs")
    numbers = [record.get(key) for key in ("hops", "segment_nodes")]
    if record.get("format") != FORMAT or not isinstance(name, str) or not isinstance(kwargs, dict):
        raise FileFormatError(f"{found} is not a layout model of this version of tilewise; train it again.")
    if any(type(number) is not int or not 0 <= number < 1 << 31 for number in numbers) or not numbers[1]:
        raise FileFormatError(f"{found} does not say how it cuts graphs; train it again.")
    scaling = Scaling.restore({k.removeprefix("scale."): v for k, v in tensors.items() if k.startswith("scale.")})
    weights = {k.removeprefix("weight."): v for k, v in tensors.items() if k.startswith("weight.")}
    error = FileFormatError(f"The weights in {found} do not fit the model {name[:80]}.")
    check_weights(weights, kwargs, lambda: build_layout_model(name, scaling.width, kwargs)[0], error)
    module, _ = build_layout_model(name, scaling.width, kwargs)
    with report_misfit(name):
        module.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in weights.items()})
    return TrainedLayouts(module.eval().to(device), scaling, record)
