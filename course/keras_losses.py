"""The losses of the course in Keras, defined as in PyTorch: list-wise, pair-wise, and the squared error.

A slot without a configuration has the target −1 and counts for nothing. (tf-ranking's own list-wise loss counts it.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tilewise.errors import ConfigurationError

TEMPERATURE = 10.0
PADDING = -1.0


def list_mle(target: tf.Tensor, scores: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Negative log-likelihood of the true order, slowest first; summed over a slate, averaged over kernels."""
    order = tf.argsort(tf.where(real, target, -np.inf), axis=1, direction="DESCENDING", stable=True)
    scores = tf.gather(scores / TEMPERATURE, order, batch_dims=1)
    real = tf.gather(real, order, batch_dims=1)
    shifted = tf.where(real, scores, -1e30)
    tail = tf.math.cumulative_logsumexp(shifted, axis=1, reverse=True)
    return tf.reduce_sum(tf.where(real, tail - scores, 0.0)) / tf.cast(tf.shape(scores)[0], scores.dtype)


def pairwise_hinge(target: tf.Tensor, scores: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Hinge on every pair with different targets, summed, over the number of slots (as tf-ranking reduces it)."""
    scores = scores / TEMPERATURE
    slower = (target[:, :, None] > target[:, None]) & real[:, :, None] & real[:, None]
    hinge = tf.nn.relu(1.0 - (scores[:, :, None] - scores[:, None]))
    return tf.reduce_sum(tf.where(slower, hinge, 0.0)) / tf.reduce_sum(tf.cast(real, scores.dtype))


def squared_error(target: tf.Tensor, scores: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """The mean over real slots of (score − target)²."""
    return tf.reduce_mean(tf.square(tf.boolean_mask(scores - target, real)))


LOSSES = {"ListMLELoss": list_mle, "PairwiseHingeLoss": pairwise_hinge, "MSE": squared_error}


class CombinedLoss(tf.keras.losses.Loss):
    """The weighted mean of losses named by a string such as ``ListMLELoss:1,MSE:0.02``."""

    def __init__(self, losses: str = "ListMLELoss:1", reduction: str | None = None, name: str | None = None) -> None:
        super().__init__()
        parts = [_parse(piece) for piece in losses.split(",")]
        total = sum(weight for weight, _ in parts)
        if not total > 0:
            raise ConfigurationError(f"The weights of the losses {losses!r} must sum to more than zero.")
        self._parts = [(weight / total, loss) for weight, loss in parts]

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.add_n([weight * loss(y_true, y_pred, y_true >= 0) for weight, loss in self._parts])


def _parse(piece: str) -> tuple[float, Callable[..., tf.Tensor]]:
    name, _, number = piece.strip().partition(":")
    if name not in LOSSES:
        raise ConfigurationError(f"There is no loss {name!r}; use {', '.join(LOSSES)}.")
    try:
        weight = float(number or 1)
    except ValueError as error:
        raise ConfigurationError(f"The loss {piece!r} needs a number, as in MSE:0.02.") from error
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"The loss {piece!r} needs a weight of zero or more.")
    return weight, LOSSES[name]
