"""`load(path)`: an ONNX file as a module.

The network keeps the file's nodes as steps in an order in which they can run. A step is a layer of nn or an operation
(layers.py); a convolution with the norm and activation behind it is one step, a `Sequential`, which knows how to run
them in one pass. Values are let go after their last reader.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, FileFormatError, ShapeError, TilewiseError, UnavailableError
from tilewise.nn import Module, Parameter
from tilewise.onnx import layers
from tilewise.onnx.graph import OnnxGraph, Port
from tilewise.onnx.layers import Builder, LayerCall, unique, with_ends
from tilewise.onnx.operators import TABLE, Value, array, limit_sizes, most_alive, tensor
from tilewise.onnx.reader import one_line, read_graph
from tilewise.tensor import Array, Tensor


def load(path: str | os.PathLike[str]) -> Network:
    """Load the network of an ONNX file in eval mode; call it with arrays or Tensors, in the order of its inputs.

    >>> model = tilewise.onnx.load("resnet18.onnx")  # doctest: +SKIP
    >>> logits = model(images)  # doctest: +SKIP
    """
    graph = read_graph(path)
    try:
        return Network(graph, Path(path).name).eval()
    except TilewiseError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError):
        raise FileFormatError(f"{path} has an invalid node") from None


class Weights(Module):
    """Holder of the trainable constants that single operations, not layers, read."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        for name, value in arrays.items():
            setattr(self, name, Parameter(value))


class Network(Module):
    """A module made from an ONNX graph; `inputs` and `outputs` describe its values.

    One output is a Tensor; several are a dict by name.
    """

    reports_readers = True

    def __init__(self, graph: OnnxGraph, title: str = "the network") -> None:
        """Build the layers of a graph; constants that operations read become parameters or buffers."""
        refuse_unsupported(graph, title)
        self.inputs, self.outputs, self.opset, self.title = graph.inputs, graph.outputs, graph.opset, title
        builder = Builder(graph, set(dir(Network)))
        self.steps = tuple(with_ends(builder.steps, {port.name for port in graph.outputs}))
        for name, layer in builder.layers.items():
            setattr(self, name, layer)
        used_names = set(dir(Module))
        self._names = {name: unique(name, used_names) for name in builder.trained}
        self.weights = Weights({own: graph.constants[name] for name, own in self._names.items()})
        self._constants = {n: a for n, a in graph.constants.items() if n in builder.read_names and n not in self._names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network on inputs in their order, by their names, or in a dict by their names."""
        by_name = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else None
        if by_name is not None:
            return super().__call__(**{**by_name, **kwargs})
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network on its inputs, in the order of the file or by name."""
        values = self._values(args, kwargs)
        input_bytes = sum(array(v).nbytes for v in values.values()) + sum(
            t._array.nbytes for _, t in self.named_tensors()
        )
        shapes = [tuple(values[port.name].shape) for port in self.inputs]
        with limit_sizes(input_bytes):
            try:
                self._run(values)
            except ShapeError as error:
                conflicts = map(fixed_dimension_error, self.inputs, shapes)  # of a batch that the file fixes
                conflict = next(filter(None, conflicts), "")
                if conflict:
                    raise ShapeError(f"{conflict}: {error}") from None
                raise
        results = {port.name: tensor(values[port.name]) for port in self.outputs}
        self._check_batch(shapes, results)
        return next(iter(results.values())) if len(results) == 1 else results

    def _check_batch(self, shapes: list[Shape], results: dict[str, Tensor]) -> None:
        """Raise ShapeError if a batch other than the file's was merged into the file's batch by the operations."""
        for port, shape in zip(self.inputs, shapes, strict=True):
            conflict = fixed_dimension_error(port, shape)
            for output in self.outputs:
                declared, actual = output.shape, results[output.name].shape
                if conflict and declared and shape[0] > 1 and actual[:1] == declared[:1] == (port.shape or ())[:1]:
                    raise ShapeError(f"{conflict}: its operations would merge the images")

    def is_as_loaded(self) -> bool:
        """Whether every layer still has the class that it was loaded with."""
        return all(layers.kinds_of(getattr(self, step.layer)) == step.kinds for step in self.steps)

    def constants(self) -> dict[str, Array]:
        """Return the arrays that operations read, by their names in the file."""
        return self._constants | {name: getattr(self.weights, own).data for name, own in self._names.items()}

    def _run(self, values: dict[str, Value]) -> None:
        """Run all layers on `values` (by name); each value is freed after its last reader."""
        alive = sum(array(value).nbytes for value in values.values())
        most = alive + most_alive()
        for step in self.steps:
            layer = getattr(self, step.layer)
            try:
                result = layer(*(values[name] if name else None for name in step.inputs))
            except TilewiseError:
                raise
            except MemoryError:
                raise UnavailableError(f"{step.nodes[0]} needs more memory than there is") from None
            except (ValueError, TypeError, IndexError, OverflowError, ArithmeticError, AttributeError) as error:
                shapes = ", ".join(str(values[n].shape) for n in step.inputs if n)
                raise ShapeError(
                    f"{step.nodes[0]} cannot work on {shapes or 'nothing'}: {_first_line(error)}"
                ) from None
            _store_results(values, step, result)
            alive += sum(array(values[name]).nbytes for name in step.outputs if name)
            if alive > most:
                raise UnavailableError(
                    f"up to {step.nodes[0]} the results take {alive >> 20} MiB at a time, which is too much"
                )
            for name in step.done:
                alive -= array(values.pop(name)).nbytes

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Value]:
        """Return the values that are known before the first layer, by name: constants, weights, inputs."""
        values: dict[str, Value] = dict(self._constants)
        values |= {name: getattr(self.weights, own) for name, own in self._names.items()}
        return values | self._inputs(args, kwargs)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the inputs by name, checked and converted to the file's dtypes."""
        names = [port.name for port in self.inputs]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or set(inputs) != set(names):
            raise ShapeError(one_line(f"{self.title} takes the inputs {', '.join(names) or 'none'}"))
        return {port.name: as_input(inputs[port.name], port) for port in self.inputs}

    def _plan_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Return the inputs as arrays in the file's order and dtypes."""
        values = self._inputs(args, kwargs)
        return [values[port.name]._array for port in self.inputs] if len(self.outputs) == 1 else None

    def example(self, batch: int | None = None, seed: int = 0, free: int = 8, **sizes: Any) -> list[Array]:
        """Draw random inputs of shapes that the network accepts; see `example_inputs`."""
        return example_inputs(self.inputs, batch, seed, free, **sizes)


