"""A model as a list of steps, so that each step can be watched in float and then replaced by an integer one.

`trace` folds batch norms into convolutions and takes ReLUs and residual additions along; what it does not know stays a
step of its own that runs in float. Teach it a class of yours with `traces`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, ShapeError, TilewiseError
from tilewise.models import ResidualBlock, ResNet8
from tilewise.nn.layers import GlobalAvgPool, folded
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
Pair = tuple[int, int]


@dataclass
class Step:
    """One operation: what kind, on the results of which earlier steps, with which numbers."""

    kind: str  # input, conv, linear, max_pool, avg_pool, global_pool, flatten, float
    name: str
    inputs: tuple[int, ...] = ()
    weight: Array | None = None
    bias: Array | None = None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    kernel: Pair = (1, 1)
    groups: int = 1
    relu: bool = False
    module: nn.Module | None = None  # of a float step


@dataclass
class Graph:
    """Steps in the order they run; step 0 is the input, the last one the result."""

    steps: list[Step] = field(default_factory=lambda: [Step("input", "input")])

    def add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def users(self, index: int) -> Iterator[Step]:
        return (step for step in self.steps if index in step.inputs)

    def run(self, x: Array, watch: Callable[[int, Array], None] | None = None) -> Array:
        """The model in float, showing `watch` every step's result."""
        results: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.steps):
                out = x if step.kind == "input" else _run_checked(step, [results[i] for i in step.inputs])
                results.append(out)
                if watch is not None:
                    watch(index, out)
        return results[-1]


def _run_checked(step: Step, inputs: list[Array]) -> Array:
    try:
        return run_float(step, inputs)
    except TilewiseError:
        raise
    except ValueError:
        shapes = " and ".join(str(i.shape) for i in inputs)
        raise ShapeError(f"{step.name} ({step.kind}) cannot take {shapes}: channels or sizes do not fit") from None


def run_float(step: Step, inputs: list[Array]) -> Array:
    """One step in float32."""
    dispatch, x = current_backend().dispatch, inputs[0]
    activation = "relu" if step.relu else None
    if step.kind == "conv":
        residual = inputs[1] if len(inputs) > 1 else None
        options = {"stride": step.stride, "padding": step.padding, "groups": step.groups}
        out: Array = dispatch("conv2d", x, step.weight, step.bias, activation=activation, residual=residual, **options)
        return out
    if step.kind == "linear":
        assert step.weight is not None
        out = dispatch("matmul", x, step.weight.T, bias=step.bias, activation=activation)
        return out
    if step.kind == "flatten":
        return x.reshape(len(x), math.prod(x.shape[1:]))
    if step.kind == "global_pool":
        out = x.mean((2, 3), dtype=np.float32)
        return out
    if step.kind == "max_pool":
        out = dispatch("max_pool2d", x, kernel=step.kernel, stride=step.stride, padding=step.padding)[0]
        return out
    if step.kind == "avg_pool":
        out = dispatch("avg_pool2d", x, kernel=step.kernel, stride=step.stride, padding=step.padding)
        return out
    assert step.module is not None
    result: Any = step.module(*[Tensor(i) for i in inputs])
    if not isinstance(result, Tensor):
        raise ConfigurationError(f"{step.name} gives a {type(result).__name__}; a step of a model gives one Tensor")
    return result.data


# --- from a model ---

Tracer = Callable[
    [Graph, Any, str, int], int
]  # graph, module, its name, the step it reads; returns the last step added
_TRACERS: dict[type, Tracer] = {}


def traces(kind: type) -> Callable[[Tracer], Tracer]:
    """Decorator: how a module of this class becomes steps."""

    def mark(tracer: Tracer) -> Tracer:
        _TRACERS[kind] = tracer
        return tracer

    return mark


def trace(model: nn.Module) -> Graph:
    """The steps of a model in eval mode."""
    graph = Graph()
    _module(graph, model, "", 0)
    return graph


