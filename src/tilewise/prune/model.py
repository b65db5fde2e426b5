"""Magnitude pruning of models (Han et al. 2015): the smallest weights become zero and stay zero during training.

Scope "global" compares the magnitudes of all layers with each other, so layers with small weights lose more; scope
"layer" drops the same fraction of each layer, and scope "row" of each output of a layer. `prune_gradually` fine-tunes
while the sparsity rises (Zhu and Gupta 2017), which loses least; without training, Wanda scores lose less than
magnitudes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn, optim
from tilewise.errors import ConfigurationError, type_name
from tilewise.nn import Module
from tilewise.prune.calibration import input_norms, wanda_scores
from tilewise.prune.masks import Mask, Pattern, checked_sparsity, checked_weights, magnitude_mask, row_mask
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
SCOPES = ("global", "layer", "row")
_RISING_SHARE = 0.6  # of the steps, while the sparsity rises; arbitrary, insensitive between 0.4 and 0.8
_LEVELS = 20  # times the masks change while the sparsity rises; arbitrary, insensitive above 10


@dataclass(frozen=True)
class LayerSparsity:
    """Number of weights and zeros of one layer."""

    name: str
    weights: int
    zeros: int

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0


@dataclass
class Pruning:
    """Masks of a pruned model, with their sparsity, and `apply()` to enforce them after a training step."""

    scope: str
    pattern: str
    masks: dict[str, Mask]
    _weights: dict[str, Any] = field(repr=False)

    def apply(self) -> None:
        """Set the pruned weights to zero again; call it after each optimizer step."""
        with no_grad():
            for name, mask in self.masks.items():
                self._weights[name].mul_(mask.astype(np.float32))

    def hold(self, optimizer: Any) -> None:
        """Make every `optimizer.step()` set the pruned weights to zero again."""
        step = optimizer.step

        def masked_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.apply()
            return result

        optimizer.step = masked_step

    @property
    def layers(self) -> list[LayerSparsity]:
        return [LayerSparsity(n, m.size, int(m.size - np.count_nonzero(m))) for n, m in self.masks.items()]

    @property
    def sparsity(self) -> float:
        """Return the fraction of zeros among the weights of all pruned layers."""
        layers = self.layers
        total = sum(layer.weights for layer in layers)
        return sum(layer.zeros for layer in layers) / total if total else 0.0


def prunable(model: Module) -> dict[str, Any]:
    """Return the weights of linear layers, convolutions and attention, by parameter name."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weights[f"{name}.weight" if name else "weight"] = module.weight
        elif isinstance(module, nn.MultiHeadAttention) and hasattr(module, "in_proj_weight"):
            weights[f"{name}.in_proj_weight" if name else "in_proj_weight"] = module.in_proj_weight
    return weights


def prune(
    model: Module,
    sparsity: float,
    scope: str = "global",
    *,
    pattern: str = "unstructured",
    skip: Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
) -> Module:
    """Return a pruned copy of `model`; its attribute `pruning` has the masks and their sparsity.

    All weights are removed at once; `prune_gradually` trains meanwhile. Layers named in `skip` are not pruned. With
    `calibration`, batches of inputs, weights are compared by Wanda scores within each output, which loses less than
    magnitudes where there is no training.

    >>> from tilewise import models
    >>> round(prune(models.mlp(), 0.7).pruning.sparsity, 2)
    0.7
    """
    if not isinstance(model, Module):
        raise ConfigurationError(f"prune takes an nn.Module, not {type_name(model)}; for arrays use MagnitudePruner")
    checked_sparsity(sparsity)
    out = copy.deepcopy(model)
    _Selection(model, scope, pattern, skip, calibration).prune(out, sparsity)
    return out


