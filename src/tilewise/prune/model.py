"""Magnitude pruning of models (Han et al. 2015): the smallest weights become zero and stay zero during training.

Scope "global" compares the magnitudes of all layers with each other, so layers with small weights lose more; scope
"layer" drops the same fraction of each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError
from tilewise.nn import Module
from tilewise.prune.masks import Mask, Pattern, checked_sparsity, checked_weights, magnitude_mask
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
Train = Callable[[Module], None]


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
        """Make every `optimizer.step()` end with `apply()`."""
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
        """Fraction of zeros among the weights of all pruned layers."""
        layers = self.layers
        total = sum(layer.weights for layer in layers)
        return sum(layer.zeros for layer in layers) / total if total else 0.0


def prunable(model: Module) -> dict[str, Any]:
    """Collect the weights of linear and convolution layers by name."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weights[f"{name}.weight" if name else "weight"] = module.weight
    return weights


def prune(
    model: Module,
    sparsity: float,
    scope: str = "global",
    *,
    pattern: str = "unstructured",
    schedule: Iterable[float] | int | None = None,
    train: Train | None = None,
    skip: Iterable[str] = (),
) -> Module:
    """Return a pruned copy of `model`; its attribute `pruning` has the masks and their sparsity.

    Pruning is one-shot by default. It is gradual with `train`, a function that trains a model for one round, and
    `schedule`: the sparsity of each round, or the number of rounds, in which the sparsity rises along a cubic curve
    (Zhu and Gupta 2017). Layers named in `skip` are not pruned.

    >>> from tilewise import models
    >>> round(prune(models.mlp(), 0.7).pruning.sparsity, 2)
    0.7
    """
    checked_sparsity(sparsity)
    if scope not in ("global", "layer"):
        raise ConfigurationError(f'scope must be "global" or "layer", not {scope!r}')
    if scope == "global" and pattern != "unstructured":
        scope = "layer"  # groups and blocks are compared within their layer
    out: Any = copy.deepcopy(model)
    for level in _levels(sparsity, schedule, train):
        _prune_once(out, level, scope, Pattern(pattern), frozenset(skip))
        if train is not None:
            train(out)
            out.pruning.apply()
    result: Module = out
    return result


def _levels(sparsity: float, schedule: Iterable[float] | int | None, train: Train | None) -> list[float]:
    """List the sparsity after each round of gradual pruning."""
    if schedule is None:
        return [sparsity]
    if train is None:
        raise ConfigurationError("a schedule needs `train`, a function that trains the model between its rounds")
    if isinstance(schedule, int):
        if schedule < 1:
            raise ConfigurationError(f"a schedule needs at least 1 round, not {schedule}")
        # Cubic schedule: prune much while many weights are redundant, little near the end.
        return [sparsity * (1 - (1 - (i + 1) / schedule) ** 3) for i in range(schedule)]
    levels = [checked_sparsity(level) for level in schedule]
    if not levels or levels != sorted(levels) or levels[-1] != sparsity:
        raise ConfigurationError(f"a schedule must rise to the requested sparsity, {sparsity}")
    return levels


def _prune_once(model: Any, sparsity: float, scope: str, pattern: Pattern, skip: frozenset[str]) -> None:
    """Prune a model in place to one sparsity and set its attribute `pruning`."""
    weights = prunable(model)
    unknown = {name for name in skip if f"{name}.weight" not in weights and name not in weights}
    if unknown:
        raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to skip")
    weights = {n: w for n, w in weights.items() if n not in skip and n.removesuffix(".weight") not in skip}
    if not weights:
        raise ConfigurationError("the model has no linear or convolution layer to prune")
    arrays = {name: checked_weights(w.data) for name, w in weights.items()}
    masks = _global_masks(arrays, sparsity) if scope == "global" else _layer_masks(arrays, sparsity, pattern)
    for name, mask in masks.items():
        if mask.size and not mask.any():
            raise ConfigurationError(
                f"at {sparsity:.0%} the layer {name.removesuffix('.weight')} would lose every weight; prune less, skip "
                'it, or use scope="layer"'
            )
    model.pruning = Pruning(scope, pattern.text, masks, weights)
    model.pruning.apply()


def _layer_masks(arrays: dict[str, Array], sparsity: float, pattern: Pattern) -> dict[str, Mask]:
    return {name: pattern.mask(w, sparsity) if w.size else np.ones(w.shape, bool) for name, w in arrays.items()}


def _global_masks(arrays: dict[str, Array], sparsity: float) -> dict[str, Mask]:
    """Compute one mask over the magnitudes of all layers and split it by layer."""
    combined = magnitude_mask(np.concatenate([np.abs(w).reshape(-1) for w in arrays.values()]), sparsity)
    masks, offset = {}, 0
    for name, w in arrays.items():
        masks[name] = combined[offset : offset + w.size].reshape(w.shape)
        offset += w.size
    return masks


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
    """Prune one layer at a time and measure the accuracy.

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
