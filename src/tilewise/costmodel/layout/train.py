"""Trains layout models in bounded memory: on a sample of the configurations, with gradients through one segment.

A step samples a few graphs, K configurations of each, and one segment of each through which gradients flow. The other
segments are encoded one by one without a backward pass, so that the loss depends on the whole graph while the memory is
that of one segment. The gradient of the sampled segment is multiplied by the number of segments, which makes it an
unbiased estimate of the gradient of all of them (Cao et al. 2023, "Large Graph Property Prediction via Graph
GraphSegment Training").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.layout.graph import LayoutDataset, LayoutGraph
from tilewise.costmodel.layout.segments import GraphSegment, Scaling, split_graph
from tilewise.costmodel.models.files import MODEL_FILE
from tilewise.costmodel.training.config import TrainSettings, default_settings
from tilewise.costmodel.training.loop import METRICS, keep_freed_memory, kernel_metrics, nan_mean, resolve_device
from tilewise.costmodel.training.resumable import CHECKPOINT, Report, ResumableRun, print_epoch, silent
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.costmodel.layout.models import LayoutModel
    from tilewise.costmodel.layout.trained import TrainedLayoutModel

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
VALIDATION_CONFIGS = 512  # configurations of a graph that validation scores; more cost time only


def train_layouts(
    data: LayoutDataset,
    model: str = "LayoutMPNN",
    *,
    out_dir: str | Path | None = None,
    segment_nodes: int = 1000,
    hops: int = 3,
    resume: bool = True,
    device: str = "auto",
    progress: bool = True,
    report: Report | None = None,
    **settings: Any,
) -> TrainedLayoutModel:
    """Train ``LayoutMPNN`` or ``LayoutSAGE`` on the train split; Kendall's tau on valid chooses the checkpoint.

    >>> train_layouts(open_layouts("npz/layout/xla/random"), out_dir="runs/layout")  # doctest: +SKIP
    """
    if segment_nodes < 1 or hops < 0:
        raise ConfigurationError("segment_nodes must be at least 1, and hops must not be negative.")
    for split in ("train", "valid"):
        if not data.split(split) or not all(graph.labelled for graph in data.split(split)):
            raise ConfigurationError("Training needs train and valid splits with runtimes; this collection lacks one.")
    explicit = {name: value for name, value in settings.items() if value is not None}
    run_settings = default_settings(model, **(DEFAULTS | explicit))
    folder = Path(out_dir).expanduser() if out_dir else None
    split_settings = {"segment_nodes": segment_nodes, "hops": hops}
    run = _LayoutRun(data, run_settings, split_settings, resolve_device(device), folder)
    if resume:
        run.resume(progress)
    run.learn(report or (print_epoch if progress else silent))
    return run.finish()


class _LayoutRun(ResumableRun):
    """Resumable training of one layout model."""

    module: LayoutModel

    def __init__(
        self,
        data: LayoutDataset,
        settings: TrainSettings,
        split_settings: dict[str, int],
        device: str,
        folder: Path | None,
    ) -> None:
        """Fit the scaling and build the model with the seed's initial weights."""
        import torch

        from tilewise.costmodel.layout.trained import build_layout_model
        from tilewise.costmodel.training.losses import parse_losses

        super().__init__(settings, device, folder)
        keep_freed_memory()
        self.data, self.loss, self.split_settings = data, parse_losses(settings.losses), split_settings
        self.scaling = Scaling.fit(data.train)
        # The initial weights depend on the seed alone, and the caller's generator is not touched.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            module, self.kwargs = build_layout_model(settings.model, self.scaling.width, settings.model_kwargs)
        self.module = module.to(device)
        self._create_optimizer()

    def _segments(self, graph: LayoutGraph) -> list[GraphSegment]:
        """Divide a graph into segments; recomputed at each use, which is cheaper than storing them."""
        return split_graph(graph, self.scaling, **self.split_settings)

    def _train_epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        """Train one epoch; return its mean loss and ordered-pair accuracy."""
        self.module.train()
        settings = self.settings
        steps_per_pass = -(-len(self.data.train) // settings.batch)
        passes = settings.passes(steps_per_pass)
        # The order depends on seed and epoch alone, so that a resumed run continues as if it had not stopped.
        rng = np.random.default_rng([settings.seed, epoch])
        order = np.concatenate([rng.permutation(len(self.data.train)) for _ in range(passes)])
        losses, accuracies = [], []
        for start in range(0, len(order), settings.batch):
            share = settings.share_done(epoch + start / len(order), self._elapsed_seconds(started))
            if share >= 1 and start:
                break  # out of time within an epoch
            self.optimizer.learning_rate = settings.learning_rate_at(share)
            self.optimizer.zero_grad()
            batch = order[start : start + settings.batch].tolist()
            # The graphs of a batch run one by one: a step needs the memory of its largest graph only.
            for index in batch:
                loss, accuracy = self._learn(index, rng, 1 / len(batch))
                losses.append(loss)
                accuracies.append(accuracy)
            self.optimizer.step()
            self._update_average()
        if not np.isfinite(losses).all():
            raise ConfigurationError(f"Training diverged in epoch {epoch}; use a lower learning rate.")
        return {"epoch": epoch, "train_loss": float(np.mean(losses)), "train_opa": nan_mean(accuracies)}

    def _learn(self, index: int, rng: np.random.Generator, weight: float) -> tuple[float, float]:
        """Add the gradient of one graph's sampled configurations, times `weight`.

        Return (loss, ordered pair accuracy).
        """
        import torch

        from tilewise.costmodel.metrics import opa

        # Sample configurations without replacement, and one segment for the gradient.
        graph = self.data.train[index]
        segments = self._segments(graph)
        rows = rng.choice(graph.n_configs, min(self.settings.configs, graph.n_configs), replace=False)
        gradient_segment = int(rng.integers(len(segments)))
        target = graph.target(rows)
        scores = sample_scores(self.module, segments, graph.config_feat[rows], gradient_segment)
        loss = self.loss(scores[None], torch.from_numpy(target)[None].to(scores), torch.ones(1, len(rows)).bool())
        torch.autograd.backward(loss * weight)
        return float(loss.detach()), opa(target, scores.detach().cpu().numpy())

    def _validation_metrics(self) -> dict[str, float]:
        """Compute the metrics on the valid split."""
        from tilewise.costmodel.layout.trained import score_graph

        self.module.eval()
        rows = []
        for graph in self.data.valid:
            sample = fixed_sample(graph.n_configs, VALIDATION_CONFIGS)
            scores = score_graph(self.module, graph, self._segments(graph), sample)
            rows.append(kernel_metrics(graph.target(sample), scores))
        return {f"val_{key}": nan_mean([row[key] for row in rows]) for key in METRICS}

    def finish(self) -> TrainedLayoutModel:
        """Return the model with the best validation metric, and save it if there is a folder."""
        from tilewise.costmodel.layout.trained import TrainedLayoutModel

        self._load_best()
        record = self._record(self.kwargs) | self.split_settings | {"collection": self.data.name}
        trained = TrainedLayoutModel(self.module.eval(), self.scaling, record)
        if self.folder:
            # The checkpoint is removed after the model is on disk.
            trained.save(self.folder / MODEL_FILE)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return trained

    def _fingerprint(self) -> str:
        """Hash settings and data, to recognize the checkpoint of the same run."""
        splits = [[(g.name, g.n_nodes, g.n_configs) for g in split] for split in (self.data.train, self.data.valid)]
        # A checkpoint is resumed only by a run with the same settings and data.
        text = json.dumps([self.settings.as_dict(), self.split_settings, splits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def sample_scores(
    module: LayoutModel, segments: Sequence[GraphSegment], config: npt.NDArray[np.int8], gradient_segment: int
) -> Tensor:
    """Score K configurations of a whole graph, with gradients through one segment only: (K,).

    The gradient through segment `gradient_segment` is multiplied by the number of segments, which makes it an unbiased
    estimate and bounds the memory of training.
    """
    import torch

    def encode(segment: GraphSegment) -> Tensor:
        return module.encode(segment, module.tensor(config[:, segment.columns]))

    encoding = encode(segments[gradient_segment])
    # The value stays the same; the gradient is multiplied by the number of segments.
    pooled = encoding
    if len(segments) > 1:
        pooled = encoding.detach() + len(segments) * (encoding - encoding.detach())
    for number, segment in enumerate(segments):
        if number != gradient_segment:
            with torch.no_grad():
                other = encode(segment)
            pooled = pooled + other
    return module.score(pooled)


def fixed_sample(count: int, size: int) -> npt.NDArray[np.int64]:
    """Sample at most `size` row numbers out of `count`, the same ones at every call."""
    return np.sort(np.random.default_rng(count).permutation(count)[:size]).astype(np.int64)
