"""Training of tile rankers: batches of kernels with sampled configurations and a ranking loss.

A run is reproducible by its seed, can be resumed after a kill, and returns the weights that were best on the valid
split (see `resumable`).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.costmodel.data.dataset import Dataset, Split
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.features.inputs import Preparation
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.features.ranker_fit import check_configs_differ, prior
from tilewise.costmodel.metrics import kendall_tau, opa, top_k_error
from tilewise.costmodel.models.files import MODEL_FILE
from tilewise.costmodel.models.trained import TrainedModel, load_model
from tilewise.costmodel.training.config import TrainSettings, budget, default_settings
from tilewise.costmodel.training.parallel import torchrun_group
from tilewise.costmodel.training.resumable import CHECKPOINT, Report, ResumableRun, print_epoch, silent
from tilewise.costmodel.training.sampling import InputCache, epoch_batches, prepared_inputs
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tilewise.costmodel.models.gbdt import GBDT
    from tilewise.costmodel.models.torch.ragged import KernelBatch
    from tilewise.costmodel.training.device_epochs import DeviceEpochs

METRICS = ("opa", "tau", "top1", "top5", "top10")
_OPA_SLOTS = 32  # configurations per kernel in the training accuracy, which compares all pairs
_MIN_NESTED_KERNELS = 30  # valid kernels from which on a third of them is kept for confidences
_LOSS_CONFIGS = 512  # configurations per kernel in the validation loss, to bound its time


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

    With `out_dir`, the model, its learning curve and a checkpoint to resume from are written there; a run with the same
    settings and data that is interrupted is continued, and one that is finished is not repeated. Under torchrun the
    processes share the kernels of every step and take the same steps as a single process (`parallel.py`).

    >>> model = train(load_dataset("h200"), "TileRanker", seed=1)  # doctest: +SKIP
    """
    if isinstance(model, TrainSettings):
        chosen_settings = model
    else:
        explicit = {name: value for name, value in settings.items() if value not in (None, {})}
        has_estimate = dataset.schema.config_features == TILE_FEATURES
        chosen_settings = default_settings(model, **(budget(model, len(dataset.train), has_estimate) | explicit))
    folder = Path(out_dir).expanduser() if out_dir else None
    if resume and folder and (finished := _finished_model(folder, run_fingerprint(dataset, chosen_settings))):
        if progress:
            print(f"{folder} holds the finished model of this run", file=sys.stderr)
        return finished
    if chosen_settings.model == "GBDT":
        return _train_trees(dataset, chosen_settings, folder)
    if not dataset.train.labelled or not dataset.valid.labelled:
        raise ConfigurationError("Training needs train and valid splits with runtimes; this collection lacks one.")
    run = TrainingRun(dataset, chosen_settings, resolve_device(device), folder)
    if device == "auto" and run.device_epochs is not None:
        run = _faster_run(run, progress)
    if resume:
        run.resume(progress)
    run.learn(report or (print_epoch if progress and run.writes else silent))
    return run.finish()


