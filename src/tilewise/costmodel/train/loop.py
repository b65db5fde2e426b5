"""Training the rankers of tiles: batches of kernels with drawn configurations, a loss over each kernel's slate.

A run is repeatable by seed, goes on after a kill, and keeps the weights that were best on the valid split; that part is
in `resumable`, which other trainings share.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.features.scaling import Preparation, check_configs_differ, preparation_kinds
from tilewise.costmodel.metrics import kendall_tau, opa, top_k_error
from tilewise.costmodel.models.trained import MODEL_FILE, TrainedModel
from tilewise.costmodel.train.config import TrainSettings, default_settings
from tilewise.costmodel.train.parallel import ranks_here
from tilewise.costmodel.train.resumable import CHECKPOINT, Report, ResumableRun, print_epoch, silent
from tilewise.costmodel.train.sampling import Features, epoch_batches
from tilewise.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tilewise.costmodel.models.gbdt import GBDT
    from tilewise.costmodel.models.torch.ragged import Batch

METRICS = ("opa", "tau", "top1", "top5", "top10")
_OPA_SLOTS = 32
_LOSS_CONFIGS = 512


def train(
    dataset: Dataset,
    model: str | TrainSettings = "TileRanker",
    *,
    out_dir: str | Path | None = None,
    resume: bool = True,
    device: str = "auto",
    progress: bool = True,
    report: Report | None = None,
    **settings: Any,
) -> TrainedModel | GBDT:
    """Train a model by name on the train split, choosing the checkpoint on the valid split.

    With `out_dir`, the model, its learning curve and a checkpoint to resume from are kept there. Started by torchrun,
    the processes share every step's kernels and take the steps that one would (`parallel.py`).

    >>> model = train(load_dataset("h200"), "TileRanker", seed=1)  # doctest: +SKIP
    """
    chosen = model if isinstance(model, TrainSettings) else default_settings(model, **settings)
    if chosen.model == "GBDT":
        return _train_trees(dataset, chosen, Path(out_dir).expanduser() if out_dir else None)
    if not dataset.train.labelled or not dataset.valid.labelled:
        raise ConfigurationError("Training needs train and valid splits with runtimes; this collection lacks one.")
    run = _Run(dataset, chosen, chosen_device(device), Path(out_dir).expanduser() if out_dir else None)
    if resume:
        run.resume(progress)
    run.learn(report or (print_epoch if progress and run.writes else silent))
    return run.finish()


def _train_trees(dataset: Dataset, settings: TrainSettings, folder: Path | None) -> GBDT:
    from tilewise.costmodel.models.gbdt import train_gbdt

    started = time.perf_counter()
    trees = train_gbdt(dataset, settings.seed, **settings.model_kwargs)
    trees.record["seconds"] = time.perf_counter() - started
    if folder:
        trees.save(folder / MODEL_FILE)
    return trees


class _Run(ResumableRun):
    def __init__(self, dataset: Dataset, settings: TrainSettings, device: str, folder: Path | None) -> None:
        import torch

        from tilewise.costmodel.models.torch import build_model, constructor_defaults, model_class
        from tilewise.costmodel.train.losses import parse_losses

        keep_freed_memory()
        super().__init__(settings, device, folder)
        self.dataset = dataset
        self.loss = parse_losses(settings.losses)
        self.ranks = ranks_here(device, settings.max_seconds)
        self.writes = self.ranks is None or self.ranks.first
        kinds = preparation_kinds()
        self.preparation: Preparation = kinds[getattr(model_class(settings.model), "preparation", "minmax")].fit(
            dataset.train
        )
        # Defaults are recorded too: a file must build the same model after they have changed.
        self.kwargs = constructor_defaults(model_class(settings.model)) | dict(settings.model_kwargs)
        check_configs_differ(self.preparation)
        if hasattr(self.preparation, "global_width"):
            self.kwargs["global_width"] = self.preparation.global_width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            module = build_model(
                settings.model, self.preparation.node_width, self.preparation.config_width, self.kwargs
            )
        self.module: nn.Module = module.to(device)
        self.penalty: Any = getattr(module, "penalty", None)
        self.penalty_gradient: Any = getattr(module, "add_penalty_gradient", None)
        self._begin()
        self.features = Features(dataset.train, self.preparation)
        self.validation = Features(_first(dataset.valid, settings), self.preparation)

    def _epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        import torch

        from tilewise.costmodel.models.torch.fused import kernel_threads
        from tilewise.costmodel.models.torch.ragged import collate

        self.module.train()
        settings, optimizer = self.settings, self.optimizer
        once = -(-len(self.features) // settings.batch)
        passes = settings.passes(once)
        total, ordered, batches = 0.0, [], once * passes
        with torch.random.fork_rng(devices=[]), kernel_threads(self.module, self.device):
            torch.manual_seed(settings.seed * 1_000_003 + epoch)
            draws = chain.from_iterable(
                epoch_batches(self.features, settings.batch, settings.configs, settings.seed, epoch * passes + number)
                for number in range(passes)
            )
            for number, (parts, targets) in enumerate(draws):
                batch = collate(parts, targets, self.device)
                share = settings.share_done(epoch + number / batches, self._seconds_since(started))
                if share >= 1 and number:
                    batches = number  # out of time within an epoch
                    break
                optimizer.learning_rate = settings.learning_rate_at(share)
                optimizer.zero_grad()
                loss, scores = self._learn(batch) if self.ranks is None else self._learn_together(parts, targets, batch)
                optimizer.step()
                self._update_average()
                total += loss
                ordered.append(_slate_opa(scores, batch.target, batch.mask))
        if not np.isfinite(total):
            raise ConfigurationError(f"Training diverged in epoch {epoch}; use a lower learning rate.")
        return {"epoch": epoch, "train_loss": total / batches, "train_opa": mean_of_known(ordered)}

    def _learn(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """Adds a batch's gradients, penalty included, to the optimizer's; gives the loss and the scores."""
        import torch

        learn: Any = getattr(self.module, "learn", None)
        if learn is not None and self.device == "cpu" and getattr(self.module, "compiled", False):
            total, scores = learn(batch, self.loss)
        else:
            scores = self._scores(batch)
            loss = self._loss(scores, batch.target, batch.mask)
            if self.penalty is not None and self.penalty_gradient is None:
                loss = loss + self.penalty(batch)
            torch.autograd.backward(loss)
            total, scores = float(loss.detach()), scores.detach()
        if self.penalty_gradient is not None:
            total += self.penalty_gradient(batch, self.optimizer)
        return total, scores

    def _learn_together(self, parts: Any, targets: Any, batch: Batch) -> tuple[float, torch.Tensor]:
        """The same over several processes; the penalty is one's alone."""
        assert self.ranks is not None
        total, scores = self.ranks.backward(self._scores, self._loss, parts, targets, batch, self.device)
        if self.penalty_gradient is not None and self.ranks.first:
            total += self.penalty_gradient(batch, self.optimizer)
        elif self.penalty is not None and self.penalty_gradient is None and self.ranks.first:
            penalty = self.penalty(batch)
            penalty.backward()
            total += float(penalty.detach())
        self.ranks.add_up(self.optimizer.grads)
        return total, scores

    def _scores(self, batch: Batch) -> torch.Tensor:
        import torch

        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            scores: torch.Tensor = self.module(batch)
        return scores

    def _loss(self, scores: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Members of an ensemble, (K, members, C), each learn by themselves."""
        if scores.dim() == 3:
            members = scores.shape[1]
            target, mask = target.repeat_interleave(members, 0), mask.repeat_interleave(members, 0)
            scores = scores.flatten(0, 1)
        return self.loss(scores, target, mask)

    def _measure(self) -> dict[str, float]:
        import torch

        from tilewise.costmodel.models.torch.predictor import score_inputs

        self.module.eval()
        rows, losses = [], []
        for index in range(len(self.validation)):
            target = self.validation.target(index)
            scores = score_inputs(self.module, self.validation.whole(index), self.device)
            rows.append(kernel_metrics(target, scores))
            few = slice(0, _LOSS_CONFIGS)
            pair = (torch.from_numpy(scores[few])[None], torch.from_numpy(target[few].astype(np.float32))[None])
            losses.append(float(self.loss(*pair, torch.ones_like(pair[0], dtype=torch.bool))))
        means = {f"val_{key}": mean_of_known([row[key] for row in rows]) for key in METRICS}
        return means | {"val_loss": float(np.mean(losses))}

    def finish(self) -> TrainedModel:
        from tilewise.costmodel.confidence import calibrate

        self._take_best()
        record = self._record(self.kwargs)
        record["settings"] |= {"model_kwargs": self.kwargs}
        record["trained_on"] = {"kernels": len(self.dataset.train), "configs": self.dataset.train.n_configs}
        trained = TrainedModel(self.module.eval(), self.preparation, self.dataset.schema, record, self.device)
        record["calibration"] = calibrate(trained, self.dataset.valid)
        if self.folder and self.writes:
            trained.save(self.folder / MODEL_FILE)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return trained

    def _fingerprint(self) -> str:
        """What a checkpoint must share with a run for resuming to make sense."""
        splits = [
            [split.names, split.offsets("configs").tolist()] for split in (self.dataset.train, self.dataset.valid)
        ]
        text = json.dumps([self.settings.as_dict(), self.dataset.schema.config_features, splits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def kernel_metrics(target: Any, scores: Any) -> dict[str, float]:
    """Every metric of one kernel."""
    return {
        "opa": opa(target, scores),
        "tau": kendall_tau(target, scores),
        **{f"top{k}": top_k_error(target, scores, k) for k in (1, 5, 10)},
    }


def mean_of_known(values: Sequence[float]) -> float:
    """The mean of what is not NaN; NaN where nothing is known."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _slate_opa(scores: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> float:
    scores = scores.float().mean(1) if scores.dim() == 3 else scores.float()
    s, t, m = (part[:, :_OPA_SLOTS].cpu().numpy() for part in (scores, target, mask))
    slower = (t[:, :, None] > t[:, None]) & m[:, :, None] & m[:, None]
    count = np.count_nonzero(slower)
    return np.count_nonzero(slower & (s[:, :, None] > s[:, None])) / count if count else float("nan")


def _first(split: Split, settings: TrainSettings) -> Any:
    """All validation kernels, or the first so many batches of them."""
    return split if settings.validate_batches < 0 else split[: max(1, settings.validate_batches) * settings.batch]


def chosen_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name != "auto" and name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigurationError(f"device is cpu, cuda or auto, not {name!r}")
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("Training needs PyTorch: pip install 'tilewise[train]'.") from error
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnavailableError(f"There is no device {name} on this machine; use cpu.")
    return name


def keep_freed_memory() -> None:
    """Let the C library reuse freed blocks of megabytes: giving them back costs a page fault per 4 KiB and step."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    mmap_threshold, trim_threshold = -3, -1
    try:
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 32 << 20)
        library.mallopt(trim_threshold, 512 << 20)
    except (OSError, AttributeError):
        return  # another C library: slower, nothing else
