"""Trains a Keras class of ``models.py`` on tilewise's reader, with the course's losses and files.

Each step reads `batch` kernels with `configs` sampled configurations each as one merged graph; kernels with fewer are
filled up with slots that count for nothing. The weights with the best validation OPA are the ones kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from flags import TrainArgs, new_run, test_predictions, write_run
from keras_graphs import Slate, graph_of, merged_graph, relaxed_spec
from keras_losses import PADDING, CombinedLoss
from keras_runs import build, load_models, save_model

from tilewise.costmodel.course.predictions import padding_note, write_predictions
from tilewise.costmodel.data.dataset import Dataset, Split
from tilewise.costmodel.data.kernel import Kernel, ranking
from tilewise.costmodel.features.scaling import MinMax
from tilewise.costmodel.metrics import opa, top_k_error
from tilewise.errors import ConfigurationError

KS = (1, 5, 10)


class Trainer:
    """One run: data, model, optimizer, and the file it fills."""

    def __init__(self, args: TrainArgs, data: Dataset, seed: int) -> None:
        if not len(data.train) or not len(data.valid):
            raise ConfigurationError("Training needs kernels in the train and in the valid split.")
        tf.keras.utils.set_random_seed(seed)
        self.args, self.data, self.rng = args, data, np.random.default_rng(seed)
        self.scaling = MinMax.fit(data.train)
        self.model = build(load_models(), args.model, args.configs, args.model_kwargs)
        self.loss = CombinedLoss(args.losses)
        self.optimizer = tf.keras.optimizers.Adam(args.learning_rate)
        self.run = new_run(args)
        self.sample, _ = self._batch(data.train, np.arange(min(args.batch_size, len(data.train))))
        self.model(self.sample)
        spec = [relaxed_spec(self.sample), tf.TensorSpec([None, args.configs], tf.float32)]
        self._train = tf.function(self._train_step, input_signature=spec)
        self._validate = tf.function(self._scores_and_loss, input_signature=spec)

    def fit(self) -> dict[str, Any]:
        """Train to the end and leave the run's files; the run file's content is returned."""
        best, best_epoch, best_weights = -1.0, -1, self.model.get_weights()
        curve = self.run["train_curve"]
        for epoch in range(self.args.epochs):
            train_loss, train_opa = self._epoch(self.data.train, self.rng, self._train, shuffled=True)
            val_loss, val_opa = self._epoch(
                self.data.valid, np.random.default_rng(0), self._validate, limit=self.args.validate_batches
            )
            for key, value in zip(curve, (epoch, train_loss, train_opa, val_loss, val_opa), strict=True):
                curve[key].append(value)
            print(
                f"epoch {epoch}: loss {train_loss:.4f}, OPA {train_opa:.4f}, validation OPA {val_opa:.4f}", flush=True
            )
            if val_opa > best:
                best, best_epoch, best_weights = val_opa, epoch, self.model.get_weights()
                self._save()
            elif 0 < self.args.early_stop <= epoch - best_epoch:
                break
        self.model.set_weights(best_weights)
        self._finish()
        self._save()
        return self.run

    def _finish(self) -> None:
        self.run["final_error"]["val"] = self._errors(self.data.valid)
        if self.args.test_mode == "metrics":
            self.run["final_error"]["test"] = self._errors(self.data.test)
        elif len(self.data.test):
            rankings = {kernel.name: ranking(self._scores(kernel)).tolist() for kernel in self.data.test}
            self.run["test_predictions"] = test_predictions(rankings)
            short = write_predictions(Path(self.args.results_csv).expanduser(), rankings, per_kernel=10)
            if note := padding_note(short, 10):
                print(note, flush=True)

    def _errors(self, split: Split) -> dict[str, float]:
        scored = [(kernel.target, self._scores(kernel)) for kernel in split]
        return {str(k): float(np.mean([top_k_error(t, s, k) for t, s in scored])) for k in KS}

    def _scores(self, kernel: Kernel) -> np.ndarray:
        return self.model.forward(graph_of(kernel, self.scaling), kernel.n_configs).numpy()[0]

    def _save(self) -> None:
        save_model(self.model, self.args.model_dir, self.scaling, self.sample)
        write_run(self.args.run_file, self.run)

    def _epoch(
        self, split: Split, rng: np.random.Generator, step: Any, shuffled: bool = False, limit: int = -1
    ) -> tuple[float, float]:
        """Mean loss and OPA over the batches of one pass."""
        losses, accuracies = [], []
        for graph, target in self._batches(split, rng, shuffled, limit):
            scores, loss = step(graph, tf.constant(target))
            losses.append(float(loss))
            for t, s in zip(target, scores.numpy(), strict=True):
                accuracies.append(opa(t[t >= 0], s[t >= 0]))
        return float(np.mean(losses)), float(np.nanmean([*accuracies, np.nan] if accuracies else [0.0]))

    def _batches(self, split: Split, rng: np.random.Generator, shuffled: bool, limit: int) -> Iterator[Any]:
        order = rng.permutation(len(split)) if shuffled else np.arange(len(split))
        size = min(self.args.batch_size, len(self.sample.node_sets["op"].sizes))
        starts = range(0, len(order) - size + 1, size) if len(order) >= size else [0]
        for start in list(starts)[: None if limit < 1 else limit]:
            rows = np.resize(order[start : start + size], size)  # a split smaller than a batch is gone round
            yield self._batch(split, rows, rng)

    def _batch(
        self, split: Split, chosen: np.ndarray, rng: np.random.Generator | None = None
    ) -> tuple[Any, np.ndarray]:
        rng = rng or np.random.default_rng(0)
        slates, target = [], np.full((len(chosen), self.args.configs), PADDING, np.float32)
        for row, index in enumerate(chosen):
            kernel = split[int(index)]
            rows = rng.permutation(kernel.n_configs)[: self.args.configs]
            filled = np.resize(rows, self.args.configs)
            slates.append(Slate(kernel, filled))
            target[row, : len(rows)] = slates[-1].target[: len(rows)]
        return merged_graph(slates, self.scaling), target

    def _train_step(self, graph: Any, target: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            scores = self.model(graph, training=True)
            loss = self.loss(target, scores)
            total = tf.add_n([loss, *self.model.losses])
        variables = self.model.trainable_variables
        gradients = tape.gradient(total, variables)
        clipped = [tf.clip_by_norm(gradient, self.args.clip_norm) for gradient in gradients]
        self.optimizer.apply_gradients(zip(clipped, variables, strict=True))
        return scores, loss

    def _scores_and_loss(self, graph: Any, target: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        scores = self.model(graph)
        return scores, self.loss(target, scores)
