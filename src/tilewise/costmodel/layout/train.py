"""Training on layout graphs in bounded memory: some configurations of a graph, and gradients through some segments.

A step draws a few graphs, K configurations of each, and one segment of each through which gradients flow. The other
segments are encoded one after another without keeping anything for the backward pass, so that the loss sees the whole
graph while memory is that of one segment. The gradient of the drawn segment counts as often as there are segments:
averaged over the draws it is the gradient of all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.layout.collection import Layouts
from tilewise.costmodel.layout.graph import LayoutGraph
from tilewise.costmodel.layout.segments import Scaling, Segment, SegmentedGraphs
from tilewise.costmodel.models.trained import MODEL_FILE
from tilewise.costmodel.train.config import TrainSettings, default_settings
from tilewise.costmodel.train.loop import METRICS, chosen_device, keep_freed_memory, kernel_metrics, mean_of_known
from tilewise.costmodel.train.resumable import CHECKPOINT, Report, ResumableRun, print_epoch, silent
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.costmodel.layout.models import LayoutModel
    from tilewise.costmodel.layout.trained import TrainedLayouts

DEFAULTS: dict[str, Any] = {
    "epochs": 20,
    "early_stop": 1000,
    "losses": "PairwiseHingeLoss:1",
    "learning_rate": 2e-3,
    "clip_norm": 1.0,
    "configs": 32,
    "batch": 4,
    "weight_decay": 0.01,
    "schedule": "cosine",
    "average": 0.98,
    "select": "tau",
    "settled": 0.75,
    "eval_every": 5,
    "least_steps": 16,
}
VALIDATED = 512  # configurations of a graph that validation scores


def train_layouts(
    data: Layouts,
    model: str = "LayoutAttention",
    *,
    out_dir: str | Path | None = None,
    segment_nodes: int = 1000,
    hops: int = 3,
    resume: bool = True,
    device: str = "auto",
    progress: bool = True,
    report: Report | None = None,
    **settings: Any,
) -> TrainedLayouts:
    """Train ``LayoutAttention`` or ``LayoutSAGE`` on the train split; Kendall's tau on valid chooses the checkpoint.

    >>> train_layouts(open_layouts("npz/layout/xla/random"), out_dir="runs/layout")  # doctest: +SKIP
    """
    if segment_nodes < 1 or hops < 0:
        raise ConfigurationError("A segment has at least one node, and hops are not negative.")
    for split in ("train", "valid"):
        if not data.split(split) or not all(graph.labelled for graph in data.split(split)):
            raise ConfigurationError("Training needs train and valid splits with runtimes; this collection lacks one.")
    chosen = default_settings(model, **(DEFAULTS | {k: v for k, v in settings.items() if v is not None}))
    run = _Run(data, chosen, chosen_device(device), Path(out_dir).expanduser() if out_dir else None)
    run.prepare(segment_nodes, hops)
    if resume:
        run.resume(progress)
    run.learn(report or (print_epoch if progress else silent))
    return run.finish()


class _Run(ResumableRun):
    module: LayoutModel

    def __init__(self, data: Layouts, settings: TrainSettings, device: str, folder: Path | None) -> None:
        from tilewise.costmodel.train.losses import parse_losses

        super().__init__(settings, device, folder)
        keep_freed_memory()
        self.data, self.loss = data, parse_losses(settings.losses)

    def prepare(self, segment_nodes: int, hops: int) -> None:
        import torch

        from tilewise.costmodel.layout.trained import build_layout_model

        self.cutting = {"segment_nodes": segment_nodes, "hops": hops}
        self.scaling = Scaling.fit(self.data.train)
        self.segments = SegmentedGraphs(self.data.train, self.scaling, hops, segment_nodes)
        self.validation = SegmentedGraphs(self.data.valid, self.scaling, hops, segment_nodes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            module, self.kwargs = build_layout_model(
                self.settings.model, self.scaling.width, self.settings.model_kwargs
            )
        self.module = module.to(self.device)
        self._begin()

    def _epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        self.module.train()
        settings = self.settings
        once = -(-len(self.segments) // settings.batch)
        passes = settings.passes(once)
        rng = np.random.default_rng([settings.seed, epoch])
        order = np.concatenate([rng.permutation(len(self.segments)) for _ in range(passes)])
        losses, ordered = [], []
        for start in range(0, len(order), settings.batch):
            share = settings.share_done(epoch + start / len(order), self._seconds_since(started))
            if share >= 1 and start:
                break  # out of time within an epoch
            self.optimizer.learning_rate = settings.learning_rate_at(share)
            self.optimizer.zero_grad()
            drawn = order[start : start + settings.batch].tolist()
            for index in drawn:  # one graph after another: the memory of a step is that of its largest
                loss, opa = self._learn(index, rng, 1 / len(drawn))
                losses.append(loss)
                ordered.append(opa)
            self.optimizer.step()
            self._update_average()
        if not np.isfinite(losses).all():
            raise ConfigurationError(f"Training diverged in epoch {epoch}; use a lower learning rate.")
        return {"epoch": epoch, "train_loss": float(np.mean(losses)), "train_opa": mean_of_known(ordered)}

    def _learn(self, index: int, rng: np.random.Generator, weight: float) -> tuple[float, float]:
        """Adds the gradient of one graph's slate; gives its loss and the share of pairs in the right order."""
        import torch

        from tilewise.costmodel.metrics import opa

        graph, segments = self.data.train[index], self.segments[index]
        rows = rng.choice(graph.n_configs, min(self.settings.configs, graph.n_configs), replace=False)
        through = int(rng.integers(len(segments)))
        target = graph.target(rows)
        scores = slate_scores(self.module, segments, configurations(graph, rows), through)
        loss = self.loss(scores[None], torch.from_numpy(target)[None].to(scores), torch.ones(1, len(rows)).bool())
        torch.autograd.backward(loss * weight)
        return float(loss.detach()), opa(target, scores.detach().cpu().numpy())

    def _measure(self) -> dict[str, float]:
        from tilewise.costmodel.layout.trained import score_graph

        self.module.eval()
        rows = []
        for index, graph in enumerate(self.data.valid):
            some = spread(graph.n_configs, VALIDATED)
            scores = score_graph(self.module, graph, self.validation[index], some)
            rows.append(kernel_metrics(graph.target(some), scores))
        return {f"val_{key}": mean_of_known([row[key] for row in rows]) for key in METRICS}

    def finish(self) -> TrainedLayouts:
        from tilewise.costmodel.layout.trained import TrainedLayouts

        self._take_best()
        record = self._record(self.kwargs) | self.cutting | {"collection": self.data.name}
        trained = TrainedLayouts(self.module.eval(), self.scaling, record)
        if self.folder:
            trained.save(self.folder / MODEL_FILE)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return trained

    def _fingerprint(self) -> str:
        splits = [[(g.name, g.n_nodes, g.n_configs) for g in split] for split in (self.data.train, self.data.valid)]
        text = json.dumps([self.settings.as_dict(), self.cutting, splits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def slate_scores(
    module: LayoutModel, segments: Sequence[Segment], config: npt.NDArray[np.int8], through: int
) -> Tensor:
    """(K,) scores of a whole graph, with gradients through the segment `through` alone, in place of all of them."""
    import torch

    def encoded(segment: Segment) -> Tensor:
        return module.encode(segment, module.tensor(config[:, segment.columns]), len(config))

    live = encoded(segments[through])
    # The same value with a gradient as many times as large.
    pooled = live if len(segments) == 1 else live.detach() + len(segments) * (live - live.detach())
    with torch.no_grad():
        for number, segment in enumerate(segments):
            if number != through:
                pooled = _added(pooled, encoded(segment))
    return module.score(pooled, len(config))


def _added(pooled: Tensor, other: Tensor) -> Tensor:
    import torch

    with torch.enable_grad():
        return pooled + other


def configurations(graph: LayoutGraph, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """(K, nc, 18): rows of the memory-mapped file, in the order asked for."""
    return np.asarray(graph.config_feat[rows])


def spread(count: int, most: int) -> npt.NDArray[np.int64]:
    """At most so many row numbers, drawn once and for all for a graph with `count` of them."""
    return np.sort(np.random.default_rng(count).permutation(count)[:most]).astype(np.int64)
