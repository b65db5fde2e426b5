"""`prune(model, sparsity)`: a copy of a model whose smallest weights are zero, and stay zero through training.

Scope "global" compares the magnitudes of all layers with each other as they are, so layers with small weights lose
more; scope "layer" drops the same share everywhere.
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
    name: str
    weights: int
    zeros: int

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0


@dataclass
class Pruning:
    """The masks of a pruned model: what they reached, and `apply()` to hold them after a training step."""

    scope: str
    pattern: str
    masks: dict[str, Mask]
    _weights: dict[str, Any] = field(repr=False)

    def apply(self) -> None:
        """Set the dropped weights to zero again; call it after each optimizer step."""
        with no_grad():
            for name, mask in self.masks.items():
                self._weights[name].mul_(mask.astype(np.float32))

    def hold(self, optimizer: Any) -> None:
        """Have every `optimizer.step()` end with `apply()`."""
        step = optimizer.step

        def held(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.apply()
            return result

        optimizer.step = held

    @property
    def layers(self) -> list[LayerSparsity]:
        return [LayerSparsity(n, m.size, int(m.size - np.count_nonzero(m))) for n, m in self.masks.items()]

    @property
    def sparsity(self) -> float:
        """The share of weights, over all pruned layers, that is zero."""
        layers = self.layers
        total = sum(layer.weights for layer in layers)
        return sum(layer.zeros for layer in layers) / total if total else 0.0


def prunable(model: Module) -> dict[str, Any]:
    """The weights that pruning may touch: of linear and convolution layers, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            found[f"{name}.weight" if name else "weight"] = module.weight
    return found


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
    """A pruned copy of `model`; its masks and what they reached are in `.pruning`.

    One shot by default. With `schedule`, a number of rounds (sparsity then rises along a cubic curve) or the sparsities
    themselves, and `train`, a function that trains a model for one round, pruning is gradual: prune a little, train,
    prune more. `skip` names layers to leave alone.

    >>> from tilewise import models
    >>> round(prune(models.mlp(), 0.7).pruning.sparsity, 2)
    0.7
    """
    checked_sparsity(sparsity)
    if scope not in ("global", "layer"):
        raise ConfigurationError(f'scope is "global" or "layer", not {scope!r}')
    if scope == "global" and pattern != "unstructured":
        scope = "layer"  # groups and blocks are compared within their layer
    out: Any = copy.deepcopy(model)
    for level in _levels(sparsity, schedule, train):
        _prune_once(out, level, scope, Pattern(pattern), frozenset(skip))
        if train is not None:
            train(out)
            out.pruning.apply()
    pruned: Module = out
    return pruned


def _levels(sparsity: float, schedule: Iterable[float] | int | None, train: Train | None) -> list[float]:
    if schedule is None:
        return [sparsity]
    if train is None:
        raise ConfigurationError("a schedule needs `train`, a function that trains the model between its rounds")
    if isinstance(schedule, int):
        if schedule < 1:
            raise ConfigurationError(f"a schedule has 1 or more rounds, not {schedule}")
        return [sparsity * (1 - (1 - (i + 1) / schedule) ** 3) for i in range(schedule)]
    levels = [checked_sparsity(level) for level in schedule]
    if not levels or levels != sorted(levels) or levels[-1] != sparsity:
        raise ConfigurationError(f"a schedule rises to the sparsity asked for, {sparsity}")
    return levels


def _prune_once(model: Any, sparsity: float, scope: str, pattern: Pattern, skip: frozenset[str]) -> None:
    weights = prunable(model)
    unknown = {name for name in skip if f"{name}.weight" not in weights and name not in weights}
    if unknown:
        raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to skip")
    chosen = {n: w for n, w in weights.items() if n not in skip and n.removesuffix(".weight") not in skip}
    if not chosen:
        raise ConfigurationError("the model has no linear or convolution layer to prune")
    arrays = {name: checked_weights(w.data) for name, w in chosen.items()}
    masks = _global_masks(arrays, sparsity) if scope == "global" else _layer_masks(arrays, sparsity, pattern)
    for name, mask in masks.items():
        if mask.size and not mask.any():
            raise ConfigurationError(
                f"at {sparsity:.0%} the layer {name.removesuffix('.weight')} would lose every weight; prune less, skip "
                'it, or use scope="layer"'
            )
    model.pruning = Pruning(scope, pattern.text, masks, chosen)
    model.pruning.apply()


def _layer_masks(arrays: dict[str, Array], sparsity: float, pattern: Pattern) -> dict[str, Mask]:
    return {name: pattern.mask(w, sparsity) if w.size else np.ones(w.shape, bool) for name, w in arrays.items()}


def _global_masks(arrays: dict[str, Array], sparsity: float) -> dict[str, Mask]:
    everything = magnitude_mask(np.concatenate([np.abs(w).reshape(-1) for w in arrays.values()]), sparsity)
    masks, at = {}, 0
    for name, w in arrays.items():
        masks[name] = everything[at : at + w.size].reshape(w.shape)
        at += w.size
    return masks


@dataclass(frozen=True)
class Sensitivity:
    """Accuracy of a layer alone pruned to each sparsity, and whether it should be left alone."""

    name: str
    accuracy: dict[float, float]
    fragile: bool


def sensitivity(
    model: Module,
    evaluate: Callable[[Module], float],
    sparsities: Iterable[float] = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    tolerance: float = 0.02,
) -> list[Sensitivity]:
    """Prune one layer at a time; `fragile` are those that cost more than `tolerance` at 70 % (or the nearest level)."""
    levels = [checked_sparsity(s) for s in sparsities]
    baseline, reports = evaluate(model), []
    judged = min(levels, key=lambda s: abs(s - 0.7))
    names = [name.removesuffix(".weight") for name in prunable(model)]
    for name in names:
        others = [other for other in names if other != name]
        accuracy = {level: evaluate(prune(model, level, "layer", skip=others)) for level in levels}
        reports.append(Sensitivity(name, accuracy, baseline - accuracy[judged] > tolerance))
    return reports