def _module(graph: Graph, module: nn.Module, name: str, x: int) -> int:
    tracer = _TRACERS.get(type(module))
    if tracer is None:
        return graph.add(Step("float", name or type(module).__name__, (x,), module=module))
    return tracer(graph, module, name, x)


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def convolution(
    graph: Graph,
    conv: nn.Conv2d,
    name: str,
    x: int,
    relu: bool = False,
    norm: nn.BatchNorm2d | None = None,
    residual: int | None = None,
) -> int:
    """A convolution with what it takes along: a batch norm, a residual, a ReLU."""
    weight, bias = (conv.weight, conv.bias) if norm is None else folded(conv, norm)
    step = Step(
        "conv", name, (x,) if residual is None else (x, residual), np.array(weight.data), _copy(bias), relu=relu
    )
    step.stride, step.kernel, step.groups = conv.stride, conv.kernel_size, conv.groups
    step.padding = (conv.padding[0], conv.padding[1])
    return graph.add(step)


def _copy(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else np.array(tensor.data)


def linear(graph: Graph, layer: Any, name: str, x: int, relu: bool = False) -> int:
    return graph.add(Step("linear", name, (x,), np.array(layer.weight.data), _copy(layer.bias), relu=relu))


@traces(nn.Conv2d)
def _conv(graph: Graph, module: Any, name: str, x: int) -> int:
    if not module.is_even:
        return graph.add(Step("float", name, (x,), module=module))
    return convolution(graph, module, name, x)


@traces(nn.Linear)
def _linear(graph: Graph, module: Any, name: str, x: int) -> int:
    return linear(graph, module, name, x)


@traces(nn.Sequential)
def _sequential(graph: Graph, module: Any, name: str, x: int) -> int:
    layers = list(module.named_children())
    at = 0
    while at < len(layers):
        child, layer = layers[at]
        after = [type(other) for _, other in layers[at + 1 : at + 3]]
        full, at = _joined(name, child), at + 1
        if isinstance(layer, nn.Conv2d) and layer.is_even:
            following = layers[at][1] if at < len(layers) else None
            norm = following if isinstance(following, nn.BatchNorm2d) else None
            at += norm is not None
            relu = at < len(layers) and isinstance(layers[at][1], nn.ReLU)
            at += relu
            x = convolution(graph, layer, full, x, relu, norm)
        elif isinstance(layer, nn.Linear):
            relu = after[:1] == [nn.ReLU]
            at += relu
            x = linear(graph, layer, full, x, relu)
        else:
            x = _module(graph, layer, full, x)
    return x


@traces(ResidualBlock)
def _residual_block(graph: Graph, module: Any, name: str, x: int) -> int:
    shortcut = x if module.skip is None else convolution(graph, module.skip, _joined(name, "skip"), x)
    hidden = convolution(graph, module.conv1, _joined(name, "conv1"), x, relu=True)
    return convolution(graph, module.conv2, _joined(name, "conv2"), hidden, relu=True, residual=shortcut)


@traces(ResNet8)
def _resnet8(graph: Graph, module: Any, name: str, x: int) -> int:
    x = convolution(graph, module.conv, _joined(name, "conv"), x, relu=True)
    for block in ("block1", "block2", "block3", "pool", "fc"):
        x = _module(graph, getattr(module, block), _joined(name, block), x)
    return x


@traces(nn.Dropout)
def _dropout(_graph: Graph, _module_: Any, _name: str, x: int) -> int:
    return x


@traces(nn.Flatten)
def _flatten(graph: Graph, _module_: Any, name: str, x: int) -> int:
    return graph.add(Step("flatten", name, (x,)))


@traces(GlobalAvgPool)
def _global_pool(graph: Graph, _module_: Any, name: str, x: int) -> int:
    return graph.add(Step("global_pool", name, (x,)))


def _pool(kind: str) -> Tracer:
    def tracer(graph: Graph, module: Any, name: str, x: int) -> int:
        options = {"kernel": module.kernel_size, "stride": module.stride, "padding": module.padding}
        return graph.add(Step(kind, name, (x,), **options))

    return tracer


_TRACERS[nn.MaxPool2d], _TRACERS[nn.AvgPool2d] = _pool("max_pool"), _pool("avg_pool")
