"""FLOPCounter: how much arithmetic a model does and how many bytes it must move, by layer and by operation.

The model runs once and the work of its kernels is computed from their shapes. `total` is matmul, convolution and
attention with PyTorch's convention (a multiply-add is 2, biases and masks are not counted, causal attention counts in
full), so it equals `torch.utils.flop_counter.FlopCounterMode`. Everything else is in `elementwise`: one per element
and arithmetic operation, where exp, erf and sqrt count as one operation. `bytes_moved` is a lower bound: each operand
is read once and each result written once; views move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, TilewiseError, type_name
from tilewise.profile.events import ProfileEvent, Recording

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved by one or more operations."""

    flops: int = 0
    elementwise: int = 0
    bytes_moved: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.elementwise + other.elementwise, self.bytes_moved + other.bytes_moved
        )

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: floating-point operations per byte moved."""
        return (self.flops + self.elementwise) / self.bytes_moved if self.bytes_moved else 0.0


@dataclass(frozen=True)
class OpCounts:
    """Result of FLOPCounter.

    `by_layer` and `by_op` split `total`; `layers` and `ops` also contain the element-wise work and the bytes moved.
    """

    total: int
    elementwise: int
    bytes_moved: int
    by_layer: dict[str, int]
    by_op: dict[str, int]
    layers: dict[str, Cost] = field(repr=False)
    ops: dict[str, Cost] = field(repr=False)
    forward: Cost
    backward: Cost

    @property
    def intensity(self) -> float:
        return (self.total + self.elementwise) / self.bytes_moved if self.bytes_moved else 0.0


class FLOPCounter(metaclass=ExplainsMethods):
    """Counts floating-point operations.

    >>> import numpy as np
    >>> from tilewise import nn
    >>> FLOPCounter().count_ops(nn.Linear(8, 4), np.ones((2, 8), np.float32)).total
    128
    """

    def count_ops(self, model: Any, input: Any, backward: bool = False) -> OpCounts:
        """Run `model(input)` once (and, with `backward`, the gradient of the sum of its result) and count."""
        from tilewise.tensor import Tensor, no_grad

        if not callable(model) or (hasattr(model, "state_dict") and not hasattr(model, "named_tensors")):
            raise ConfigurationError(f"count_ops needs a model of tilewise or a function, not {type_name(model)}")
        if isinstance(input, tuple) and all(isinstance(size, int) for size in input):
            raise ConfigurationError(f"count_ops runs the model on an input, not on a shape; pass np.zeros({input})")
        array = np.asarray(input) if not isinstance(input, Tensor) else input
        x = Tensor(array) if isinstance(array, np.ndarray) and array.dtype.kind == "f" else array
        with Recording() as recording:
            try:
                if backward:
                    _sum_of(model(x)).backward()
                else:
                    with no_grad():
                        model(x)
            except TilewiseError:
                raise
            except (TypeError, ValueError, AttributeError) as error:  # a function that makes a model, for example
                text = f"{type_name(model)} with {type_name(array)} raised {type(error).__name__}: {error}"
                raise ConfigurationError(f"count_ops calls a model with its input, and {text}") from error
        if backward and hasattr(model, "zero_grad"):
            model.zero_grad()
        return summarise(recording.events)


def _sum_of(result: Any) -> Any:
    """Return the sum of the model's first result, a scalar whose gradient can be computed."""
    if isinstance(result, tuple | list):
        result = result[0]
    if not hasattr(result, "backward"):
        raise ConfigurationError("count_ops with backward=True needs a model whose result is a Tensor")
    return result.sum()


def summarise(events: Iterable[ProfileEvent]) -> OpCounts:
    """Add up the work of recorded events by layer, operation and phase."""
    layers: dict[str, Cost] = {}
    ops: dict[str, Cost] = {}
    phases = {"forward": Cost(), "backward": Cost()}
    for event in events:
        cost = cost_of(event)
        if cost is None:
            continue
        name = op_name(event)
        layers[event.layer] = layers.get(event.layer, Cost()) + cost
        ops[name] = ops.get(name, Cost()) + cost
        phases[event.phase] += cost
    whole = phases["forward"] + phases["backward"]
    return OpCounts(
        total=whole.flops,
        elementwise=whole.elementwise,
        bytes_moved=whole.bytes_moved,
        by_layer={layer: cost.flops for layer, cost in layers.items() if cost.flops},
        by_op={name: cost.flops for name, cost in ops.items() if cost.flops},
        layers=layers,
        ops=ops,
        forward=phases["forward"],
        backward=phases["backward"],
    )


def op_name(event: ProfileEvent) -> str:
    """Return an operation's name in snake case, with `_grad` in the backward pass, however it ran."""
    if event.kind == "kernel":
        return event.name
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in event.name).strip("_").replace("mat_mul", "matmul")
    return f"{name}_grad" if event.phase == "backward" else name