def as_input(value: Any, port: Port) -> Tensor:
    """Convert an argument to the dtype of an input; raise if its shape is not valid."""
    converted = value if isinstance(value, Tensor) else Tensor(value)
    if converted.dtype != port.dtype:
        if port.dtype.kind == "f" and converted.dtype.kind in "fiub":
            converted = converted.astype(port.dtype)
        elif port.dtype.kind in "iu" and converted.dtype.kind in "iub":
            converted = Tensor(converted.data.astype(port.dtype))
        else:
            raise DtypeError(one_line(f"the input {port.name} takes {port.dtype}, not {converted.dtype}"))
    problem = fixed_dimension_error(port, converted.shape, is_batch_free=True)  # nodes that insist on a batch say so
    if problem:
        raise ShapeError(problem)
    return converted


def refuse_unsupported(graph: OnnxGraph, title: str) -> None:
    """Raise an error that lists all unsupported operations of a graph, with their nodes."""
    unsupported: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op not in TABLE:
            unsupported.setdefault(node.op, []).append(node.name)
    if unsupported:
        listing = "; ".join(f"{op} ({_first_few(names)})" for op, names in sorted(unsupported.items())[:40])
        raise UnavailableError(f"{title} uses operations that tilewise does not support: {one_line(listing)}")