class _Selection:
    """Selects the weights of a model to prune, by the settings of `prune`."""

    def __init__(
        self, model: Module, scope: str, pattern: str, skip: Iterable[str], calibration: Iterable[Any] | None
    ) -> None:
        """Check the settings; measure the norms of the inputs if there is calibration data."""
        if scope not in SCOPES:
            raise ConfigurationError(f"scope must be {' or '.join(map(repr, SCOPES))}, not {scope!r}")
        if scope == "global" and pattern != "unstructured":
            scope = "layer"  # groups and blocks are compared within their layer
        if calibration is not None and pattern != "unstructured":
            raise ConfigurationError("Wanda scores prune single weights; leave pattern or calibration out")
        self.pattern, self.skip = Pattern(pattern), frozenset(skip)
        self.norms = None if calibration is None else input_norms(model, calibration)
        self.scope = scope

    def prune(self, model: Any, sparsity: float) -> None:
        """Prune a model in place to this sparsity and set its attribute `pruning`."""
        weights = self._selected(model)
        arrays = {name: checked_weights(w.data) for name, w in weights.items()}
        masks = self._masks(model, arrays, sparsity)
        for name, mask in masks.items():
            if mask.size and not mask.any():
                raise ConfigurationError(
                    f"at {sparsity:.0%} the layer {name.removesuffix('.weight')} would lose every weight; prune less, "
                    'skip it, or use scope="layer"'
                )
        model.pruning = Pruning(self.scope, self.pattern.text, masks, weights)
        model.pruning.apply()

    def _selected(self, model: Module) -> dict[str, Any]:
        """Return the weights to prune; ConfigurationError if `skip` names a layer that does not exist."""
        weights = prunable(model)
        unknown = {name for name in self.skip if f"{name}.weight" not in weights and name not in weights}
        if unknown:
            raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to skip")
        skip = self.skip
        weights = {n: w for n, w in weights.items() if n not in skip and n.removesuffix(".weight") not in skip}
        if not weights:
            raise ConfigurationError("the model has no linear or convolution layer to prune")
        return weights

    def _masks(self, model: Module, arrays: dict[str, Array], sparsity: float) -> dict[str, Mask]:
        """Return each weight's mask from magnitudes or Wanda scores, compared over the model or per layer."""
        if self.pattern.text != "unstructured":
            return {n: self.pattern.mask(w, sparsity) if w.size else np.ones(w.shape, bool) for n, w in arrays.items()}
        scores = {name: np.abs(w) for name, w in arrays.items()}
        if self.norms is not None:
            modules = dict(model.named_modules())
            for name, w in arrays.items():
                groups = getattr(modules.get(name.removesuffix(".weight")), "groups", 1)
                scores[name] = wanda_scores(w, self.norms[name], groups)
        if self.scope == "global":
            return _global_masks(scores, sparsity)
        mask = magnitude_mask if self.scope == "layer" else row_mask
        return {name: mask(values, sparsity) if values.size else values > 0 for name, values in scores.items()}


def _global_masks(scores: dict[str, Array], sparsity: float) -> dict[str, Mask]:
    """Drop the fraction `sparsity` of the smallest scores over all layers; return a mask per layer."""
    combined = magnitude_mask(np.concatenate([values.reshape(-1) for values in scores.values()]), sparsity)
    masks, offset = {}, 0
    for name, values in scores.items():
        masks[name] = combined[offset : offset + values.size].reshape(values.shape)
        offset += values.size
    return masks


def prune_gradually(
    model: Module,
    sparsity: float,
    loss: Callable[[Module], Tensor],
    *,
    steps: int,
    lr: float = 1e-3,
    scope: str = "global",
    pattern: str = "unstructured",
    skip: Iterable[str] = (),
    progress: Callable[[int, float], None] = lambda *_: None,
) -> Module:
    """Return a pruned copy, fine-tuned while its sparsity rises along a cubic curve (Zhu and Gupta 2017).

    `loss` draws a batch and returns the loss of the model on it; it is called `steps` times. The learning rate falls
    linearly to zero. `progress` receives the number of steps done and the loss.

    >>> from tilewise import data, models
    >>> from tilewise.nn import functional as F
    >>> digits = data.digits().flat()
    >>> loss = lambda model: F.cross_entropy(model(Tensor(digits.x_train[:64])), digits.y_train[:64])
    >>> round(prune_gradually(models.pretrained("mlp"), 0.7, loss, steps=4).pruning.sparsity, 2)
    0.7
    """
    checked_sparsity(sparsity)
    if steps < 1:
        raise ConfigurationError(f"fine-tuning needs at least 1 step, not {steps}")
    selection = _Selection(model, scope, pattern, skip, None)
    out: Any = copy.deepcopy(model)
    optimizer = optim.AdamW(list(out.parameters()), lr=lr, weight_decay=0.0)
    out.train()
    rising = max(1, round(_RISING_SHARE * steps))
    every = max(1, rising // _LEVELS)
    for step in range(steps):
        if step % every == 0 or step == rising:
            # Prune much while many weights are redundant, little near the end.
            selection.prune(out, sparsity * (1 - max(0.0, 1 - (step + every) / rising) ** 3))
        optimizer.lr = lr * (1 - step / steps)
        optimizer.zero_grad()
        value = loss(out)
        value.backward()
        optimizer.step()
        out.pruning.apply()
        progress(step + 1, value.item())
    result: Module = out.eval()
    return result


@dataclass(frozen=True)
class Sensitivity:
    """Accuracy of the model with one layer pruned to each sparsity; `fragile` layers should not be pruned."""

    name: str
    accuracy: dict[float, float]
    fragile: bool


def sensitivity(
    model: Module,
    evaluate: Callable[[Module], float],
    sparsities: Iterable[float] = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    tolerance: float = 0.02,
) -> list[Sensitivity]:
    """Prune one layer at a time to each sparsity and measure the accuracy with `evaluate`.

    A layer is fragile if it loses more than `tolerance` at 70 % sparsity (or the nearest level).
    """
    levels = [checked_sparsity(s) for s in sparsities]
    baseline, reports = evaluate(model), []
    reference_level = min(levels, key=lambda s: abs(s - 0.7))
    names = [name.removesuffix(".weight") for name in prunable(model)]
    for name in names:
        others = [other for other in names if other != name]
        accuracy = {level: evaluate(prune(model, level, "layer", skip=others)) for level in levels}
        reports.append(Sensitivity(name, accuracy, baseline - accuracy[reference_level] > tolerance))
    return reports
