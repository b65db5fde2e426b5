"""Optimizers (SGD, Adam, AdamW), gradient clipping and the cosine schedule, with PyTorch's formulas.

An optimizer's state is a flat dictionary of arrays, so a checkpoint is one safetensors file and a resumed run continues
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.registry import current_backend
from tilewise.errors import ConfigurationError, GradientError, ShapeError
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]


class Optimizer:
    """Base class: parameters, a learning rate that may change between steps, and named state arrays per parameter."""

    slots: tuple[str, ...] = ()  # names of the state arrays per parameter

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        """Store the parameters to train and the learning rate."""
        self.params = list(params)
        if not all(isinstance(p, Tensor) for p in self.params):
            raise ConfigurationError("an optimizer takes tensors: pass model.parameters()")
        if not self.params:
            raise ConfigurationError("an optimizer needs at least one parameter")
        if not isinstance(lr, int | float | np.number) or not lr >= 0:
            raise ConfigurationError(f"the learning rate must be a number of at least 0, not {lr!r}")
        self.lr, self.steps = lr, 0
        self.state: list[dict[str, Array]] = [{} for _ in self.params]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.steps += 1
        for p, state in zip(self.params, self.state, strict=True):
            if p.grad is None:
                continue
            if p.grad.shape != p.shape:
                raise GradientError(f"a parameter of shape {p.shape} has a gradient of shape {p.grad.shape}")
            self.update(p.data, p.grad.data, state)
            p._version[0] += 1

    def update(self, param: Array, grad: Array, state: dict[str, Array]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Array]:
        """Return the state of a run by name; arrays are shared, not copied."""
        flat: dict[str, Array] = {"steps": np.array(self.steps), "lr": np.array(self.lr, np.float64)}
        for i, state in enumerate(self.state):
            flat |= {f"{i}.{name}": value for name, value in state.items()}
        return flat

    def load_state_dict(self, flat: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`; names and shapes must match this optimizer's parameters."""
        arrays = {name: np.asarray(value) for name, value in flat.items()}
        state: list[dict[str, Array]] = [{} for _ in self.params]
        for name, value in arrays.items():
            index, _, slot = name.partition(".")
            if name in ("steps", "lr"):
                continue
            if not index.isdigit() or int(index) >= len(state) or slot not in self.slots:
                raise ConfigurationError(f"{name} does not belong to this optimizer's state")
            if value.shape != self.params[int(index)].shape:
                raise ShapeError(f"{name} has shape {value.shape}, its parameter {self.params[int(index)].shape}")
            state[int(index)][slot] = value.copy()
        if not {"steps", "lr"} <= arrays.keys():
            raise ConfigurationError("this optimizer state has no steps or no lr")
        self.state, self.steps, self.lr = state, int(arrays["steps"]), float(arrays["lr"])


class SGD(Optimizer):
    """Gradient descent with optional momentum (plain or Nesterov) and L2 weight decay."""

    slots = ("momentum",)

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        """Store the parameters and settings."""
        super().__init__(params, lr)
        if nesterov and momentum <= 0:
            raise ConfigurationError("Nesterov's method needs a momentum above 0")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov

    def update(self, param: Array, grad: Array, state: dict[str, Array]) -> None:
        """Update one parameter in place."""
        if self.weight_decay:
            grad = grad + self.weight_decay * param
        if self.momentum:
            if "momentum" not in state:
                state["momentum"] = grad.copy()
            else:
                state["momentum"] *= self.momentum
                state["momentum"] += grad
            grad = grad + self.momentum * state["momentum"] if self.nesterov else state["momentum"]
        param -= self.lr * grad


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient."""

    slots = ("m", "v")
    decoupled = False

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Store the parameters and settings; `betas` are the decay rates of both moments."""
        super().__init__(params, lr)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(f"betas must be in [0, 1), not {betas}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def update(self, param: Array, grad: Array, state: dict[str, Array]) -> None:
        """Update one parameter and its moments in place, with one fused kernel."""
        if not state:
            state["m"], state["v"] = np.zeros_like(param, order="C"), np.zeros_like(param, order="C")
        current_backend().dispatch(
            "adam_step",
            param,
            grad,
            state["m"],
            state["v"],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled=self.decoupled,
            step=self.steps,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    decoupled = True

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their joint norm is at most `max_norm`; return the norm before scaling."""
    grads = [p.grad.data for p in params if p.grad is not None]
    dispatch = current_backend().dispatch
    norm = math.sqrt(sum(dispatch("sum_of_squares", g) for g in grads))
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # also true for a NaN norm, which then reaches the weights as in PyTorch
        for g in grads:
            dispatch("scale_in_place", g, factor)
    return norm


def cosine_schedule(step: int, total: int, peak: float, warmup: int = 0, floor: float = 0.0) -> float:
    """Return the learning rate at `step` of `total`: linear warm-up to `peak`, then a half cosine down to `floor`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