def _first_few(names: list[str]) -> str:
    return ", ".join(n[:80] for n in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return one_line((str(error).splitlines() or [type(error).__name__])[0][:200])


def _store_results(values: dict[str, Value], step: LayerCall, result: Any) -> None:
    """Add a layer's results to `values` by name; raise FileFormatError if there are too few."""
    results = result if isinstance(result, tuple) else (result,)
    for name, value in zip(step.outputs, results, strict=False):
        if name:
            values[name] = value
    if any(name and values.get(name) is None for name in step.outputs):  # a missing input may have been handed on
        raise FileFormatError(f"{step.nodes[-1]} produces {len(results)} results, not {len(step.outputs)}")


# --- example inputs ---


_MAX_ELEMENTS = 1 << 20  # of one input without its batch; arbitrary, a file may claim to take anything
_PIXELS = 224  # height and width of images where the file leaves them open: the usual size of classifiers
Shape = tuple[int, ...]


def example_inputs(
    ports: Sequence[Port],
    batch: int | None = None,
    seed: int = 0,
    free: int = 8,
    pixels: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> list[Array]:
    """Draw random inputs: normally distributed floats, or small integers.

    `batch` replaces the first size of every input, also where the file fixes it; without it a fixed size stays and an
    open one is 1. `free` is the size of other open dimensions, `pixels` that of the height and width of images (default
    224). `shapes` fixes the shapes of some inputs by name; a symbolic size that appears in one of them has the same
    value in all other inputs.
    """
    shapes = dict(shapes or {})
    sizes = _named_sizes(ports, shapes)
    for port in ports:
        if port.name not in shapes:
            shapes[port.name] = _example_shape(port, sizes, batch, (free, pixels or _PIXELS))
    return [_draw(port, shapes[port.name], np.random.default_rng([seed, i])) for i, port in enumerate(ports)]


def fixed_dimension_error(port: Port, shape: Sequence[int], is_batch_free: bool = False) -> str:
    """Return why `shape` is invalid for an input, or ""; `is_batch_free` permits a batch size other than the file's."""
    if port.shape is None:
        return ""
    if len(shape) != len(port.shape):
        text = ", ".join("?" if n is None else str(n) for n in port.shape)
        return one_line(f"the input {port.name!r} takes shape ({text}), not {tuple(shape)}")
    for axis, (size, expected) in enumerate(zip(shape, port.shape, strict=True)):
        if isinstance(expected, int) and size != expected and not (is_batch_free and axis == 0):
            return one_line(
                f"the file fixes dimension {axis} of the input {port.name!r} at {expected}, and the "
                f"shape {tuple(shape)} has {size} there"
            )
    return ""


def _named_sizes(ports: Iterable[Port], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the values of symbolic sizes that follow from `shapes`; raise where one contradicts its input."""
    sizes: dict[str, int] = {}
    for port in ports:
        shape = shapes.get(port.name)
        if shape is None:
            continue
        problem = fixed_dimension_error(port, shape, is_batch_free=True)
        if problem:
            raise ShapeError(problem)
        sizes |= {name: size for name, size in zip(port.shape or (), shape, strict=False) if isinstance(name, str)}
    return sizes


def _example_shape(port: Port, sizes: dict[str, int], batch: int | None, defaults: tuple[int, int]) -> Shape:
    """Choose a shape for an input; `sizes` has symbolic sizes and is extended. `defaults`: (free, pixels)."""
    dimensions = port.shape or ()
    shape = []
    for axis, size in enumerate(dimensions):
        is_batch = axis == 0 and len(dimensions) > 1
        if is_batch and batch is not None:
            shape.append(batch)
        elif isinstance(size, int):
            shape.append(size)
        else:
            is_pixel = len(dimensions) == 4 and axis > 1 and port.dtype.kind == "f"
            default = 1 if is_batch else defaults[1] if is_pixel else defaults[0]
            shape.append(_size_of(size, sizes, default))
        if isinstance(size, str):
            sizes.setdefault(size, shape[-1])
    return tuple(shape)


def _size_of(name: str | None, sizes: Mapping[str, int], default: int) -> int:
    """Return an open size: by its symbolic name, as a sum of known names and numbers, or the default."""
    if name is None:
        return default
    terms = [part.strip() for part in name.split("+")]
    if all(term.isdigit() or term in sizes for term in terms):
        return sum(int(term) if term.isdigit() else sizes[term] for term in terms)
    return sizes.get(name, default)


def _draw(port: Port, shape: Shape, rng: np.random.Generator) -> Array:
    """Draw an input array of this shape: normally distributed floats, else zeros and ones."""
    if math.prod(shape[1:]) > _MAX_ELEMENTS or math.prod(shape) > _MAX_ELEMENTS << 6:
        raise UnavailableError(one_line(f"the input {port.name} of shape {tuple(shape)} is too large to generate"))
    if port.dtype.kind == "f":
        return rng.standard_normal(shape).astype(port.dtype)
    return rng.integers(0, 2, shape).astype(port.dtype)