def run_fingerprint(dataset: Dataset, settings: TrainSettings) -> str:
    """Hash settings, columns, and the kernels with their runtimes, to recognize a run that can be resumed."""
    splits = [[split.names, split.offsets("configs").tolist()] for split in (dataset.train, dataset.valid)]
    text = json.dumps([settings.as_dict(), dataset.schema.config_features, splits], sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for split in (dataset.train, dataset.valid):
        digest.update(np.ascontiguousarray(split.column("runtime")).data)
    return digest.hexdigest()


def _finished_model(folder: Path, fingerprint: str) -> TrainedModel | GBDT | None:
    """Return the model in `folder` if a finished run with this fingerprint wrote it, else None."""
    try:
        model: Any = load_model(folder)
    except TilewiseError:
        return None
    trained: TrainedModel | GBDT | None = model if model.record.get("fingerprint") == fingerprint else None
    return trained


def _faster_run(run: TrainingRun, progress: bool) -> TrainingRun:
    """Time a few steps on the GPU and the CPU; return a new run on the faster of them."""
    other = TrainingRun(run.dataset, run.settings, "cpu", run.folder)
    gpu, cpu = run.seconds_per_step(), other.seconds_per_step()
    device = run.device if gpu <= cpu else "cpu"
    if progress:
        print(f"training on {device}: a step takes {1e3 * gpu:.2f} ms on the GPU, {1e3 * cpu:.2f} ms on the CPU",
              file=sys.stderr)  # fmt: skip
    return TrainingRun(run.dataset, run.settings, device, run.folder)


def _train_trees(dataset: Dataset, settings: TrainSettings, folder: Path | None) -> GBDT:
    """Train GBDT and save it if there is a folder."""
    from tilewise.costmodel.models.gbdt import train_gbdt

    started = time.perf_counter()
    trees = train_gbdt(dataset, settings.seed, max_seconds=settings.max_seconds, **settings.model_kwargs)
    trees.record["seconds"] = time.perf_counter() - started
    trees.record["fingerprint"] = run_fingerprint(dataset, settings)
    if folder:
        trees.save(folder / MODEL_FILE)
    return trees


class TrainingRun(ResumableRun):
    """Training run of a torch model on a collection of tiles."""

    step_limit: int | None = None  # steps of an epoch, where only their time is of interest

    def __init__(
        self,
        dataset: Dataset,
        settings: TrainSettings,
        device: str,
        folder: Path | None,
    ) -> None:
        """Fit the feature preparation, build the seeded model, and prepare the train and valid splits."""
        import torch

        from tilewise.costmodel.models.torch import build_model, constructor_defaults, model_class
        from tilewise.costmodel.training.losses import parse_losses

        keep_freed_memory()
        super().__init__(settings, device, folder)
        self.dataset = dataset
        self.loss = parse_losses(settings.losses)
        self.processes = torchrun_group(device, settings.max_seconds)
        self.writes = self.processes is None or self.processes.first
        kind = getattr(model_class(settings.model), "preparation", "minmax")
        self.inputs = prepared_inputs(dataset.train, kind)
        self.preparation: Preparation = self.inputs.preparation
        # Defaults are recorded too, so that a file builds the same model after a default has changed.
        self.kwargs = constructor_defaults(model_class(settings.model)) | dict(settings.model_kwargs)
        check_configs_differ(self.preparation)
        if hasattr(self.preparation, "global_width"):
            self.kwargs["global_width"] = self.preparation.global_width
        if isinstance(self.preparation, RankerFeatures) and settings.model == "TileRanker":
            self.kwargs["prior_column"], self.kwargs["prior_weight"] = prior(self.preparation)
        with torch.random.fork_rng(devices=[]):
            # Initial weights depend on the seed alone, and the caller's generator is left untouched.
            torch.manual_seed(settings.seed)
            module = build_model(
                settings.model, self.preparation.node_width, self.preparation.config_width, self.kwargs
            )
        self.module: nn.Module = module.to(device)
        self.penalty: Any = getattr(module, "penalty", None)
        self._create_optimizer()
        selection, self.calibration_kernels = nested_kernels(dataset.valid, settings)
        self.validation = InputCache(selection, self.preparation)

    @cached_property
    def device_epochs(self) -> DeviceEpochs | None:
        """Return the trainer of whole epochs on the GPU; None if batches must be built on the host."""
        if not self.device.startswith("cuda") or self.processes is not None or self.settings.model != "TileRanker":
            return None
        from tilewise.costmodel.training.device_epochs import DeviceEpochs, DeviceSplit

        width = self.preparation.config_width
        fits = all(DeviceSplit.fits(cache, width) for cache in (self.inputs, self.validation))
        return DeviceEpochs(self) if fits and self.loss.has_tensor_form else None

    def _train_device_epoch(self, steps: DeviceEpochs, epoch: int, started: float) -> dict[str, float]:
        """Train one epoch on the GPU; results are read only at its end."""
        import torch

        settings, count = self.settings, 0
        batches = -(-len(self.inputs) // len(steps.kernels))
        passes = settings.passes(batches)
        self.module.train()
        torch.manual_seed(settings.seed * 1_000_003 + epoch)
        total = torch.zeros((), device=self.device)
        for number in range(passes):
            for _ in steps.epoch(settings.seed, epoch * passes + number):
                share = settings.share_done(epoch + count / (batches * passes), self._elapsed_seconds(started))
                if (share >= 1 and count) or count == self.step_limit:
                    break
                self.optimizer.learning_rate = settings.learning_rate_at(share)
                count += 1
            total += steps.total_loss
        # The only read from the device in an epoch: it waits for all steps.
        mean = float(total) / max(count, 1)
        if not np.isfinite(mean):
            raise ConfigurationError(f"Training diverged in epoch {epoch}; use a lower learning rate.")
        return {"epoch": epoch, "train_loss": mean, "train_opa": float("nan")}

    def seconds_per_step(self, steps: int = 24) -> float:
        """Return the time of a training step, averaged over `steps`; the run is spoilt by them."""
        self.step_limit = steps
        # The first time is a warm-up: it fills caches, and a GPU captures its step.
        for _ in range(2):
            started = time.perf_counter()
            self._train_epoch(0)
            seconds = time.perf_counter() - started
        batches = -(-len(self.inputs) // self.settings.batch)
        return seconds / min(steps, batches * self.settings.passes(batches))

    def _train_epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        """Train for one epoch; return its mean loss and ordered pair accuracy by name."""
        if self.device_epochs is not None:
            return self._train_device_epoch(self.device_epochs, epoch, started)
        import torch

        from tilewise.costmodel.models.torch.fused import kernel_threads
        from tilewise.costmodel.models.torch.ragged import collate

        self.module.train()
        settings, optimizer = self.settings, self.optimizer
        batches_per_pass = -(-len(self.inputs) // settings.batch)
        passes = settings.passes(batches_per_pass)
        total, accuracies, batches = 0.0, [], batches_per_pass * passes
        with torch.random.fork_rng(devices=[]), kernel_threads(self.module, self.device):
            # Dropout is a function of seed and epoch, so that a resumed run repeats it; the factor is a prime.
            torch.manual_seed(settings.seed * 1_000_003 + epoch)
            drawn_batches = chain.from_iterable(
                epoch_batches(
                    self.inputs,
                    settings.batch,
                    settings.configs,
                    seed=settings.seed,
                    epoch=epoch * passes + number,
                    fastest=settings.fastest,
                )
                for number in range(passes)
            )
            for number, (inputs, targets) in enumerate(drawn_batches):
                batch = collate(inputs, targets, self.device)
                # The learning rate follows the share of the run that is finished.
                share = settings.share_done(epoch + number / batches, self._elapsed_seconds(started))
                if (share >= 1 and number) or number == self.step_limit:
                    batches = number  # the time limit ended the epoch early
                    break
                optimizer.learning_rate = settings.learning_rate_at(share)
                optimizer.zero_grad()
                loss, scores = self._learn(batch, inputs, targets)
                optimizer.step()
                self._update_average()
                total += loss
                accuracies.append(_batch_opa(scores, batch.target, batch.mask))
        # A diverged run cannot recover: its weights are NaN.
        if not np.isfinite(total):
            raise ConfigurationError(f"Training diverged in epoch {epoch}; use a lower learning rate.")
        return {"epoch": epoch, "train_loss": total / batches, "train_opa": nan_mean(accuracies)}

    def _learn(self, batch: KernelBatch, inputs: Any, targets: Any) -> tuple[float, torch.Tensor]:
        """Add the gradients of a batch's loss and penalty to the parameters'; return (loss, scores)."""
        import torch

        # A model with compiled kernels may compute loss and gradients without autograd.
        learn: Any = getattr(self.module, "learn", None)
        compiled = learn is not None and self.device == "cpu" and getattr(self.module, "compiled", False)
        if compiled and self.processes is None:
            total, scores = learn(batch, self.loss)
            return total, scores
        if self.processes is None:
            scores = self._scores(batch)
        else:
            scores = self.processes.scores(self._scores, inputs, targets, batch)
        loss = self._loss(scores, batch.target, batch.mask)
        # Of several processes only the first adds the penalty.
        if self.penalty is not None and self.writes:
            loss = loss + self.penalty(batch)
        torch.autograd.backward(loss)
        if self.processes is not None:
            self.processes.sum_gradients(self.optimizer.grads)
        return float(loss.detach()), scores.detach()

    def _scores(self, batch: KernelBatch) -> torch.Tensor:
        """Run the forward pass, in bfloat16 on a GPU."""
        import torch

        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            scores: torch.Tensor = self.module(batch)
        return scores

    def _loss(self, scores: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the loss of scores (K, C); ensemble members of scores (K, members, C) count as more kernels."""
        # Treat members as more kernels with the same targets.
        if scores.dim() == 3:
            members = scores.shape[1]
            target, mask = target.repeat_interleave(members, 0), mask.repeat_interleave(members, 0)
            scores = scores.flatten(0, 1)
        return self.loss(scores, target, mask)

    def _validation_metrics(self) -> dict[str, float]:
        """Return the mean metrics over the validation kernels, and the loss on their first configurations."""
        import torch

        from tilewise.costmodel.models.torch import score_inputs

        self.module.eval()
        rows, losses = [], []
        together = self.device_epochs.validation_scores() if self.device_epochs is not None else None
        for index in range(len(self.validation)):
            target = self.validation.target(index)
            inputs = self.validation.inputs
            scores = together[index] if together else score_inputs(self.module, inputs(index), self.device)
            rows.append(kernel_metrics(target, scores))
            loss_scores = torch.from_numpy(scores[:_LOSS_CONFIGS])[None]
            loss_target = torch.from_numpy(target[:_LOSS_CONFIGS].astype(np.float32))[None]
            losses.append(float(self.loss(loss_scores, loss_target, torch.ones_like(loss_scores, dtype=torch.bool))))
        means = {f"val_{key}": nan_mean([row[key] for row in rows]) for key in METRICS}
        return means | {"val_loss": float(np.mean(losses))}

    def finish(self) -> TrainedModel:
        """Build the trained model from the best weights, calibrate it, save it and delete the checkpoint."""
        from tilewise.costmodel.confidence_fit import calibrate

        self._load_best()
        # The record holds everything needed to rebuild and to judge the model.
        record = self._record(self.kwargs)
        record["settings"] |= {"model_kwargs": self.kwargs}
        record["fingerprint"] = self._fingerprint()
        record["trained_on"] = {"kernels": len(self.dataset.train), "configs": self.dataset.train.n_configs}
        trained = TrainedModel(self.module.eval(), self.preparation, self.dataset.schema, record, self.device)
        record["calibration"] = calibrate(trained, self.calibration_kernels)
        if self.folder and self.writes:
            trained.save(self.folder / MODEL_FILE)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return trained

    def _fingerprint(self) -> str:
        return run_fingerprint(self.dataset, self.settings)


def kernel_metrics(target: Any, scores: Any) -> dict[str, float]:
    """Return every metric of one kernel by name, from targets and scores (C,)."""
    return {
        "opa": opa(target, scores),
        "tau": kendall_tau(target, scores),
        **{f"top{k}": top_k_error(target, scores, k) for k in (1, 5, 10)},
    }


def nan_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none (without NumPy's warning)."""
    numbers = [value for value in values if not np.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")


def _batch_opa(scores: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the ordered pair accuracy of a batch, on the first configurations of every kernel."""
    scores = scores.float().mean(1) if scores.dim() == 3 else scores.float()
    s, t, m = (x[:, :_OPA_SLOTS].cpu().numpy() for x in (scores, target, mask))
    # All pairs (i, j) of real configurations where i is slower.
    slower = (t[:, :, None] > t[:, None]) & m[:, :, None] & m[:, None]
    count = np.count_nonzero(slower)
    return np.count_nonzero(slower & (s[:, :, None] > s[:, None])) / count if count else float("nan")


def nested_kernels(split: Split, settings: TrainSettings) -> tuple[Any, Any]:
    """Split the valid kernels into those that choose the checkpoint and those that confidences are fitted to.

    Confidences fitted to kernels that also chose the checkpoint are too high, so a third is left out of the choice if
    there are enough kernels. The course's models validate on all of them, or on the first `validate_batches` batches.
    """
    if settings.validate_batches >= 0:
        return split[: max(1, settings.validate_batches) * settings.batch], split
    if settings.model != "TileRanker" or len(split) < _MIN_NESTED_KERNELS:
        return split, split
    kernels = list(split)
    return [kernel for i, kernel in enumerate(kernels) if i % 3 != 2], kernels[2::3]


def resolve_device(name: str) -> str:
    """Return the device for a name; "auto" is a GPU if there is one."""
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
    """Make the C library keep freed blocks of megabytes for reuse, instead of returning them to the system.

    Returning them costs a page fault per 4 KiB in every training step.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    try:
        # glibc returns blocks above the mmap threshold to the system at once; raise both thresholds.
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 32 << 20)
        library.mallopt(trim_threshold, 512 << 20)
    except (OSError, AttributeError):
        return  # another C library without mallopt: training is slower, nothing else