def cost_of(event: ProfileEvent) -> Cost | None:
    """Return the work of one event; None if its inner events count it."""
    if event.kind == "module" or event.has_kernels or event.failed:
        return None
    if event.kind == "kernel" and event.parent is not None and event.parent.kind == "kernel":
        return None
    flops = _FLOPS[event.name](event) if event.name in _FLOPS and event.kind == "kernel" else 0
    bytes_moved = 0 if event.shares_memory else event.input_bytes + event.output_bytes
    return Cost(int(flops), int(_elementwise(event)), bytes_moved)


# --- Products: 2 operations per multiply-add ---


def _matmul(event: ProfileEvent) -> int:
    """Count 2 · (inner dimension) floating-point operations per element of the result."""
    inner = event.inputs[0][-1]
    return 2 * inner * math.prod(event.outputs[0]) if event.outputs else 0


def _conv2d(event: ProfileEvent) -> int:
    weight, (n, _, h, w) = event.inputs[1], event.outputs[0]
    return 2 * n * h * w * math.prod(weight)


def _conv2d_grad_input(event: ProfileEvent) -> int:
    (n, _, h, w), weight = event.inputs[0], event.inputs[1]
    return 2 * n * h * w * math.prod(weight)


def _conv2d_grad_weight(event: ProfileEvent) -> int:
    """Count floating-point operations over all input channels, groups or not, as PyTorch does."""
    (n, outs, h, w), channels = event.inputs[0], event.inputs[1][1]
    filter_size = event.outputs[0][2:]
    return 2 * n * h * w * outs * channels * math.prod(filter_size)


def _attention(event: ProfileEvent) -> int:
    (b, heads, t, d), s, dv = event.inputs[0], event.inputs[1][2], event.inputs[2][3]
    return 2 * b * heads * t * s * (d + dv)


def _attention_grad(event: ProfileEvent) -> int:
    """Count the floating-point operations of the gradient's four products, without recomputed scores."""
    (b, heads, t, d), s, dv = event.inputs[1], event.inputs[2][2], event.inputs[3][3]
    return 2 * b * heads * t * s * 2 * (d + dv)


_FLOPS = {
    "matmul": _matmul,
    "conv2d": _conv2d,
    "conv2d_grad_input": _conv2d_grad_input,
    "conv2d_grad_weight": _conv2d_grad_weight,
    "attention": _attention,
    "attention_grad": _attention_grad,
}

# --- Everything else: arithmetic operations per element, counted from the formulas ---

MOVES_ONLY = {"embedding", "embedding_grad", "cast", "cat", "copy", "expand", "get_item", "pad", "permute", "reshape"}
MOVES_ONLY |= {"set_item", "take_along_axis", "max_pool2d_grad"}
_PER_RESULT = {"gelu": 4, "gelu_grad": 8, "sigmoid": 3, "softmax": 5, "softmax_grad": 4, "log_softmax": 5}
_PER_RESULT |= {"log_softmax_grad": 4, "layer_norm": 7, "layer_norm_grad": 11, "batch_norm": 7, "batch_norm_grad": 9}
_PER_RESULT |= {"cross_entropy_grad": 4, "dropout": 2}
_PER_INPUT = {"sum": 1, "mean": 1, "max": 1, "var": 4, "cum_sum": 1, "cross_entropy": 5, "adam_step": 12}
_PER_SCORE = {"attention": 6, "attention_grad": 8}  # scale, mask and softmax of each score


def _elementwise(event: ProfileEvent) -> int:
    """Count the floating-point operations of an event other than those of products, fused ones included."""
    name = op_name(event)
    if name in MOVES_ONLY or event.shares_memory or not event.inputs:
        return 0
    first = math.prod(event.inputs[0])
    result = math.prod(event.outputs[0]) if event.outputs else 0
    # The multiply-adds of products are in `total`; only their fused epilogue counts here.
    if name in ("matmul", "conv2d"):
        return result * _fused_steps(event)
    if name in _PER_SCORE:
        q, k = (event.inputs[0], event.inputs[1]) if name == "attention" else (event.inputs[1], event.inputs[2])
        return _PER_SCORE[name] * math.prod(q[:3]) * k[2]
    if name in ("max_pool2d", "avg_pool2d"):
        return result * int(math.prod(event.window or (1,)))
    if name in _FLOPS:
        return 0
    if name in _PER_INPUT:
        return _PER_INPUT[name] * first
    return _PER_RESULT.get(name, 1) * result


def _fused_steps(event: ProfileEvent) -> int:
    """Count the operations per output element of a product's epilogue: bias, residual, activation."""
    bias, residual, activation = event.fused or (False, False, None)
    bias = bias or (event.name == "conv2d" and len(event.inputs) > 2)
    return int(bias) + int(residual) + {"relu": 1, "gelu": 4}.get(activation, 0)
